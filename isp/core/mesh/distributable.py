"""Inputs of blocks of which each tensor rank keeps a part. Loads no torch."""

from __future__ import annotations

from isp.core.mesh.config import TensorConfig
from isp.core.mesh.partition import usable

__all__ = ["check_distributable"]


def check_distributable(tensor: TensorConfig, hidden_size: int, seq_len: int) -> None:
    """Raise ValueError if each tensor rank cannot keep a part of a block's input."""
    if tensor.mode.splits_sequence:
        raise ValueError(
            f"model.checkpoint_distribute_activations is for mtp mode: in {tensor.mode} mode each"
            f" tensor rank keeps its own tokens only; set it to false"
        )
    if (elements := seq_len * hidden_size) % tensor.size:
        raise ValueError(
            f"parallel.tensor.size={tensor.size} must divide the {seq_len} tokens of a sequence"
            f" times model.hidden_size={hidden_size} for model.checkpoint_distribute_activations:"
            f" use {usable(elements, tensor.size)}, or set it to false"
        )
