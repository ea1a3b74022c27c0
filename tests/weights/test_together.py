"""Weights that are read together are there together, and are one unit per module."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isp.parallel.config import LaunchPoint, OverlapUnit, Prefetch
from isp.parallel.phase import Phase
from isp.weights.plan import plan
from isp.weights.simulate import simulate
from isp.weights.trace import Block, Chunks, sequential_actions
from tests.weights.schedules import decoder, events


def _in_tiles(chunks: Chunks) -> Chunks:
    """The MLPs of a decoder's layers in tiles."""

    def tiled(block: Block) -> Block:
        if not block.name.startswith("layers"):
            return block
        wqkv, attn, wo, w1, w2 = block.uses
        w1 = w1._replace(in_recompute=False)
        w2 = w2._replace(in_recompute=False, with_previous=True)
        return block._replace(uses=(wqkv, attn, wo, w1, w2))

    return tuple(tuple(tiled(block) for block in chunk) for chunk in chunks)


def test_both_weights_come_before_the_first_and_go_after_the_last() -> None:
    """Catches the first of two freed while the second is read, or the second requested late."""
    chunks = _in_tiles(decoder(2, 1.0))
    made = plan(chunks, sequential_actions(1), Prefetch(unit=OverlapUnit.MODULE))
    lines = events(made, chunks)
    of_first = [line for line in lines if "layers.0" in line.split(":")[0]]
    assert of_first[2:5] == [
        "F0 layers.0.wo: wait layers.0.wo; gather layers.0.w1 layers.0.w2 | free layers.0.wo",
        "F0 layers.0.w1: wait layers.0.w1",
        "F0 layers.0.w2: wait layers.0.w2; gather layers.1.wqkv | free layers.0.w1 layers.0.w2",
    ]
    places = [line.split(":")[0] for line in of_first[5:]]
    assert places == [
        *(f"R0 layers.0.{name}" for name in ("wqkv", "attn", "wo")),
        *(f"B0 layers.0.{name}" for name in ("w2", "w1", "wo", "wqkv")),
    ]


@pytest.mark.parametrize("unit", list(OverlapUnit))
def test_each_is_gathered_once_a_pass_within_the_budget(unit: OverlapUnit) -> None:
    """Catches weights gathered for each part, at the moment of use, or beyond two units."""
    for layers, fraction in ((1, 0.0), (1, 1.0), (3, 0.0), (3, 0.4), (4, 1.0)):
        for order in (sequential_actions(1), sequential_actions(3)):
            chunks = _in_tiles(decoder(layers, fraction))
            for launch in LaunchPoint:
                prefetch = Prefetch(unit=unit, launch=launch)
                found = simulate(plan(chunks, order, prefetch), chunks, order)
                most = found.peak.blocks if unit is OverlapUnit.LAYER else found.peak.modules
                assert most <= 2
                assert all(ahead.uses > 0 for ahead in found.lookaheads)
                plain = decoder(layers, fraction)
                expected = simulate(plan(plain, order, prefetch), plain, order).gathers
                assert _passes(found.gathers) <= _passes(expected)
            late = replace(Prefetch(unit=unit), overlap=False)
            simulate(plan(chunks, order, late), chunks, order)


def _passes(gathers: dict[tuple[str, Phase], int]) -> int:
    return sum(gathers.values())
