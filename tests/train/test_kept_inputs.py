"""Block inputs on the host, and recompute in two levels: the same bits in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isp.comm.tag import Purpose
from isp.parallel import Mode, PipelineSchedule, WeightConfig
from isp.parallel.config import LaunchPoint, OverlapUnit
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Task, make_run

MODEL = ModelConfig(
    vocab_size=48,
    hidden_size=16,
    num_layers=5,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=24,
    init_std=0.3,
    tie_embeddings=True,
    checkpoint=0.8,
)
DEEP = replace(MODEL, num_layers=8, checkpoint=1.0)
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "offloaded": {"checkpoint_offload": True},
    "segments of 2": {"checkpoint_segment": 2},
    "segments of 3, offloaded": {"checkpoint_offload": True, "checkpoint_segment": 3},
    "all but attention, offloaded": {
        "checkpoint_offload": True,
        "checkpoint_keeps_attention": True,
    },
}
IN_PARTS = {"checkpoint_distribute_activations": True}
MTP_WAYS = WAYS | {
    "in parts, offloaded": {**IN_PARTS, "checkpoint_offload": True},
    "in parts, all three": {**IN_PARTS, "checkpoint_offload": True, "checkpoint_segment": 3},
}
FEW_WAYS = {name: WAYS[name] for name in ("kept", "offloaded", "segments of 3, offloaded")}
MODULE = WeightConfig(forward_overlap_per=OverlapUnit.MODULE)
EARLY = WeightConfig(launch_allgather_before=LaunchPoint.WQKV, poison_freed_buffers=True)
LAYOUTS = {
    "one rank": Layout(mode=Mode.MTP, micro=2),
    "isp 2": Layout(tensor=2, weight=2, micro=2, options=MODULE),
    "mtp 2": Layout(mode=Mode.MTP, tensor=2),
    "1F1B": Layout(mode=Mode.MTP, pipeline=2, micro=4),
    "isp 2, weight 4": Layout(tensor=2, weight=4, data=2, options=EARLY),
    "msp 4": Layout(mode=Mode.MSP, tensor=4),
    "fsp 2": Layout(mode=Mode.FSP, tensor=2, data=2),
    "interleaved": Layout(
        weight=2, data=2, pipeline=2, micro=4, schedule=PipelineSchedule.INTERLEAVED, chunks=2
    ),
    "V": Layout(tensor=2, weight=2, pipeline=2, micro=4, schedule=PipelineSchedule.ZBV, chunks=2),
}


def _ways(name: str) -> dict[str, dict[str, Any]]:
    if LAYOUTS[name].pipeline > 1 or name in ("msp 4", "fsp 2"):
        return FEW_WAYS
    return MTP_WAYS if name == "mtp 2" else WAYS


def _trained(rank: int, names: list[str]) -> dict[tuple[str, str], tuple[Any, list[int]]]:
    """By layout and way: losses, norms and weights of two steps; what is left, and was copied."""
    meshes, found = Meshes(rank), {}
    for name in names:
        layout = LAYOUTS[name]
        for way, options in _ways(name).items():
            model = DEEP if layout.pipeline > 1 else MODEL
            mesh = meshes.of(layout)
            run = make_run(mesh, layout, Task(model=replace(model, **options)))
            mesh.log.collect()
            numbers = run.numbers(range(2))
            copied = [t for t in mesh.log.take() if t.tag.purpose is Purpose.BLOCK_INPUT]
            host = run.step.built.host
            found[name, way] = (
                (numbers, run.weights()),
                [host.leased_bytes, host.reserved_bytes, len(copied)],
            )
            run.close()
    return found


@pytest.mark.parametrize("world", sorted({layout.world for layout in LAYOUTS.values()}))
def test_every_way_gives_the_same_bits(world: int) -> None:
    """Catches an input that comes back as another, late, or from a buffer that was lent again;
    random order of recomputes; buffers left with nobody.
    """
    names = [name for name, layout in LAYOUTS.items() if layout.world == world]
    for found in run_ranks(world, _trained, names, timeout_seconds=100):
        for name in names:
            (expected, weights), _ = found[name, "kept"]
            for way, options in _ways(name).items():
                (numbers, own), (leased, reserved, copied) = found[name, way]
                assert numbers == expected, (name, way)
                assert all(np.array_equal(own[k], weights[k]) for k in weights), (name, way)
                assert leased == 0, (name, way)
                offloads = options.get("checkpoint_offload", False)
                assert (reserved > 0) == offloads, (name, way)
                assert (copied > 0) == offloads, (name, way)
