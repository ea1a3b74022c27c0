"""`GradScaler`: the loss scale, which keeps float16 gradients from underflow and overflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isp.core.optim.config import GradScalerConfig

__all__ = ["GradScaler"]


class GradScaler:
    """A loss scale, lowered after overflows of gradients, raised after many steps without one.

    The loss is multiplied by `scale`, and so are all gradients; the optimizer divides them once.
    Every rank calls `update` with the same flag, from the global gradient norm, so the scales stay
    equal without a collective. The first `hysteresis - 1` overflows after the scale was raised do
    not lower it, because a single bad batch means little; each later overflow does.

    Source: Micikevicius et al. 2018, mixed precision training; the rules are those of Megatron-LM,
    core/optimizer/grad_scaler.py, `DynamicGradScaler`, and max_scale is InternEvo's.
    """

    def __init__(self, config: GradScalerConfig) -> None:
        self._config = config
        self._scale = float(config.initial_scale)
        self._steps_since_change = 0
        """Number of finite steps since the scale was raised or a step overflowed."""
        self._overflows_left = config.hysteresis
        """Number of overflows until one lowers the scale, including that one; 0: each does."""

    @property
    def scale(self) -> float:
        """The factor on the loss of the next step."""
        return self._scale

    @property
    def can_back_off(self) -> bool:
        """True if the scale is above its minimum, so that it can still be lowered."""
        return self._scale > self._config.min_scale

    def update(self, *, overflow: bool) -> None:
        """Count a step and adapt the scale; `overflow`: its gradients were not finite.

        All ranks must pass the same value.
        """
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
        """Return the numbers that `update` changes, the same on all ranks."""
        return {
            "scale": self._scale,
            "steps_since_change": self._steps_since_change,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, within this scaler's own limits and intervals."""
        config = self._config
        self._set(state["scale"])
        self._steps_since_change = min(state["steps_since_change"], config.growth_interval - 1)
        self._overflows_left = min(state["overflows_left"], config.hysteresis)

    def _set(self, scale: float) -> None:
        self._scale = min(max(scale, self._config.min_scale), self._config.max_scale)
