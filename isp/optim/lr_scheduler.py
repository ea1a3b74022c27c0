"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from isp.settings import LRSchedulerConfig

__all__ = ["check_schedule", "learning_rate"]


def learning_rate(step: int, *, peak: float, total_steps: int, config: LRSchedulerConfig) -> float:
    """The rate of step number `step`, counted from 0, of a run of `total_steps`.

    Rises in a straight line to `peak` within `warmup_steps`, stays there, and decays over the last
    `num_decay_steps` to `min_lr_factor * peak`, which the last step of the run has; steps after
    it keep that. The numbers are torchtitan's.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    num_decay = num_decay_steps(total_steps, config)
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


def num_decay_steps(total_steps: int, config: LRSchedulerConfig) -> int:
    """Length of the decay: the steps after the warm-up, or the last `decay_ratio` of the run."""
    if config.decay_ratio is None:
        return total_steps - config.warmup_steps
    return round(total_steps * config.decay_ratio)


def check_schedule(total_steps: int, config: LRSchedulerConfig) -> None:
    """Raise ValueError if warm-up and decay do not fit into a run of `total_steps`."""
    warmup, ratio = config.warmup_steps, config.decay_ratio
    if warmup > total_steps:
        raise ValueError(
            f"lr_scheduler.warmup_steps={warmup} must be at most training.steps={total_steps}"
        )
    num_decay = num_decay_steps(total_steps, config)
    if warmup + num_decay > total_steps:
        raise ValueError(
            f"lr_scheduler.warmup_steps={warmup} and lr_scheduler.decay_ratio={ratio}"
            f" ({num_decay} steps) do not fit into training.steps={total_steps}: use a decay_ratio"
            f" of at most {(total_steps - warmup) / total_steps:.3g}, or null"
        )
