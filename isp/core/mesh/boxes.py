"""Boxes: where a rank's rows lie in the whole parameter.

[Note: A shard is a set of boxes] A shard of a parameter is one interval of its split dim, or, where
q, k and v are fused, one interval of each. An optimizer's shard is some rows of dim 0 of that. What
is left is always a union of boxes of the global tensor, which tile it when all ranks are put
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from isp.core.mesh.layout import Interval, ParameterLayout

__all__ = ["Box", "boxes_of"]


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
