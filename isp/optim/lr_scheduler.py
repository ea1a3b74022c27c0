"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from isp.settings import LRSchedulerConfig

__all__ = ["learning_rate"]


def learning_rate(step: int, *, peak: float, total_steps: int, config: LRSchedulerConfig) -> float:
    """The rate of step number `step`, counted from 0, of a run of `total_steps`.

    Rises in a straight line to `peak` within `warmup_steps`, stays there, and decays over the last
    `config.num_decay_steps` to `min_lr_factor * peak`, which the last step of the run has; steps
    after it keep that. The numbers are torchtitan's.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    num_decay = config.num_decay_steps(total_steps)
    done = step + 1 - (total_steps - num_decay)
    if done <= 0:
        return peak
    progress = min(1.0, done / num_decay) if num_decay else 1.0
    left = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
    }[config.decay_type]
    return peak * (config.min_lr_factor + (1 - config.min_lr_factor) * left)
