"""The settings of recomputation, in a file without torch, as configurations are read before it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Recomputation"]


class Recomputation(NamedTuple):
    """The keys of `model` that decide what is kept for backward; see `ModelConfig`."""

    checkpoint: float = 0.0
    """Fraction of the blocks, counted from the first, whose activations are recomputed in
    backward."""
    keeps_attention: bool = False
    """Recomputed blocks keep the results of attention."""
    distributed: bool = False
    """Each tensor rank keeps 1/p of the input of each recomputed block."""
    offload: bool = False
    """The inputs of recomputed blocks are kept in host memory."""
    segment: int = 0
    """Only the first of so many recomputed blocks keeps its input; 0: each does."""
    between_linears: bool = False
    """The other blocks recompute everything between their linears."""
    mlp_tile_tokens: int = 0
    """Tokens of a tile of a module without attention; 0: no tiles."""
