"""`GradScaler`: the factor that keeps float16 gradients between underflow and overflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isp.core.optim.config import GradScalerConfig

__all__ = ["GradScaler"]


class GradScaler:
    """A loss scale that is lowered when gradients overflow, and raised when they long have not.

    The loss is multiplied by `scale`, so all gradients are; whoever updates the weights divides
    them once. Every rank calls `update` with the same verdict (that of the global gradient norm),
    and no rank holds a number of its own: the scales are equal without a collective.

    [Note: Hysteresis] The first `hysteresis - 1` overflows since the scale was last raised leave it
    as it is, because a single bad batch says little; from then on every overflow lowers it.

    Source: Micikevicius et al. 2018, mixed precision training; the rules are those of Megatron-LM,
    core/optimizer/grad_scaler.py, `DynamicGradScaler`, and max_scale is InternEvo's.
    """

    def __init__(self, config: GradScalerConfig) -> None:
        self._config = config
        self._scale = float(config.initial_scale)
        self._steps_since_change = 0
        """Finite steps since the scale was raised, or since a step was not finite."""
        self._overflows_left = config.hysteresis
        """Steps that are not finite and still leave the scale as it is, plus one."""

    @property
    def scale(self) -> float:
        """The factor on the loss of the next step."""
        return self._scale

    @property
    def can_back_off(self) -> bool:
        """Whether the scale is above its minimum: a smaller one may still help."""
        return self._scale > self._config.min_scale

    def update(self, *, overflow: bool) -> None:
        """Take note of a step: whether its gradients were not finite, the same on all ranks."""
        if overflow:
            self._steps_since_change = 0
            self._overflows_left = max(0, self._overflows_left - 1)
            if not self._overflows_left:
                self._set(self._scale * self._config.backoff_factor)
            return
        self._steps_since_change += 1
        if self._steps_since_change == self._config.growth_interval:
            self._steps_since_change = 0
            self._overflows_left = self._config.hysteresis
            self._set(self._scale * self._config.growth_factor)

    def state_dict(self) -> dict[str, Any]:
        """Everything that `update` changes: plain numbers, the same on all ranks."""
        return {
            "scale": self._scale,
            "steps_since_change": self._steps_since_change,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; limits and intervals are this scaler's own."""
        config = self._config
        self._set(state["scale"])
        self._steps_since_change = min(state["steps_since_change"], config.growth_interval - 1)
        self._overflows_left = min(state["overflows_left"], config.hysteresis)

    def _set(self, scale: float) -> None:
        self._scale = min(max(scale, self._config.min_scale), self._config.max_scale)
