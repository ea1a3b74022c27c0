"""Small plans written out, so that a change of the schedule shows in these lists."""

from __future__ import annotations

import subprocess
import sys

import pytest

from isp.core.mesh.config import LaunchPoint, OverlapUnit, Prefetch
from isp.core.weights.prefetch_plan import WeightOpKind, plan
from isp.core.weights.simulate import simulate
from isp.core.weights.uses import Block, Chunks, Use, sequential_actions
from tests.core.weights.schedules import EMBEDDING, HEAD, actions, block, decoder, events


def planned(
    chunks: Chunks,
    order: str,
    unit: OverlapUnit = OverlapUnit.LAYER,
    launch: LaunchPoint = LaunchPoint.WO,
    **options: bool,
) -> list[str]:
    """Return the plan as text, after the simulation has found no error."""
    result = plan(chunks, actions(order), Prefetch(unit=unit, launch=launch, **options))
    simulate(result, chunks, actions(order))
    return events(result, chunks)


def test_modules_with_recompute_are_prefetched_one_by_one() -> None:
    """Catches a recomputed block freed before its backward, and more than one weight prefetched."""
    blocks = (block(name, ("wqkv", "attn", "wo"), recomputed=True) for name in "abc")
    chunks = ((EMBEDDING, *blocks, HEAD),)
    assert planned(chunks, "F0 B0", OverlapUnit.MODULE)[8:] == [
        "F0 c.wqkv: wait c.wqkv; gather c.wo | free c.wqkv",
        "F0 c.attn:",
        "F0 c.wo: wait c.wo; gather head | free c.wo",
        "F0 head.head: wait head; gather c.wqkv",
        "B0 head.head: | free head",
        "R0 c.wqkv: wait c.wqkv; gather c.wo",
        "R0 c.attn:",
        "R0 c.wo: wait c.wo; gather b.wqkv",
        "B0 c.wo: | free c.wo",
        "B0 c.wqkv: | free c.wqkv",
        "R0 b.wqkv: wait b.wqkv; gather b.wo",
        "R0 b.attn:",
        "R0 b.wo: wait b.wo; gather a.wqkv",
        "B0 b.wo: | free b.wo",
        "B0 b.wqkv: | free b.wqkv",
        "R0 a.wqkv: wait a.wqkv; gather a.wo",
        "R0 a.attn:",
        "R0 a.wo: wait a.wo",
        "B0 a.wo: | free a.wo",
        "B0 a.wqkv: | free a.wqkv",
        "B0 embedding.embedding:",
    ]


def test_a_block_without_the_launch_point_gathers_the_next_at_its_first_use() -> None:
    """Catches a gather after an embedding or head that starts only when their work is done."""
    chunks = (tuple(block(name, ("up", "down")) for name in "abc"),)
    assert planned(chunks, "F0")[3] == "F0 b.up: wait b.up; gather c.up c.down | free b.up"


def test_a_stage_without_embedding_starts_with_two_units() -> None:
    """Catches a start that gathers one unit where two have room, or more than two."""
    chunks = (tuple(block(name, ("w1",)) for name in "abc"),)
    assert planned(chunks, "F0")[0] == "start: gather a.w1 b.w1"
    assert planned(chunks[:1], "F0", OverlapUnit.MODULE)[0] == "start: gather a.w1 b.w1"
    assert planned((chunks[0][:1],), "F0")[0] == "start: gather a.w1"


def test_a_recompute_without_the_launch_point_gathers_at_its_next_use() -> None:
    """Catches a gather placed at a use that a selective recomputation skips."""
    uses = (Use("wqkv"), Use("attn", None, LaunchPoint.ATTN, in_recompute=False))
    chunks = (
        tuple(
            Block(name, (*uses, Use("wo", f"{name}.wo"), Use("norm")), recomputed=True)
            for name in "abc"
        ),
    )
    lines = planned(chunks, "F0 B0", launch=LaunchPoint.ATTN)
    assert "F0 b.attn: gather c.wo" in lines
    assert "R0 b.wo: gather a.wo" in lines


def _in_tiles(chunks: Chunks) -> Chunks:
    """Return chunks whose decoder layers compute their MLPs in tiles."""

    def tiled(block: Block) -> Block:
        if not block.name.startswith("layers"):
            return block
        wqkv, attn, wo, w1, w2 = block.uses
        w1 = w1._replace(in_recompute=False)
        w2 = w2._replace(in_recompute=False, with_previous=True)
        return block._replace(uses=(wqkv, attn, wo, w1, w2))

    return tuple(tuple(tiled(block) for block in chunk) for chunk in chunks)


def test_weights_that_are_read_together_are_one_unit() -> None:
    """Catches the first of two freed while the second is read, and the second gathered late."""
    chunks = _in_tiles(decoder(2, 1.0))
    made = plan(chunks, sequential_actions(1), Prefetch(unit=OverlapUnit.MODULE))
    of_first = [line for line in events(made, chunks) if "layers.0" in line.split(":")[0]]
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


@pytest.mark.parametrize("between", [1, 3])
def test_the_bias_of_a_tied_head_is_gathered_with_the_weight(between: int) -> None:
    """Catches a weight gathered again for a bias that the first of its layers does not have.

    With one block in between the weight stays from the embedding to the head, with three it does
    not.
    """
    head = Block("head", (Use("head", "embedding", bias="head.bias"),))
    chunks = ((EMBEDDING, *(block(name, ("w1",)) for name in "abc"[:between]), head),)
    found = plan(chunks, actions("F0 B0"), Prefetch())
    acts = [*found.start, *(act for step in found.entries for act in step.before)]
    gathers = [act for act in acts if act.kind is WeightOpKind.GATHER and act.weight == "embedding"]
    biases = [act.bias for act in gathers]
    assert biases == (["head.bias"] if between == 1 else [None, "head.bias"])


def test_a_step_without_weights_or_work_has_an_empty_plan() -> None:
    """Catches code that assumes a first unit."""
    assert planned((), "") == ["start:"]
    assert planned(((Block("a", (Use("attn"),)),),), "F0 B0") == ["start:", "F0 a.attn:"]


def test_a_plan_is_cached_and_hashable() -> None:
    """Catches a list or dict in the plan, and a new plan at every step."""
    arguments = decoder(3), sequential_actions(2), Prefetch()
    first = plan(*arguments)
    assert plan(*arguments) is first
    assert hash(first) == hash(plan.__wrapped__(*arguments))


def test_planning_needs_no_torch() -> None:
    """Catches: an import that makes printing a schedule take seconds."""
    code = "import sys, isp.core.weights.plan_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
