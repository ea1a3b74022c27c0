"""Initial weights: equal in every layout, and drawn only for a rank's own shards."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isp.core.layers.module import MasterStream
from isp.core.mesh import Axis
from isp.core.mesh.layout import ParameterLayout
from tests.toolkit import Operations

STREAM = MasterStream(5, "layers.3.attention.qkv")
SHAPES = {
    "matrix": ((300, 200), ()),
    "one tile": ((5, 3), ()),
    "whole tiles": ((512, 256), ()),
    "fused": ((420, 140), (260, 80, 80)),
    "vector": ((40_000,), ()),
    "narrow": ((3_000, 7), ()),
    "few rows": ((2, 900), ()),
}


def _layouts(name: str, parts: int) -> list[list[ParameterLayout]]:
    """Return the layouts of all shards of a shape, cut along `dim`."""
    shape, segments = SHAPES[name]
    return [
        [
            ParameterLayout(
                global_shape=shape,
                dim=dim,
                parts=parts,
                index=index,
                segments=segments if dim == 0 else (),
                reduce_over=Axis.DATA,
            )
            for index in range(parts)
        ]
        for dim in range(len(shape))
    ]


def _normal(stream: MasterStream, layout: ParameterLayout, std: float) -> Tensor:
    return stream.drawn(layout, lambda tile, g: tile.normal_(0.0, std, generator=g))


class Drawn(Operations):
    """Counts the random numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__(self._count)
        self.total = 0

    def _count(self, name: str, args: tuple[Any, ...], _: Any) -> None:
        if name == "normal_" and not args[0].is_meta:
            self.total += args[0].numel()


@pytest.mark.parametrize("name", SHAPES)
def test_initial_shards_are_parts_of_one_tensor(name: str) -> None:
    """Catches values that depend on the layout, for uneven, empty and fused cuts."""
    ((whole_layout,), *_) = _layouts(name, 1)
    whole = _normal(STREAM, whole_layout, 0.02)
    assert whole.std() == pytest.approx(0.02, rel=5 / math.sqrt(2 * whole.numel()))
    assert len(whole.unique()) > 0.99 * whole.numel()
    for shards in itertools.chain(_layouts(name, 2), _layouts(name, 3), _layouts(name, 8)):
        for layout in shards:
            assert torch.equal(_normal(STREAM, layout, 0.02), layout.shard(whole)), layout


@pytest.mark.parametrize(("name", "first"), [("matrix", 70), ("fused", 260), ("vector", 16_500)])
def test_rows_of_a_fused_parameter_are_initialized_as_part_of_it(name: str, first: int) -> None:
    """Catches q, k and v drawn from other tiles than those of the fused parameter."""
    ((whole_layout,), *_) = _layouts(name, 1)
    rows = whole_layout.global_shape[0]
    wanted = _normal(STREAM, whole_layout, 1.0)[first : first + 80]
    stream = MasterStream(STREAM.seed, STREAM.name, first, rows)
    for layout in itertools.chain(*_layouts(name, 3)):
        own = replace(layout, global_shape=tuple(wanted.shape), segments=())
        assert torch.equal(_normal(stream, own, 1.0), own.shard(wanted)), own


def test_seeds_and_names_give_different_weights() -> None:
    """Catches a seed or a name that has no effect."""
    ((layout,), *_) = _layouts("matrix", 1)
    others = [STREAM, MasterStream(6, STREAM.name), MasterStream(5, "layers.2.attention.qkv")]
    values = [_normal(stream, layout, 1.0) for stream in others]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(values, 2))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_draws_only_its_own_tiles(dim: int) -> None:
    """Catches a rank that draws the whole tensor; only tiles that are cut may be drawn in
    excess.
    """
    layout = ParameterLayout(
        global_shape=(2000, 2000), dim=dim, parts=8, index=3, reduce_over=Axis.DATA
    )
    with Drawn() as drawn:
        own = _normal(STREAM, layout, 1.0)
    assert own.numel() <= drawn.total <= own.numel() + 2 * 128 * 2000
