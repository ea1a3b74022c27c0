"""`Phase`, the words for what a rank is doing."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Phase"]


class Phase(StrEnum):
    """A rank's activity, in words for people: the one vocabulary of hooks, logs and clocks."""

    DATA = "data loading"
    FORWARD = "forward"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    """A forward again, inside the backward pass, for activations that were not kept."""
    BACKWARD = "backward"
    FORWARD_BACKWARD = "forward and backward"
    """The four before, of all micro-batches: what a clock measures as one."""
    REDUCE = "gradient reduction"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    PROFILE = "writing a profile"
    OTHER = "other work"
    """Between these: agreeing, reporting, waiting for other stages."""
