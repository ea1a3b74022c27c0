"""Steps whose losses are computed in chunks of tokens, against steps that compute them at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from isp.data.batch import MicroBatch
from isp.layers.head import num_chunks
from isp.parallel import Mode, PipelineSchedule, WeightConfig
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Task, make_run

MODEL = ModelConfig(
    vocab_size=52,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=40,
    init_std=0.3,
)
TIED = replace(MODEL, tie_embeddings=True, checkpoint=0.5)
FOUR, FOUR_TIED = replace(MODEL, num_layers=4), replace(TIED, num_layers=4)
VOCAB = WeightConfig(vocab_parallel_loss=True)
V = PipelineSchedule.ZBV
CHUNK = 5
"""Tokens, of rows of 32: the last chunk has fewer."""

CASES = [
    (Layout(micro=2), MODEL),
    (Layout(weight=2, data=2, micro=2), TIED),
    (Layout(tensor=2, weight=2, micro=2), MODEL),
    (Layout(tensor=2, weight=2, options=VOCAB), TIED),
    (Layout(mode=Mode.MTP, tensor=2), MODEL),
    (Layout(mode=Mode.MSP, tensor=2, micro=2), TIED),
    (Layout(mode=Mode.FSP, tensor=2), MODEL),
    (Layout(pipeline=2, micro=4), FOUR_TIED),
    (Layout(mode=Mode.MTP, pipeline=2, micro=4, schedule=V, chunks=2), FOUR),
    (Layout(tensor=4, weight=2, options=VOCAB), MODEL),
    (Layout(mode=Mode.MSP, tensor=4), MODEL),
    (Layout(tensor=2, weight=4, data=2), TIED),
    (Layout(weight=2, data=2, pipeline=2, micro=4, schedule=V, chunks=2), FOUR_TIED),
]

Found = tuple[list[tuple[float, float]], dict[str, Any], float]
"""Loss and norm of two steps, this rank's shards of the last's gradients, and an evaluation."""


def _found(rank: int, cases: list[tuple[Layout, Task]]) -> list[Found]:
    meshes, found = Meshes(rank), []
    for layout, task in cases:
        run = make_run(meshes.of(layout), layout, task)
        numbers = run.numbers(range(2))
        gradients = {i.name: run.step.gradients.whole(i.parameter) for i in run.parameters}
        shards = {name: gradient.numpy().copy() for name, gradient in gradients.items()}
        evaluated = run.step.evaluate([[task.batch(3, rank)] * layout.micro])
        found.append((numbers, shards, evaluated))
        run.close()
    return found


def _task(layout: Layout, model: ModelConfig) -> Task:
    return Task(model=model, packed=layout.micro > 1, micro_bsz=2)


@pytest.mark.parametrize("world", sorted({layout.world for layout, _ in CASES}))
def test_chunks_train_as_a_whole_does(world: int) -> None:
    """Catches a chunk's losses or gradients lost, given to another token, or summed twice.

    In every mode, with masked labels, tied tables, pipelines, and several micro-batches.
    """
    whole = [
        (layout, _task(layout, replace(model, loss_chunk_tokens=0)))
        for layout, model in CASES
        if layout.world == world
    ]
    chunked = [
        (layout, replace(task, model=replace(task.model, loss_chunk_tokens=CHUNK)))
        for layout, task in whole
    ]
    for of_rank in run_ranks(world, _found, [*whole, *chunked], timeout_seconds=100):
        for (layout, _), one, other in zip(
            whole, of_rank[: len(whole)], of_rank[len(whole) :], strict=True
        ):
            for mine, wanted in zip(other[0], one[0], strict=True):
                assert mine == pytest.approx(wanted, rel=1e-9), layout
            assert other[2] == pytest.approx(one[2], rel=1e-12), layout
            for name, gradient in ((n, g) for n, g in one[1].items() if g.size):
                far = abs(other[1][name] - gradient).max()
                assert far <= 1e-9 * max(abs(gradient).max(), 1e-3), (layout, name)


@dataclass(frozen=True, kw_only=True)
class _Unequal(Task):
    """The rows of every second micro-batch are a quarter as long."""

    def batch(self, step: int, place: int) -> MicroBatch:
        batch = super().batch(step, place)
        if place % 2 == 0:
            return batch
        return MicroBatch(batch.tokens[:, :8], batch.labels[:, -8:], batch.positions[:, :8], None)


def _moved(rank: int, layout: Layout, task: Task) -> tuple[list[Any], Counter[str], int]:
    """Numbers of steps, what a step moves of weights, and the chunks of the last loss."""
    mesh = Meshes(rank).of(layout)
    run = make_run(mesh, layout, task)
    numbers = run.numbers(range(1))
    mesh.log.collect()
    numbers += run.numbers(range(1, 2))
    run.close()
    labels = Counter(t.label for t in mesh.log.take() if ".weight" in t.label)
    batch = task.batch(1, rank)
    return numbers, labels, num_chunks(batch.tokens, batch.labels, task.model.loss_chunk_tokens)


def test_ranks_with_different_numbers_of_chunks_move_the_same() -> None:
    """Catches a gather or a reduction for each chunk, which deadlocks where rows differ.

    Two data ranks share the weights; one has 32 tokens, in seven chunks, the other 8, in two.
    """
    task = _Unequal(model=replace(MODEL, num_layers=1, loss_chunk_tokens=CHUNK), packed=False)
    layout = Layout(weight=2, data=2)
    ((wanted, _, _),) = run_ranks(1, _moved, Layout(micro=2), task)
    one, other = run_ranks(2, _moved, layout, task)
    assert (one[2], other[2]) == (7, 2)
    assert one[1] == other[1]
    assert one[1]["lm_head.weight"] == 1, "forward alone reads it"
    assert one[1]["lm_head.weight.grad"] == 1
    for numbers, _, _ in (one, other):
        for mine, expected in zip(numbers, wanted, strict=True):
            assert mine == pytest.approx(expected, rel=1e-9)


def test_chunks_move_no_more_weights_than_a_whole() -> None:
    """Catches a weight that is gathered again by chunks: of a tied table, beside the embedding."""
    layout = Layout(weight=2, data=2)
    counts = [
        run_ranks(2, _moved, layout, Task(model=replace(TIED, loss_chunk_tokens=chunk)))[0][1]
        for chunk in (0, CHUNK)
    ]
    assert counts[0] == counts[1]
