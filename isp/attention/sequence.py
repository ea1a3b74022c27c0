"""This rank's slice of sequences that are split over ranks, padded where they do not divide."""

from __future__ import annotations

import torch
from torch import Tensor

from isp.comm import Channel

__all__ = ["pad_sequence", "padded_length", "shard_sequence"]


def padded_length(length: int, num_ranks: int) -> int:
    """The least multiple of `num_ranks` that holds `length` tokens."""
    return -(-length // num_ranks) * num_ranks


def pad_sequence(x: Tensor, length: int, *, dim: int = 1, value: float = 0) -> Tensor:
    """x with `value` after its end along `dim`, up to `length`; x itself if it is that long."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_full(shape, value)), dim)


def shard_sequence(x: Tensor, channel: Channel, *, dim: int = 1, value: float = 0) -> Tensor:
    """This rank's slice: x [B, S, ..] on every rank -> [B, S'/p, ..], with S padded to S'.

    Tokens, targets and positions are cut alike, so each rank's rotary angles are those of its own
    tokens. The mask of padded rows is `AttentionMask.padded`.
    """
    padded = pad_sequence(x, padded_length(x.shape[dim], channel.size), dim=dim, value=value)
    size = padded.shape[dim] // channel.size
    return padded.narrow(dim, channel.rank * size, size)
