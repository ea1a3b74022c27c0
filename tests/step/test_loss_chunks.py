"""Transfers of weights where losses are computed in chunks of tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from isp.core.layers.head import num_loss_chunks
from isp.core.micro_batch import MicroBatch
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
CHUNK = 5
"""Tokens of a chunk; rows have 32, so the last chunk has fewer."""


@dataclass(frozen=True, kw_only=True)
class _Unequal(Task):
    """A task in which rows of every second micro-batch are a quarter as long."""

    def batch(self, step: int, place: int) -> MicroBatch:
        batch = super().batch(step, place)
        if place % 2 == 0:
            return batch
        return MicroBatch(batch.tokens[:, :8], batch.labels[:, -8:], batch.positions[:, :8], None)


def _moved(rank: int, layout: Layout, task: Task) -> tuple[list[Any], Counter[str], int]:
    """Return losses and norms, the weight transfers of a step, and the chunks of the last loss."""
    mesh = Meshes(rank).of(layout)
    run = make_run(mesh, layout, task)
    numbers = run.numbers(range(1))
    mesh.log.collect()
    numbers += run.numbers(range(1, 2))
    run.close()
    labels = Counter(t.label for t in mesh.log.take() if ".weight" in t.label)
    batch = task.batch(1, rank)
    return (
        numbers,
        labels,
        num_loss_chunks(batch.tokens, batch.labels.numel(), task.model.loss_chunk_tokens),
    )


def test_ranks_with_different_numbers_of_chunks_transfer_the_same() -> None:
    """Catches a gather or a reduction for each chunk, which deadlocks where rows differ.

    Two data ranks share the weights; one has 32 tokens in seven chunks, the other 8 in two.
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
