"""Runs whose sequences are spread over heads x context train as one process does: in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from isp.parallel import Axis, ContextExchange, Mode, PipelineSchedule, WeightConfig
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Numbers, Task, largest_difference, make_run

STEPS = range(2, 4)
TOLERANCE = 1e-9
"""Relative; sums in another order."""

MODEL = ModelConfig(
    vocab_size=52,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=40,
    init_std=0.3,
)
WINDOW = replace(MODEL, sliding_window=5, tie_embeddings=True, qk_norm=True, loss_chunk_tokens=5)
ONE_KV = replace(MODEL, num_kv_heads=1, checkpoint=1.0, checkpoint_keeps_attention=True)
DEEP = replace(MODEL, num_layers=4, checkpoint=0.5)
LADDER: dict[str, Any] = {
    "checkpoint": 1.0,
    "checkpoint_offload": True,
    "mlp_tile_tokens": 3,
    "loss_chunk_tokens": 5,
}
RING = ContextExchange.RING
V = PipelineSchedule.ZBV
ENDS = WeightConfig(vocab_parallel_loss=True, embed_split_hidden=True, own_reduce_group=True)

CASES: list[tuple[Layout, ModelConfig, bool]] = [
    (Layout(tensor=2, context=2, weight=2, micro=2), MODEL, True),
    (Layout(tensor=2, context=2, options=ENDS), replace(WINDOW, checkpoint=1.0), False),
    (Layout(tensor=2, context=2), replace(MODEL, **LADDER), True),
    (Layout(tensor=4, context=2, weight=4), WINDOW, True),
    (Layout(tensor=2, context=2, exchange=RING), MODEL, True),
    (Layout(tensor=4, context=4, weight=2, exchange=RING), ONE_KV, True),
    (Layout(tensor=4, context=2, exchange=RING), replace(MODEL, **LADDER), False),
    (Layout(tensor=4, context=2, head_first=False, weight=2), ONE_KV, False),
    (Layout(tensor=4, context=2, weight=2, options=ENDS), ONE_KV, True),
    (Layout(tensor=4, context=2), replace(MODEL, **LADDER, checkpoint_segment=2), True),
    (Layout(tensor=4, context=4, micro=2), replace(DEEP, checkpoint_segment=2), False),
    (Layout(tensor=2, context=2, weight=4, data=2, micro=2), DEEP, True),
    (Layout(tensor=2, context=2, weight=2, pipeline=2, micro=3), DEEP, True),
    (Layout(tensor=2, context=2, pipeline=2, micro=2, schedule=V, chunks=2), DEEP, False),
]
"""With packed rows, or two whole ones in a micro-batch."""


def _trained(
    rank: int, cases: list[tuple[Layout, ModelConfig, bool]]
) -> list[tuple[Numbers, float]]:
    meshes, found = Meshes(rank), []
    for layout, model, packed in cases:
        run = make_run(meshes.of(layout), layout, Task(model=model, packed=packed, micro_bsz=2))
        numbers = run.numbers(STEPS)
        data = run.step.mesh[Axis.DATA]
        places = range(data.rank, layout.global_batch, data.size)
        evaluated = run.step.evaluate([[run.task.batch(9, place) for place in places]])
        found.append((numbers, evaluated))
        run.close()
    return found


@pytest.mark.parametrize("world", sorted({layout.world for layout, *_ in CASES}))
def test_heads_x_context_trains_as_one_process(world: int) -> None:
    """Catches tokens, labels or positions of another rank, and gradients that do not come back."""
    cases = [case for case in CASES if case[0].world == world]
    alone = [(Layout(mode=Mode.MTP, micro=c[0].global_batch), *c[1:]) for c in cases]
    expected = run_ranks(1, _trained, alone)[0]
    of_ranks = run_ranks(world, _trained, cases, timeout_seconds=100)
    assert all(found == of_ranks[0] for found in of_ranks)
    for case, found, one in zip(cases, of_ranks[0], expected, strict=True):
        for i, what in enumerate(("loss", "grad norm")):
            pairs = [numbers[i] for numbers in found[0]], [numbers[i] for numbers in one[0]]
            assert largest_difference(*pairs) < TOLERANCE, (what, case)
        assert largest_difference([found[1]], [one[1]]) < TOLERANCE, ("evaluation", case)
