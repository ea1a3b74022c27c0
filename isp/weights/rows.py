"""Weights cut over a group, where lengths may not divide.

A dim of N on p ranks is cut as `torch.chunk` cuts: ceil(N / p) each, the last ranks less or none.
Collectives move equal pieces, so short pieces travel padded, and the padding, which lies behind the
last one, is cut off as a view. Rows (dim 0) lie one piece behind the other in the full tensor: they
are gathered where they are read and sent from where they are. Any other dim costs a copy.
"""

from __future__ import annotations

import math

from torch import Tensor

from isp.parallel.layout import ParameterLayout

__all__ = ["joined", "pad_rows", "piece_shape", "pieces", "trimmed"]


def piece_shape(layout: ParameterLayout) -> tuple[int, ...]:
    """Shape of each rank's piece as it travels, padding included, with the cut dim in front."""
    length = math.ceil(layout.global_shape[layout.dim] / layout.parts)
    rest = layout.global_shape[: layout.dim] + layout.global_shape[layout.dim + 1 :]
    return (length, *rest)


def pad_rows(x: Tensor, num_rows: int) -> Tensor:
    """x [n, ..] with zeros behind it, [num_rows, ..]; x itself if it has as many."""
    if x.shape[0] == num_rows:
        return x.contiguous()
    padded = x.new_zeros(num_rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded


def pieces(full: Tensor, layout: ParameterLayout) -> Tensor:
    """A full tensor as its p padded pieces, one behind the other; itself if it is cut by rows."""
    return pad_rows(full.movedim(layout.dim, 0), layout.parts * piece_shape(layout)[0])


def joined(gathered: Tensor, layout: ParameterLayout) -> Tensor:
    """The full tensor from its padded pieces, the dual of `pieces`."""
    return gathered[: layout.global_shape[layout.dim]].movedim(0, layout.dim)


def trimmed(piece: Tensor, layout: ParameterLayout) -> Tensor:
    """This rank's shard from its padded piece."""
    return piece.movedim(0, layout.dim).narrow(layout.dim, 0, layout.local_shape[layout.dim])
