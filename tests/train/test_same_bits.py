"""When weights are gathered, into which buffers, and where block inputs are, changes no bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from isp.core.comm.tag import Purpose
from isp.core.mesh import Mode, PipelineSchedule, WeightConfig
from isp.core.mesh.config import LaunchPoint, OverlapUnit
from model.build import language_model
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Numbers, Task, Weights, make_run

STEPS = range(2)
MODEL = ModelConfig(
    vocab_size=50,
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=40,
    qkv_bias=True,
    tie_embeddings=True,
    init_std=0.3,
)
PLAIN = WeightConfig(overlap=False, memory_pool=False, poison_freed_buffers=True)
"""Each weight is gathered when needed into its own buffer; freed buffers are filled with NaN."""
POOL = replace(PLAIN, memory_pool=True, overlap=True)
MODULE = replace(POOL, forward_overlap_per=OverlapUnit.MODULE)
EARLY = replace(POOL, launch_allgather_before=LaunchPoint.ATTN)
LATE = replace(POOL, launch_allgather_before=LaunchPoint.WO)
NOT_RESHARDED = replace(POOL, reshard_after_forward=False)
CORNERS = [PLAIN, EARLY, LATE, MODULE, NOT_RESHARDED]
WEIGHTS = [
    *CORNERS,
    replace(PLAIN, overlap=True),
    replace(PLAIN, memory_pool=True),
    replace(MODULE, reshard_after_forward=False),
]

SOME, WHOLE, KEPT = (
    {"checkpoint": 0.4},
    {"checkpoint": 1.0},
    {"checkpoint": 1.0, "checkpoint_keeps_attention": True},
)
OFFLOADED = {**WHOLE, "checkpoint_offload": True}
SEGMENTS = {**OFFLOADED, "checkpoint_segment": 3}


class Way(NamedTuple):
    """Way in which weights are gathered, and which blocks are recomputed."""

    weight: WeightConfig
    keys: Mapping[str, Any] = {}


class Result(NamedTuple):
    """The results of a rank, and counts of what it did."""

    numbers: Numbers
    weights: Weights
    launched: tuple[str, ...]
    """The transfers of a step, in order."""
    copied: int
    """Block inputs that a step has copied to the host or back."""


WEIGHT_4 = Layout(tensor=2, weight=4, data=2)
ISP_2 = Layout(tensor=2, weight=2, micro=2)
STAGES = Layout(mode=Mode.MTP, pipeline=2, micro=4)
V = Layout(tensor=2, weight=2, pipeline=2, micro=4, schedule=PipelineSchedule.ZBV, chunks=2)
RECOMPUTED = [Way(LATE, keys) for keys in (SOME, WHOLE, KEPT)]
GROUPS: list[tuple[Layout, list[Way], torch.dtype]] = [
    (WEIGHT_4, [*map(Way, WEIGHTS), *RECOMPUTED], torch.float64),
    (replace(WEIGHT_4, micro=3), [*map(Way, (PLAIN, LATE, MODULE, NOT_RESHARDED))], torch.float64),
    (WEIGHT_4, [*map(Way, (PLAIN, LATE, MODULE))], torch.bfloat16),
    (ISP_2, [Way(MODULE, keys) for keys in ({}, KEPT, OFFLOADED, SEGMENTS)], torch.float64),
    (STAGES, [Way(LATE, keys) for keys in ({}, OFFLOADED, SEGMENTS)], torch.float64),
    (V, [Way(LATE, keys) for keys in ({}, OFFLOADED, SEGMENTS)], torch.float64),
]
"""Groups of settings with equal bits, of which the first is the simplest."""


def _train(meshes: Meshes, layout: Layout, way: Way, dtype: torch.dtype) -> Result:
    mesh = meshes.of(layout)
    layers = max(MODEL.num_layers, 4 * layout.pipeline * layout.chunks // 2)
    task = Task(model=replace(MODEL, num_layers=layers, **way.keys))
    run = make_run(mesh, replace(layout, options=way.weight), task, dtype=dtype)
    mesh.log.collect()
    numbers = run.numbers(STEPS[:1])
    moved = mesh.log.take()
    numbers += run.numbers(STEPS[1:])
    run.close()
    host = run.step.built.host
    assert host.leased_bytes == 0, "buffers left with nobody"
    copied = sum(t.tag.purpose is Purpose.BLOCK_INPUT for t in moved)
    offloads = way.keys.get("checkpoint_offload", False)
    assert (copied > 0) == (host.reserved_bytes > 0) == offloads, way
    launched = tuple(t.label for t in moved)
    return Result(numbers, run.weights(), launched, copied)


def _same_bits(rank: int, groups: list[tuple[Layout, list[Way], torch.dtype]]) -> None:
    meshes = Meshes(rank)
    for layout, ways, dtype in groups:
        found = [_train(meshes, layout, way, dtype) for way in ways]
        first, by_weight = found[0], dict[WeightConfig, tuple[str, ...]]()
        for way, result in zip(ways, found, strict=True):
            where = f"{layout}: {way}"
            assert result.numbers == first.numbers, f"{where}: {result.numbers} {first.numbers}"
            for name, weight in result.weights.items():
                assert np.array_equal(weight, first.weights[name]), f"{where}: {name}"
            by_weight.setdefault(way.weight, result.launched)
        if by_weight.keys() >= set(CORNERS):  # the settings must have had an effect
            assert len({by_weight[weight] for weight in CORNERS}) == len(CORNERS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", sorted({layout.world for layout, *_ in GROUPS}))
def test_every_way_gives_the_same_bits(world: int) -> None:
    """Catches a weight read too early or after its buffer is reused, a lost sum, a wrong restored
    input, and, in bfloat16, gradients summed in another order.
    """
    for layers in {max(3, 2 * layout.pipeline * layout.chunks) for layout, *_ in GROUPS}:
        for dtype in ("float64", "bfloat16"):
            language_model(replace(MODEL, num_layers=layers), dtype)  # traced once for all ranks
    groups = [group for group in GROUPS if group[0].world == world]
    run_ranks(world, _same_bits, groups, timeout_seconds=280)
