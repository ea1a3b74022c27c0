"""Inputs of blocks of which each tensor rank keeps a part. Loads no torch."""

from __future__ import annotations

from isp.parallel.config import ParallelConfig
from isp.parallel.partition import any_of

__all__ = ["check_distributable"]


def check_distributable(hidden_size: int, parallel: ParallelConfig, seq_len: int) -> None:
    """Raise ValueError if tensor ranks cannot keep a part of a block's input each."""
    size, mode = parallel.tensor.size, parallel.tensor.mode
    if mode.splits_sequence:
        raise ValueError(
            f"model.checkpoint_distribute_activations is for mtp mode: in {mode} mode each tensor"
            f" rank keeps its own tokens only; set it to false"
        )
    if (elements := seq_len * hidden_size) % size:
        usable = any_of([n for n in range(1, 2 * size) if elements % n == 0])
        raise ValueError(
            f"parallel.tensor.size={size} must divide the {seq_len} tokens of a sequence times"
            f" model.hidden_size={hidden_size} for model.checkpoint_distribute_activations:"
            f" use {usable}, or set it to false"
        )
