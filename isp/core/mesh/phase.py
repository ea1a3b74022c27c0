"""`Phase`, the phases of a step and of a run."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Phase"]


class Phase(StrEnum):
    """The phase of a step, or other work of a run, as hooks, logs and clocks name it."""

    DATA = "data loading"
    FORWARD = "forward"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    """A forward within the backward pass, for activations that were not kept."""
    BACKWARD = "backward"
    FORWARD_BACKWARD = "forward and backward"
    """Forward, loss, recompute and backward of all micro-batches, which a clock measures as one."""
    REDUCE = "gradient reduction"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    PROFILE = "writing a profile"
    OTHER = "other work"
    """Everything else: agreement between ranks, reports, waiting for other stages."""
