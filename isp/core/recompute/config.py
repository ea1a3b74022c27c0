"""The settings of recomputation. This file does not import torch: a configuration is read first."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Recomputation"]


class Recomputation(NamedTuple):
    """The settings of `model` that determine what is kept for backward; see `ModelConfig`."""

    checkpoint: float = 0.0
    """Fraction of the blocks, counted from the first, whose activations are recomputed in
    backward."""
    keeps_attention: bool = False
    """True if recomputed blocks keep the results of attention."""
    distributed: bool = False
    """True if each tensor rank keeps 1/p of the input of each recomputed block."""
    offload: bool = False
    """True if the inputs of recomputed blocks are kept in host memory."""
    segment: int = 0
    """Number of consecutive recomputed blocks of which only the first keeps its input; 0: each
    block does."""
    between_linears: bool = False
    """True if blocks that are not recomputed as a whole recompute everything between their linears
    and attention, such as norms and activations."""
    mlp_tile_tokens: int = 0
    """Number of tokens in a tile of a module without attention; 0: no tiles."""
