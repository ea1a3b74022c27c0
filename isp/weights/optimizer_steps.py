"""How often optimizers have stepped: fused ones change weights without torch counting it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["OptimizerSteps", "optimizer_steps"]


@dataclass
class OptimizerSteps:
    """A clock that no run owns, like torch's hooks on all optimizers themselves."""

    count: int = 0


@cache
def optimizer_steps() -> OptimizerSteps:
    """The steps of all torch optimizers of this process since the first call."""
    steps = OptimizerSteps()

    def stepped(*_: Any) -> None:
        steps.count += 1

    register_optimizer_step_post_hook(stepped)
    return steps
