"""The cut of one parameter over the ranks of an axis: intervals of its global tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from isp.core.mesh.partition import chunk_range
from isp.core.mesh.topology import Axis

__all__ = [
    "Box",
    "Interval",
    "Matrices",
    "ParameterLayout",
    "boxes_of",
]

Interval = tuple[int, int]
"""(start, stop) along the split dim of the global tensor."""


class Matrices(NamedTuple):
    """The matrices that a weight [.., A, B] consists of, for updates of whole ones."""

    of_block: bool = True
    """Whether it is a linear's or experts' in a block; else of a table, a head or a router."""
    dim: int = -2
    """The dim along which several are fused: that of output features."""
    sizes: tuple[int, ...] = ()
    """Their sizes along it, as the model's code splits them; empty: one is all."""
    heads: int = 0
    """Attention heads along it, if it is of q, k or v."""


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """The place of a rank's shard in the global parameter.

    The parameter is cut along `dim` into `parts` shards, of which this is number `index`. A fused
    parameter (q, k and v in one) is a row of `segments`, each of which is cut by itself, so that
    every rank gets its share of each. A segment of n is cut as `torch.chunk` cuts: ceil(n / parts)
    each, the last ones shorter or empty.

    Of parameters that are cut as one, by rows, a shard is what the cut leaves of each.
    """

    global_shape: tuple[int, ...]
    """Shape of the whole parameter."""
    reduce_over: Axis
    """The ranks whose gradients of this shard are partial sums, to be added up."""
    dim: int = 0
    """The dimension that is split."""
    parts: int = 1
    """Number of shards; 1 if every rank holds the whole parameter."""
    index: int = 0
    """Number of this rank's shard."""
    segments: tuple[int, ...] = ()
    """Sizes along `dim` of what is fused; nothing is if empty."""
    ahead: int = 0
    """Rows of other parameters that come before, where several are cut as one."""
    behind: int = 0
    """Rows of other parameters that come after."""
    groups: int = 1
    """Equal runs of shards, over which the parameter is cut first."""
    cut_over: Axis = Axis.WEIGHT
    """The ranks that have the other shards."""
    matrices: Matrices | None = None
    """Those of the whole parameter; None: it has one dimension, is tied, or is no matrix."""
    decays: bool = True
    """Whether weight decay applies to it; not to norms, biases and vectors."""

    def __post_init__(self) -> None:
        if not self.segments:
            object.__setattr__(self, "segments", (self.global_shape[self.dim],))
        assert sum(self.segments) == self.global_shape[self.dim], self
        assert 0 <= self.index < self.parts, self
        assert not (self.ahead or self.behind) or (self.dim == 0 and len(self.segments) == 1), self
        assert self.parts % self.groups == 0, self

    @property
    def sharded(self) -> bool:
        """Whether this rank holds less than the whole."""
        return self.parts > 1

    def intervals(self, index: int | None = None) -> tuple[Interval, ...]:
        """The parts of the global tensor along `dim` in shard `index` (this rank's), in order."""
        index = self.index if index is None else index
        intervals, begin = [], 0
        group, within = divmod(index, self.parts // self.groups)
        for size in self.segments:
            of_group = chunk_range(self.ahead + size + self.behind, self.groups, group)
            own = chunk_range(len(of_group), self.parts // self.groups, within)
            part = of_group[own.start : own.stop]
            start, stop = (min(max(end - self.ahead, 0), size) for end in (part.start, part.stop))
            intervals.append((begin + start, begin + stop))
            begin += size
        return tuple(intervals)

    @cached_property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of each rank's piece as it travels, padding included, with the cut dim in front."""
        length = math.ceil(self._run_length / (self.parts // self.groups))
        return (length, *self.global_shape[: self.dim], *self.global_shape[self.dim + 1 :])

    @property
    def _run_length(self) -> int:
        """Along `dim`, of the first of the `groups`."""
        return math.ceil(self.global_shape[self.dim] / self.groups)

    @property
    def of_group(self) -> ParameterLayout:
        """The cut of what the ranks of its group have together; itself if there is one group."""
        if self.groups == 1:
            return self
        group, index = divmod(self.index, self.parts // self.groups)
        own = len(chunk_range(self.global_shape[self.dim], self.groups, group))
        before, after = self.global_shape[: self.dim], self.global_shape[self.dim + 1 :]
        return replace(
            self,
            global_shape=(*before, own, *after),
            segments=(),
            parts=self.parts // self.groups,
            index=index,
            groups=1,
            cut_over=Axis.EXPERT_WEIGHT,
        )

    @cached_property
    def travels_as_it_lies(self) -> bool:
        """Whether the pieces are the shards, and lie one behind the other in the whole."""
        return self.dim == 0 and self.global_shape[0] % self.parts == 0

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        length = sum(stop - start for start, stop in self.intervals())
        return (*self.global_shape[: self.dim], length, *self.global_shape[self.dim + 1 :])

    def joined(self, pieces: Tensor) -> Tensor:
        """The global tensor: a view of all pieces as they travel, one behind the other.

        Of several groups it is a copy.
        """
        if self.groups > 1:
            runs = pieces.unflatten(0, (self.groups, -1))
            pieces = runs[:, : self._run_length].flatten(0, 1)
        return pieces[: self.global_shape[self.dim]].movedim(0, self.dim)

    def shard(self, full: Tensor) -> Tensor:
        """This rank's part of the global tensor; a view if it is in one piece."""
        if tuple(full.shape) != self.global_shape:
            raise ValueError(
                f"a full tensor of shape {self.global_shape} is needed, got {tuple(full.shape)}"
            )
        pieces = [full.narrow(self.dim, a, b - a) for a, b in self.intervals()]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


class Box(NamedTuple):
    """A block of a global tensor, and where it lies in a local one."""

    offsets: tuple[int, ...]
    """Its corner in the global tensor."""
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    """Its corner in the local tensor."""

    def view(self, local: Tensor) -> Tensor:
        """The block in the local tensor, without autograd."""
        block = local.detach()
        for dim, (start, size) in enumerate(zip(self.local_offsets, self.sizes, strict=True)):
            block = block.narrow(dim, start, size)
        return block

    def inside(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box | None:
        """What lies in the block of `sizes` at `offsets` of the global tensor; None if nothing."""
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self[:2], offsets, sizes, strict=True))
        start = tuple(map(max, self.offsets, offsets))
        size = tuple(end - begin for end, begin in zip(ends, start, strict=True))
        moved = zip(self.local_offsets, start, self.offsets, strict=True)
        return Box(start, size, tuple(x + a - b for x, a, b in moved)) if min(size) > 0 else None


def boxes_of(layout: ParameterLayout, rows: Interval | None = None) -> tuple[Box, ...]:
    """The boxes that make up rows (start, stop) of dim 0 of the local shard; all rows if None.

    Local offsets count from the first of the rows. Nothing is empty: a shard without elements has
    no boxes.
    """
    begin, end = (0, layout.local_shape[0]) if rows is None else rows
    dim, sizes, zeros = layout.dim, list(layout.local_shape), [0] * len(layout.local_shape)
    boxes = []
    for global_start, local_start, length in _runs(layout):
        start, size, local = list(zeros), list(sizes), list(zeros)
        start[dim], size[dim], local[dim] = global_start, length, local_start
        if dim == 0:
            first, last = max(begin, local_start), min(end, local_start + length)
            start[0], local[0] = global_start + first - local_start, first - begin
        else:
            start[0], first, last = begin, begin, end
        size[0] = last - first
        if all(n > 0 for n in size):
            boxes.append(Box(tuple(start), tuple(size), tuple(local)))
    return tuple(boxes)


def _runs(layout: ParameterLayout) -> Iterator[tuple[int, int, int]]:
    """(global start, local start, length) along the split dim; what touches is joined."""
    local = 0
    run: tuple[int, int, int] | None = None
    for start, stop in layout.intervals():
        if run is not None and run[0] + run[2] == start:
            run = (run[0], run[1], run[2] + stop - start)
        else:
            if run is not None:
                yield run
            run = (start, local, stop - start)
        local += stop - start
    assert run is not None
    yield run
