"""Weights split by rows over a group, where rows may not divide.

A weight of N rows on p ranks is cut as `torch.chunk` cuts: ceil(N / p) rows each, the last ranks
fewer or none. Collectives move equal pieces, so short pieces travel padded; all padding lies behind
the last row and is cut off as a view.
"""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["pad_rows", "rows_per_rank"]


def rows_per_rank(num_rows: int, size: int) -> int:
    """Rows of each piece of N = `num_rows` on p = `size` ranks, padding included."""
    return math.ceil(num_rows / size)


def pad_rows(x: Tensor, num_rows: int) -> Tensor:
    """x [n, ..] with zeros behind it, [num_rows, ..]; x itself if it has as many."""
    if x.shape[0] == num_rows:
        return x
    padded = x.new_zeros(num_rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded
