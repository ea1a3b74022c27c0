"""Weights that are read together are there together, and are one unit per module."""

from __future__ import annotations

from isp.parallel.config import OverlapUnit, Prefetch
from isp.weights.plan import plan
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
