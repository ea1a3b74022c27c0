"""The facts every layer with parameters of its own tells the runtime, and how values are drawn.

[Note: Tiles] Random values are drawn by tiles of the whole parameter, each from a generator that is
seeded with the run's seed, the parameter's name and the tile's place. A rank draws the tiles that
its shard overlaps, and no others: the values are the same in every layout, and the time is that of
its shard, but for tiles that are cut. Tiles of this size take a tenth longer than one long tensor.
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
"""Rows and columns of a tile."""


class _Piece(NamedTuple):
    """What a shard has of a tile, along one dim."""

    tile: int
    """The tile's number."""
    within: slice
    """Of the tile."""
    there: slice
    """Of the shard."""


def _pieces(intervals: Iterable[Interval], side: int) -> Iterator[_Piece]:
    """The tiles of `side` that a shard of `intervals` overlaps."""
    done = 0
    for start, stop in intervals:
        for tile in range(start // side, -(-stop // side) if stop > start else 0):
            first, last = max(start, tile * side), min(stop, (tile + 1) * side)
            there = slice(done + first - start, done + last - start)
            yield _Piece(tile, slice(first - tile * side, last - tile * side), there)
        done += stop - start


@dataclass(frozen=True)
class MasterStream:
    """Random numbers for one parameter: a function of the run's seed and its name alone.

    Those of rows of a larger parameter are rows of its numbers.
    """

    seed: int
    name: str
    """Of the larger parameter, if it is rows of one."""
    first: int = 0
    """The first of these rows."""
    whole: int | None = None
    """Rows of the larger parameter; None: there is none."""

    @property
    def generator_seed(self) -> int:
        digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def drawn(
        self, layout: ParameterLayout, fill: Callable[[Tensor, torch.Generator], object]
    ) -> Tensor:
        """This rank's shard of what `fill` draws tile by tile, float32 on CPU [Note: Tiles]."""
        rows, *rest = layout.global_shape
        shape = rows if self.whole is None else self.whole, math.prod(rest)
        if layout.dim and len(rest) > 1:  # tiles are of rows, and this cuts within them
            whole = replace(layout, dim=0, parts=1, index=0, segments=())
            return layout.shard(self.drawn(whole, fill)).contiguous()
        width = min(_TILE, shape[1])
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
            name = f"{self.name}/{place[0].tile}/{place[1].tile}"
            generator.manual_seed(MasterStream(self.seed, name).generator_seed)
            tile = torch.empty(size)
            fill(tile, generator)
            matrix[place[0].there, place[1].there] = tile[place[0].within, place[1].within]
        return shard


class ParallelModule(nn.Module):
    """A module whose parameters are shards, each with a layout that says of what.

    `name` is its qualified name in the whole model, by which its transfers are logged.
    """

    weight_name = "weight"

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.layouts: dict[str, ParameterLayout] = {}

    @property
    def title(self) -> str:
        """Its name, in messages."""
        return self.name or type(self).__name__

    def add_shard(
        self, name: str, layout: ParameterLayout, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Register parameter `name`, uninitialised, of the shape of this rank's shard."""
        shard = torch.empty(layout.local_shape, device=device, dtype=dtype)
        self.register_parameter(name, nn.Parameter(shard))
        self.layouts[name] = layout


class RowsOf(NamedTuple):
    """Rows of a parameter, under the name that it has in a checkpoint."""

    name: str
    first: int = 0
    whole: int | None = None
    """Rows of that parameter; None: these are all."""

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of that parameter, of rows of this `shape`."""
        return shape if self.whole is None else (self.whole, *shape[1:])


def named_parameters(model: nn.Module) -> Iterator[ShardedParameter]:
    """The parameters of a model of `ParallelModule`s with their layouts, in order of declaration.

    Raises TypeError for a parameter that belongs to a module which declares no layout.
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
                    f"parameter {name} is held by {type(module).__name__}, which declares no"
                    f" layout: derive it from ParallelModule"
                )
            yield ShardedParameter(name, parameter, module.layouts[local])


def bind_names(model: nn.Module) -> None:
    """Tell every `ParallelModule` its qualified name."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelModule):
            module.name = name
