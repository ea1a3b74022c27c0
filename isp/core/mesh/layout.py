"""`ParameterLayout`, the cut of one parameter over the ranks of an axis, and the boxes of a shard.

A rank's part of a parameter is a union of boxes, and all ranks' boxes together are the parameter.
See [Note: A shard is a set of boxes] in docs/design/notes/mesh.md.
"""

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
    """The matrices in a weight [.., A, B], for optimizers that need whole matrices."""

    of_block: bool = True
    """True for linears and experts of a block, False for embedding tables, heads and routers."""
    dim: int = -2
    """The dim of output features, along which several matrices may be fused."""
    sizes: tuple[int, ...] = ()
    """Sizes of the fused matrices along `dim`, as the model splits them; empty: not fused."""
    heads: int = 0
    """Number of attention heads along `dim`, for a weight of q, k or v; else 0."""


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """A rank's shard of a parameter, described by its place in the global tensor.

    The parameter is cut along `dim` into `parts` shards, of which this is number `index`. A fused
    parameter (q, k and v in one) consists of `segments`, each of which is cut separately, so that
    every rank gets a part of each. A segment of n is cut like `torch.chunk`: into ceil(n / parts)
    each, the last ones shorter or empty.

    Several parameters may be cut as if they were concatenated along their rows. A rank then has the
    rows of each parameter that are in its part of all rows.
    """

    global_shape: tuple[int, ...]
    """Shape of the whole parameter."""
    reduce_over: Axis
    """Axis over which gradients of this shard are summed: each of its ranks has a partial sum."""
    dim: int = 0
    """The dimension that is split."""
    parts: int = 1
    """Number of shards; 1 if every rank holds the whole parameter."""
    index: int = 0
    """Index of this rank's shard."""
    segments: tuple[int, ...] = ()
    """Sizes along `dim` of the parts of a fused parameter; empty: not fused."""
    rows_before: int = 0
    """Number of rows of other parameters before this one, if several are cut as one."""
    rows_after: int = 0
    """Number of rows of other parameters after this one, if several are cut as one."""
    groups: int = 1
    """Number of groups of ranks: the parameter is cut over the groups, then within each group."""
    cut_over: Axis = Axis.WEIGHT
    """Axis whose ranks have the other shards."""
    matrices: Matrices | None = None
    """Matrices of the whole parameter; None: it has one dimension, is tied, or is no matrix."""
    decays: bool = True
    """Weight decay applies to the parameter; False for norms, biases and vectors."""

    def __post_init__(self) -> None:
        if not self.segments:
            object.__setattr__(self, "segments", (self.global_shape[self.dim],))
        assert sum(self.segments) == self.global_shape[self.dim], self
        assert 0 <= self.index < self.parts, self
        # Several parameters are cut as one only along rows, and without fused segments.
        assert not (self.rows_before or self.rows_after) or (
            self.dim == 0 and len(self.segments) == 1
        ), self
        assert self.parts % self.groups == 0, self

    @property
    def sharded(self) -> bool:
        """True if the parameter is cut into several shards."""
        return self.parts > 1

    def intervals(self, index: int | None = None) -> tuple[Interval, ...]:
        """Return which indices along `dim` of the full parameter shard `index` consists of.

        There is one interval (begin, end) for each segment, such as q, k and v; it may be empty.
        `index` None: this rank's shard.
        """
        index = self.index if index is None else index
        intervals, begin = [], 0
        # Shards are numbered group by group.
        group, within = divmod(index, self.parts // self.groups)
        for size in self.segments:
            # Cut this parameter together with the rows of others before and after it. Then clip the
            # interval to the rows of this parameter.
            of_group = chunk_range(self.rows_before + size + self.rows_after, self.groups, group)
            own = chunk_range(len(of_group), self.parts // self.groups, within)
            part = of_group[own.start : own.stop]
            start, stop = (
                min(max(end - self.rows_before, 0), size) for end in (part.start, part.stop)
            )
            intervals.append((begin + start, begin + stop))
            begin += size
        return tuple(intervals)

    @cached_property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that each rank sends in a gather, with the cut dim in front.

        It is the shard, padded to the length of the longest shard, since all ranks have to send
        equally many elements.
        """
        length = math.ceil(self._run_length / (self.parts // self.groups))
        return (length, *self.global_shape[: self.dim], *self.global_shape[self.dim + 1 :])

    @property
    def _run_length(self) -> int:
        """Length along `dim` of what the first group of ranks has; no other group has more."""
        return math.ceil(self.global_shape[self.dim] / self.groups)

    @property
    def of_group(self) -> ParameterLayout:
        """The layout of this shard in a smaller tensor: the part of the parameter of its group.

        With one group, this is the layout itself.
        """
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
    def is_cut_in_place(self) -> bool:
        """True if the shards, one after another in memory, are the whole parameter.

        No shard then has padding, and the cut dim is the first.
        """
        return self.dim == 0 and self.global_shape[0] % self.parts == 0

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        length = sum(stop - start for start, stop in self.intervals())
        return (*self.global_shape[: self.dim], length, *self.global_shape[self.dim + 1 :])

    def joined(self, pieces: Tensor) -> Tensor:
        """Return the whole parameter, given what an all-gather has received.

        `pieces`: the padded shards of all ranks (`piece_shape`), concatenated along dim 0. The
        result is a view of them, or a copy if there are several groups of ranks.
        """
        if self.groups > 1:
            # Each group's pieces may end in padding, which is dropped group by group.
            runs = pieces.unflatten(0, (self.groups, -1))
            pieces = runs[:, : self._run_length].flatten(0, 1)
        return pieces[: self.global_shape[self.dim]].movedim(0, self.dim)

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's shard of the global tensor, a view if it is one interval.

        Raises ValueError if `full` does not have the global shape.
        """
        if tuple(full.shape) != self.global_shape:
            raise ValueError(
                f"a full tensor of shape {self.global_shape} is needed, got {tuple(full.shape)}"
            )
        pieces = [full.narrow(self.dim, a, b - a) for a, b in self.intervals()]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


class Box(NamedTuple):
    """A part of a global tensor, an interval of each dim, and its place in a local tensor."""

    offsets: tuple[int, ...]
    """First index of the box along each dim of the global tensor."""
    sizes: tuple[int, ...]
    """Length of the box along each dim."""
    local_offsets: tuple[int, ...]
    """First index of the box along each dim of the local tensor."""

    def view(self, local: Tensor) -> Tensor:
        """Return a view of the box in the local tensor, without autograd."""
        block = local.detach()
        for dim, (start, size) in enumerate(zip(self.local_offsets, self.sizes, strict=True)):
            block = block.narrow(dim, start, size)
        return block

    def inside(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box | None:
        """Return the overlap with the part of `sizes` at global `offsets`; None if it is empty."""
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self[:2], offsets, sizes, strict=True))
        start = tuple(map(max, self.offsets, offsets))
        size = tuple(end - begin for end, begin in zip(ends, start, strict=True))
        # The overlap is as far from the box's begin in the local tensor as in the global one.
        moved = zip(self.local_offsets, start, self.offsets, strict=True)
        return Box(start, size, tuple(x + a - b for x, a, b in moved)) if min(size) > 0 else None


def boxes_of(layout: ParameterLayout, rows: Interval | None = None) -> tuple[Box, ...]:
    """Return the boxes of the rows (start, stop) in dim 0 of the local shard; None: of all rows.

    Local offsets count from the first of these rows. No box is empty; a shard without elements has
    no boxes.
    """
    begin, end = (0, layout.local_shape[0]) if rows is None else rows
    dim, sizes, zeros = layout.dim, list(layout.local_shape), [0] * len(layout.local_shape)
    boxes = []
    for global_start, local_start, length in _runs(layout):
        start, size, local = list(zeros), list(sizes), list(zeros)
        start[dim], size[dim], local[dim] = global_start, length, local_start
        if dim == 0:  # rows are indices of the split dim: clip the interval to them
            first, last = max(begin, local_start), min(end, local_start + length)
            start[0], local[0] = global_start + first - local_start, first - begin
        else:
            start[0], first, last = begin, begin, end
        size[0] = last - first
        if all(n > 0 for n in size):
            boxes.append(Box(tuple(start), tuple(size), tuple(local)))
    return tuple(boxes)


def _runs(layout: ParameterLayout) -> Iterator[tuple[int, int, int]]:
    """Yield (global start, local start, length) along the split dim, joining adjacent intervals."""
    local = 0
    run: tuple[int, int, int] | None = None
    for start, stop in layout.intervals():
        # Adjacent intervals, as of a fused parameter that is not sharded, become one box.
        if run is not None and run[0] + run[2] == start:
            run = (run[0], run[1], run[2] + stop - start)
        else:
            if run is not None:
                yield run
            run = (start, local, stop - start)
        local += stop - start
    assert run is not None
    yield run
