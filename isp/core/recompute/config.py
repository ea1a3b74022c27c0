"""What of a model's blocks is computed again in backward instead of kept. Loads no torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Recomputation"]


class Recomputation(NamedTuple):
    """The keys of `model` that say what is kept for backward; see `ModelConfig`."""

    checkpoint: float = 0.0
    """Fraction of the blocks, counted from the first, whose activations are recomputed in
    backward."""
    keeps_attention: bool = False
    """Of these all but attention is."""
    distributed: bool = False
    """A part of the input of each of these is kept on each tensor rank."""
    offload: bool = False
    """Their inputs are kept on the host."""
    segment: int = 0
    """Of so many of them the first one's input is kept; 0: of each."""
    between_linears: bool = False
    """In the other blocks what lies between their linears is computed again."""
    mlp_tile_tokens: int = 0
    """Tokens of a tile of a module without attention; 0: no tiles."""
