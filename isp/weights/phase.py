"""The phases of a step in which a weight is read."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Phase"]


class Phase(StrEnum):
    """Why a layer reads its weight."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    """A forward again, inside the backward pass, for activations that were not kept."""
    BACKWARD = "backward"
