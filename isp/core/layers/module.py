"""`ParallelModule`, whose parameters are shards with layouts, and the drawing of initial values.

Initial values are drawn tile by tile, so that they are the same in every layout. See
[Note: Tiles] in docs/design/notes/layers.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isp.core.mesh.layout import Interval, ParameterLayout
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = [
    "MasterStream",
    "ParallelModule",
    "RowsOf",
    "bind_names",
    "named_parameters",
]


_TILE = 128
"""Number of rows, and of columns, of a tile of random values, which is drawn at once."""


class _Piece(NamedTuple):
    """The indices along one dim that a shard has of one tile of random values."""

    tile: int
    """Index of the tile."""
    within: slice
    """The indices, counted from the begin of the tile."""
    there: slice
    """The same indices, counted from the begin of the shard."""


def _pieces(intervals: Iterable[Interval], side: int) -> Iterator[_Piece]:
    """Yield the overlaps of a shard with tiles of length `side`, along one dim.

    `intervals` are the shard's parts of that dim.
    """
    done = 0  # the length of the intervals before, which is where the next begins in the shard
    for start, stop in intervals:
        for tile in range(start // side, -(-stop // side) if stop > start else 0):
            first, last = max(start, tile * side), min(stop, (tile + 1) * side)
            there = slice(done + first - start, done + last - start)
            yield _Piece(tile, slice(first - tile * side, last - tile * side), there)
        done += stop - start


@dataclass(frozen=True)
class MasterStream:
    """The random numbers of one parameter, which depend only on the run's seed and its name.

    A parameter that consists of rows of a larger parameter gets the random values that these rows
    have in the larger one.
    """

    seed: int
    name: str
    """Name of the parameter, or of the larger parameter."""
    first: int = 0
    """Index of the parameter's first row in the larger parameter."""
    whole: int | None = None
    """Number of rows of the larger parameter; None: there is no larger parameter."""

    @property
    def generator_seed(self) -> int:
        """The seed of a `torch.Generator`, from a hash of seed and name."""
        digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def drawn(
        self, layout: ParameterLayout, fill: Callable[[Tensor, torch.Generator], object]
    ) -> Tensor:
        """Return this rank's shard of the values that `fill` draws, float32 on CPU.

        Draws only the tiles that the shard overlaps. See [Note: Tiles] in
        docs/design/notes/layers.md.
        """
        rows, *rest = layout.global_shape
        shape = rows if self.whole is None else self.whole, math.prod(rest)
        # The parameter is tiled as a matrix [rows, product of the other dims]. With three or more
        # dims, a cut along a later one is no interval of columns: draw all and take the shard.
        if layout.dim and len(rest) > 1:
            whole = replace(layout, dim=0, parts=1, index=0, segments=())
            return layout.shard(self.drawn(whole, fill)).contiguous()
        width = min(_TILE, shape[1])
        # In a narrow matrix, a tile is taller, so that it has as many elements as in a wide one.
        sides = _TILE * _TILE // max(width, 1), width
        cut: list[tuple[Interval, ...]] = [((0, rows),), ((0, shape[1]),)]
        cut[layout.dim] = layout.intervals()
        cut[0] = tuple((self.first + start, self.first + stop) for start, stop in cut[0])
        shard = torch.empty(layout.local_shape)
        if not shard.numel():
            return shard
        matrix = shard.view(-1, shape[1] if layout.dim == 0 else layout.local_shape[1])
        generator = torch.Generator()
        pieces = [list(_pieces(of_dim, side)) for of_dim, side in zip(cut, sides, strict=True)]
        for place in product(*pieces):
            begin = [piece.tile * side for piece, side in zip(place, sides, strict=True)]
            size = [min(side, n - a) for a, side, n in zip(begin, sides, shape, strict=True)]
            # The whole tile is drawn, seeded by its index: ranks that share it get equal values.
            name = f"{self.name}/{place[0].tile}/{place[1].tile}"
            generator.manual_seed(MasterStream(self.seed, name).generator_seed)
            tile = torch.empty(size)
            fill(tile, generator)
            matrix[place[0].there, place[1].there] = tile[place[0].within, place[1].within]
        return shard


class ParallelModule(nn.Module):
    """A module whose parameters are shards.

    `layouts` has, for each parameter, how it is cut over the ranks (`ParameterLayout`). `name` is
    the module's qualified name in the whole model, which `bind_names` sets and logs of transfers
    show.
    """

    weight_name = "weight"

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.layouts: dict[str, ParameterLayout] = {}

    @property
    def title(self) -> str:
        """The module's name in messages: its qualified name, or its type's if it has none."""
        return self.name or type(self).__name__

    def add_shard(
        self, name: str, layout: ParameterLayout, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Register parameter `name`, uninitialized, with the shape of this rank's shard."""
        shard = torch.empty(layout.local_shape, device=device, dtype=dtype)
        self.register_parameter(name, nn.Parameter(shard))
        self.layouts[name] = layout


class RowsOf(NamedTuple):
    """Which rows (indices along dim 0) of a parameter in a checkpoint a parameter is read from."""

    name: str
    """Name of the parameter in the checkpoint."""
    first: int = 0
    """Index of the first of these rows."""
    whole: int | None = None
    """Number of rows of the whole parameter; None: these are all its rows."""

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole parameter, given the `shape` of these rows."""
        return shape if self.whole is None else (self.whole, *shape[1:])


def named_parameters(model: nn.Module) -> Iterator[ShardedParameter]:
    """Yield the parameters of a model of `ParallelModule`s, each with its `ParameterLayout`.

    They come in the order in which modules register them. A shared parameter is yielded once, with
    its first name. Raises TypeError for a parameter of a module that is no `ParallelModule`.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{local}" if prefix else local
            if not isinstance(module, ParallelModule):
                raise TypeError(
                    f"parameter {name} belongs to a {type(module).__name__}, which does not say how"
                    f" it is cut over ranks: derive the class from ParallelModule, and register the"
                    f" parameter with add_shard"
                )
            yield ShardedParameter(name, parameter, module.layouts[local])


def bind_names(model: nn.Module) -> None:
    """Set the qualified name of every `ParallelModule` in `model`."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelModule):
            module.name = name
