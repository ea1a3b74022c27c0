"""`Cargo`, what a transfer carries: its purpose, for programs, and its name, for people."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = ["UNNAMED", "Cargo", "Purpose"]


class Purpose(StrEnum):
    """The kind of cargo, hence what could be computed meanwhile; said by its launcher."""

    WEIGHT = "weights"
    """A full weight or bias, gathered to be read."""
    WEIGHT_GRADIENT = "weight gradients"
    """The same of a gradient, summed over the ranks that share the weights."""
    REPLICA_GRADIENT = "gradients of replicas"
    PUBLISHED_WEIGHT = "updated weights"
    """The rows that other ranks have updated."""
    ACTIVATION = "activations"
    """The input or output of a layer, or both ways what a mapping makes of it."""
    REGATHERED_ACTIVATION = "activations, gathered again"
    """The input of a layer in backward, beside the gradient of the input."""
    OUTPUT_GRADIENT = "gradients of outputs"
    INPUT_GRADIENT = "gradients of inputs"
    """Beside which the gradient of the weight is computed."""
    HEADS = "heads"
    """Sequence exchanged for heads, around attention, and their gradients."""
    LOGITS = "logits"
    """And their gradients."""
    LOSS = "loss"
    """The parts of a loss over a vocabulary that is split."""
    STAGE_ACTIVATION = "activations between stages"
    """And their gradients."""
    DATA = "data"
    CONTROL = "numbers"
    """Metrics, norms, and what ranks agree upon."""


class Cargo(NamedTuple):
    """A transfer's load; its text is for people."""

    purpose: Purpose = Purpose.CONTROL
    layer: str = ""
    """The layer or parameter, by its path in the model; empty where it is none's alone."""
    tensor: str = ""
    """The tensor, such as `weight.grad`, or what it is."""

    def __str__(self) -> str:
        return ".".join(part for part in (self.layer, self.tensor) if part)


UNNAMED = Cargo()
"""Numbers without a name."""
