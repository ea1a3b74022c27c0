"""This rank's part of a tensor, under the name that it has in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isp.checkpoint.boxes import boxes_of
from isp.parallel.layout import Interval, ParameterLayout

__all__ = ["Piece", "Shard"]


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a global tensor, with its data."""

    offsets: tuple[int, ...]
    """Its corner in the global tensor."""
    data: Tensor
    """A view into the tensor that the rank works with, or a copy."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


@dataclass(frozen=True, eq=False)
class Shard:
    """The pieces of a global tensor that this rank has; none if it has no element of it."""

    key: str
    """Its name in the checkpoint."""
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @classmethod
    def of_rows(
        cls, key: str, local: Tensor, layout: ParameterLayout, rows: Interval | None = None
    ) -> Shard:
        """`local` as rows (start, stop) of the shard that `layout` describes; all if None."""
        boxes = boxes_of(layout, rows)
        pieces = tuple(Piece(box.offsets, box.view(local)) for box in boxes)
        return cls(key, layout.global_shape, local.dtype, pieces)

    @classmethod
    def whole(cls, key: str, data: Tensor) -> Shard:
        """A tensor that is entirely on this rank."""
        shape = tuple(data.shape)
        return cls(key, shape, data.dtype, (Piece((0,) * len(shape), data.detach()),))

    def with_data(self, data: Sequence[Tensor]) -> Shard:
        """The same boxes with other data, one tensor each."""
        pieces = tuple(Piece(p.offsets, d) for p, d in zip(self.pieces, data, strict=True))
        return Shard(self.key, self.global_shape, self.dtype, pieces)
