"""When weights are gathered and gradients reduced, and in which buffers, changes no bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
import torch

from isp.parallel import WeightConfig
from isp.parallel.config import LaunchPoint, OverlapUnit
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Numbers, Task, Weights, largest_difference, make_run

STEPS = range(2)
MODEL = ModelConfig(
    vocab_size=50,
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=40,
    qkv_bias=True,
    tie_embeddings=True,
    init_std=0.3,
)
PLAIN = WeightConfig(overlap=False, memory_pool=False, poison_freed_buffers=True)
"""Each weight is gathered when it is needed, into a buffer of its own; freed ones become NaN."""
TOLERANCE = 1e-9
"""Relative, to one process, whose sums have another order."""


class Case(NamedTuple):
    """How weights travel, and which blocks are computed twice."""

    weight: WeightConfig
    checkpoint: float = 0.0
    keeps_attention: bool = False

    def task(self) -> Task:
        return Task(
            model=replace(
                MODEL,
                checkpoint=self.checkpoint,
                checkpoint_keeps_attention=self.keeps_attention,
            )
        )


class Result(NamedTuple):
    """What a rank came to, and in which order its weights and gradients set off."""

    numbers: Numbers
    weights: Weights
    departures: tuple[str, ...]


POOL = replace(PLAIN, memory_pool=True, overlap=True)
EARLY, LATE = (
    Case(replace(POOL, launch_allgather_before=point))
    for point in (LaunchPoint.ATTN, LaunchPoint.WO)
)
MODULE = Case(replace(POOL, forward_overlap_per=OverlapUnit.MODULE))
STAYS = Case(replace(POOL, reshard_after_forward=False))
CORNERS = [Case(PLAIN), EARLY, LATE, MODULE, STAYS]
RECOMPUTED = [
    Case(replace(PLAIN, overlap=overlap, memory_pool=overlap), checkpoint, keeps_attention)
    for overlap in (False, True)
    for checkpoint, keeps_attention in ((0.4, False), (1.0, False), (1.0, True))
]
CASES = [
    Case(PLAIN),
    *(
        Case(replace(POOL, launch_allgather_before=launch, forward_overlap_per=unit))
        for launch, unit in product(LaunchPoint, OverlapUnit)
    ),
    Case(replace(PLAIN, overlap=True)),
    Case(replace(PLAIN, memory_pool=True)),
    *RECOMPUTED,
    STAYS,
    STAYS._replace(checkpoint=0.4),
    STAYS._replace(weight=replace(PLAIN, reshard_after_forward=False)),
    STAYS._replace(weight=replace(MODULE.weight, reshard_after_forward=False)),
]


def _train(meshes: Meshes, case: Case, micro: int, dtype: torch.dtype) -> Result:
    layout = Layout(tensor=2, weight=4, data=2, micro=micro, options=case.weight)
    mesh = meshes.of(layout)
    run = make_run(mesh, layout, case.task(), dtype=dtype)
    mesh.log.collect()
    numbers = run.numbers(STEPS[:1])
    departures = tuple(t.label for t in mesh.log.take())
    numbers += run.numbers(STEPS[1:])
    run.close()
    return Result(numbers, run.weights(), departures)


def _same_bits(rank: int, cases: list[Case], micro: int, dtype: torch.dtype) -> Result:
    """The result of the first case; raises for the first other one that is not the same."""
    meshes = Meshes(rank)
    results = [_train(meshes, case, micro, dtype) for case in cases]
    first = results[0]
    for case, result in zip(cases, results, strict=True):
        assert result.numbers == first.numbers, f"{case}: {result.numbers} {first.numbers}"
        for name, weight in result.weights.items():
            assert np.array_equal(weight, first.weights[name]), f"{case}: {name}"
    _check_orders(dict(zip(cases, (result.departures for result in results), strict=True)))
    return first


def _check_orders(departures: dict[Case, tuple[str, ...]]) -> None:
    """Raise if an option reaches nothing: no wonder if it changes nothing."""
    assert len({departures[case] for case in CORNERS}) == len(CORNERS)
    counts = [len(departures[case]) for case in RECOMPUTED[:2] if case in departures]
    assert all(a < b for a, b in pairwise([len(departures[LATE]), *counts])), (
        "a block gathers once more"
    )


def _one_process(_: int, micro: int) -> Result:
    layout = Layout(micro=2 * micro)
    run = make_run(Meshes(0).of(layout), layout, Task(model=MODEL))
    return Result(run.numbers(STEPS), run.weights(), ())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("micro", "cases"), [(1, CASES), (3, CORNERS)], ids=["1", "3"])
def test_overlap_pool_launch_point_and_recompute_change_no_bit(micro, cases):
    """Catches a weight read before it is there or after its buffer is lent on, or a lost sum."""
    found = run_ranks(4, _same_bits, cases, micro, torch.float64, timeout_seconds=280)
    expected = run_ranks(1, _one_process, micro)[0]
    for i in (0, 1):
        series = ([n[i] for n in result.numbers] for result in (found[0], expected))
        assert largest_difference(*series) < TOLERANCE
    for name, weight in expected.weights.items():
        shards = [result.weights[name] for result in found]
        whole = np.concatenate(shards) if shards[0].shape != weight.shape else shards[0]
        np.testing.assert_allclose(whole, weight, rtol=TOLERANCE, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_overlap_changes_no_bit_in_bfloat16():
    """Catches gradients summed in another order or dtype, which float64 would hide."""
    run_ranks(4, _same_bits, CORNERS, 1, torch.bfloat16, timeout_seconds=110)
