"""Pipelines: orders of work, shapes of micro-batches, and peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest

from isp.core.mesh import Mode, PipelineConfig, PipelineSchedule
from isp.core.micro_batch import MicroBatch
from isp.core.pipeline.order import Hop, PipelineOrder, program, split_layers, timeline
from isp.core.weights.uses import Action, ActionKind
from model.build import language_model
from model.config import ModelConfig
from tests.planner.live import LiveBytes
from tests.ranks import run_ranks
from tests.train.runs import SEQ_LEN, Layout, Meshes, Task, largest_difference, make_run

TOLERANCE = 1e-9
"""Relative tolerance, since sums have another order."""
MODEL = ModelConfig(
    vocab_size=50,
    hidden_size=16,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=24,
    init_std=0.3,
)
TASK = Task(model=MODEL)
LOOP, ZERO, ZBV = (
    PipelineSchedule.INTERLEAVED,
    PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
    PipelineSchedule.ZBV,
)
LAYOUTS = (
    Layout(mode=Mode.MTP, pipeline=4, micro=4),
    Layout(tensor=2, weight=2, pipeline=2, micro=4),
    Layout(mode=Mode.FSP, tensor=2, pipeline=2, schedule=ZBV, chunks=2, micro=4),
)


SHAPES = [
    [(2, 32)] * 4,
    [(1, 32)] * 4,
    [(2, 16)] * 3,
    [(2, 32), (1, 8), (2, 16), (1, 32)],
]
"""Rows and tokens of the micro-batches of each step."""


def _of_shapes(rank: int, layouts: Sequence[Layout]) -> list[list[float]]:
    task, meshes = replace(TASK, packed=False, micro_bsz=2), Meshes(rank)
    found: list[list[float]] = []
    for layout in layouts:
        run, numbers = make_run(meshes.of(layout), layout, task), []
        for step, shapes in enumerate(SHAPES):
            of_step = [task.batch(step + 3, place) for place in range(len(shapes))]
            batches = [_cut(x, *shape) for x, shape in zip(of_step, shapes, strict=True)]
            outcome = run.step(batches, 1e-2)
            numbers += [run.step.evaluate([batches[::-1]]), outcome.loss, outcome.grad_norm]
        run.close()
        found.append(numbers)
    return found


def _cut(batch: MicroBatch, rows: int, tokens: int) -> MicroBatch:
    return MicroBatch(
        batch.tokens[:rows, :tokens],
        batch.labels[:rows, :tokens],
        batch.positions[:rows, :tokens],
        None,
    )


def test_every_micro_batch_may_have_a_shape_of_its_own() -> None:
    """Catches buffers and messages with the size of an earlier micro-batch."""
    language_model(MODEL, "float64")  # traced once, for all ranks
    (expected,) = run_ranks(1, _of_shapes, [Layout(mode=Mode.MTP, micro=4)])
    for of_rank in run_ranks(4, _of_shapes, LAYOUTS):
        for found in of_rank:
            assert largest_difference(found, expected[0]) < TOLERANCE


FEW, MANY = 3, 9
"""Micro-batches of a step."""


class _Peaks(NamedTuple):
    """Bytes in a step, in an evaluation, and left by it in addition to the weights."""

    step: int
    evaluation: int
    left: int


def _peaks(rank: int) -> list[_Peaks]:
    """Return the peaks with few and with many micro-batches."""
    found, meshes = [], Meshes(rank)
    for micro in FEW, MANY:
        layout = Layout(mode=Mode.MTP, pipeline=2, micro=micro)
        run = make_run(meshes.of(layout), layout, TASK)
        run.numbers(range(1))
        with LiveBytes() as step:
            run.numbers(range(1, 2))
        with LiveBytes() as evaluation:
            run.step.evaluate([[TASK.batch(9, place) for place in range(micro)]])
        left = evaluation.now - sum(item.parameter.nbytes for item in run.parameters)
        found.append(_Peaks(step.peak, evaluation.peak, left))
        run.close()
    return found


def test_memory_grows_only_with_micro_batches_in_flight() -> None:
    """Catches buffers, inputs, logits or graphs kept for every micro-batch."""
    between = SEQ_LEN * MODEL.hidden_size * 8
    allowed = (
        (MANY - FEW) * between / 2
    )  # tokens, labels and positions of one are 3/16 of `between`
    first, last = run_ranks(2, _peaks)
    for few, many in (first, last):
        assert 0 < many.step < few.step + allowed
        assert many.left < between / 2
    few, many = last  # on the first rank, gloo holds what it has sent until the evaluation ends
    assert 0 < many.evaluation < few.evaluation + allowed


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_work_is_complete(schedule: PipelineSchedule, size: int) -> None:
    """Catches a missing action, an action of another chunk, and halves of a backward out of
    order.
    """
    chunks = 1 if schedule is PipelineSchedule.ONE_F_ONE_B else 2
    order = PipelineOrder(PipelineConfig(size=size, schedule=schedule, num_chunks=chunks))
    stages = [order.stages_of(rank) for rank in range(size)]
    assert sorted(stage for of_rank in stages for stage in of_rank) == list(range(order.num_stages))
    everything = {(m, c) for m in range(2 * size) for c in range(chunks)}
    for rank in range(size):
        for training in (True, False):
            actions = order.actions(rank, 2 * size, training=training)
            place = {action: i for i, action in enumerate(actions)}
            assert len(place) == len(actions)
            done = {
                kind: {(a.micro_batch, a.chunk) for a in actions if a.kind is kind}
                for kind in ActionKind
            }
            assert done[ActionKind.FORWARD] == everything
            assert done[ActionKind.BACKWARD] == (everything if training else set())
            halves = done[ActionKind.WEIGHT_GRADIENT]
            assert not halves or (schedule.splits_backward and training)
            assert halves or not (schedule is PipelineSchedule.ZBV and training)
            for action in actions:
                if action.kind is ActionKind.WEIGHT_GRADIENT:
                    assert place[action._replace(kind=ActionKind.BACKWARD)] < place[action]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("schedule", list(PipelineSchedule))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_orders_of_work_do_not_deadlock(
    schedule: PipelineSchedule, size: int, training: bool
) -> None:
    """Catches sends that two ranks order differently, or that are made or used too late.

    Every send blocks until its receiver has reached it, and messages cannot overtake each other.
    """
    chunks = 1 if schedule is PipelineSchedule.ONE_F_ONE_B else 2
    order = PipelineOrder(PipelineConfig(size=size, schedule=schedule, num_chunks=chunks))
    todo = [list(program(order, r, 2 * size, training=training)) for r in range(size)]
    has: list[set[Hop]] = [set() for _ in range(size)]
    while any(todo):
        before = sum(map(len, todo))
        for rank in range(size):
            item = todo[rank][0] if todo[rank] else None
            if isinstance(item, Action):
                stage = order.stages_of(rank)[item.chunk]
                assert _needed(item, stage, order.num_stages) <= has[rank]
                has[rank].add(Hop(item.kind, item.micro_batch, stage))
                todo[rank].pop(0)
            elif item is not None:
                source, target = order.rank_of(item.source), order.rank_of(item.target)
                if todo[source][:1] == todo[target][:1]:
                    assert item in has[source]
                    has[target].add(item)
                    todo[source].pop(0)
                    todo[target].pop(0)
        assert sum(map(len, todo)) < before, [rest[:1] for rest in todo]


def _needed(action: Action, stage: int, num_stages: int) -> set[Hop]:
    """Return the messages that a rank needs before it computes an action."""
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    own = Hop(action.kind, action.micro_batch, stage)
    if action.kind is forward:
        return {replace(own, source=stage - 1)} if stage else set()
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return {replace(own, made_in=backward)}
    behind = {replace(own, source=stage + 1)} if stage + 1 < num_stages else set()
    return {replace(own, made_in=forward)} | behind


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "chunks", "share"),
    [
        (PipelineSchedule.ONE_F_ONE_B, 1, 1.0),
        (LOOP, 2, 1 / 2),
        (LOOP, 4, 1 / 4),
        (ZERO, 1, 1 / 3),
        (ZERO, 2, 1 / 6),
        (ZBV, 2, 1 / 6),
    ],
)
def test_bubbles_match_the_papers(
    schedule: PipelineSchedule, chunks: int, share: float, size: int
) -> None:
    """Catches an order of work that idles more than published, or needs results of later work."""
    order = PipelineOrder(PipelineConfig(size=size, schedule=schedule, num_chunks=chunks))
    micro = 4 * size
    found = timeline(order, micro, lambda stage, kind: 1.0)
    assert found.bubble == pytest.approx(share * (size - 1) / micro)
    late = timeline(order, micro, lambda stage, kind: 1.0, send=0.5)
    assert late.end > found.end
    for timed in found.ranks:
        assert all(a.end <= b.start for a, b in pairwise(timed))


def test_layers_are_balanced_over_stages() -> None:
    """Catches stages with equally many layers although the last one also has the head."""
    assert split_layers([1.0] * 8, 1) == [(0, 8)]
    assert split_layers([1.0] * 8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert split_layers([1.0] * 7, 4, after=1.0) == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert split_layers([1.0] * 3, 3, after=9.0) == [(0, 1), (1, 2), (2, 3)]
    assert split_layers([1.0, 1.0, 1.0, 3.0], 2) == [(0, 3), (3, 4)]
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            spans = split_layers([1.0] * layers, stages, after=1.5)
            assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
            assert spans[-1][1] == layers
            assert all(stop > start for start, stop in spans)
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
        split_layers([1.0] * 3, 4)
