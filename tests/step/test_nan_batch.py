"""Batches whose loss or gradients are not finite: skipped, counted, logged, and without effect."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isp.core.comm import Mesh
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Mode
from isp.core.micro_batch import MicroBatch
from isp.metrics import read_metrics
from isp.models.runtime.stage_module import StageModule
from isp.train.data import StepData
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.jobs import run_folders, run_forked, write_job
from tests.train.runs import Layout, Meshes, Numbers, Task, Weights, make_run

MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=24
)
LAYOUT = Layout(mode=Mode.ISP, tensor=2, weight=4, data=2, micro=2)


def _of_loss(losses: Tensor) -> Tensor:
    return losses * math.nan


def _of_gradient(losses: Tensor) -> Tensor:
    """Return the loss unchanged, with a gradient that overflows."""
    losses.register_hook(lambda gradient: gradient * math.inf)
    return losses


def _steps(rank: int, layout: Layout) -> None:
    """Check a bad step among good ones, with a bad loss and with bad gradients."""
    mesh = Meshes(rank).of(layout)
    whole = make_run(mesh, layout, Task(model=MODEL))
    expected = whole.numbers((0, 1, 3, 4, 5))
    wanted = whole.weights()
    whole.close()
    for poison in (_of_loss, _of_gradient):
        loss, norm = _bad_step(mesh, layout, poison, expected, wanted)
        assert not math.isfinite(norm)
        assert math.isfinite(loss) == (poison is _of_gradient)


def _bad_step(
    mesh: Mesh,
    layout: Layout,
    poison: Callable[[Tensor], Tensor],
    expected: Numbers,
    wanted: Weights,
) -> tuple[float, float]:
    """Take a bad step that must change nothing; return its loss and norm."""
    as_it_is = StageModule.loss
    run = make_run(mesh, layout, Task(model=MODEL))
    found, before = run.numbers(range(2)), run.weights()
    if mesh.rank >= 2:  # one of two data ranks
        StageModule.loss = lambda *args: poison(as_it_is(*args))  # type: ignore[method-assign]
    ((loss, norm),) = run.numbers(range(2, 3))
    StageModule.loss = as_it_is  # type: ignore[method-assign]
    assert all((weight == before[name]).all() for name, weight in run.weights().items())
    assert run.optimizer.num_skipped == 1
    found += run.numbers(range(3, 6))
    assert found == expected, "as if the bad batch had never been there"
    assert all((weight == wanted[name]).all() for name, weight in run.weights().items())
    run.close()
    return loss, norm


def _empty_step(rank: int, layout: Layout) -> None:
    """Check a step without a label on any rank, among good ones."""
    mesh, task = Meshes(rank).of(layout), Task(model=MODEL)
    run = make_run(mesh, layout, task)
    run.numbers(range(5, 7))
    before, states = run.weights(), run.optimizer.state_dict()["step"]
    outcome = run.step([task.batch(7, place) for place in range(layout.micro)], lr=1e-2)
    assert (outcome.skipped, outcome.valid_tokens, outcome.grad_norm) == (True, 0, 0.0)
    assert outcome.loss == 0.0
    assert all((weight == before[name]).all() for name, weight in run.weights().items())
    optimizer = run.optimizer
    assert (optimizer.num_skipped, optimizer.skipped_in_a_row) == (1, 0)
    assert optimizer.state_dict()["step"] == states == 2
    run.numbers(range(8, 9))
    assert any((weight != before[name]).any() for name, weight in run.weights().items())
    run.close()


def test_a_batch_without_labels_changes_nothing() -> None:
    """Catches weights moved by momentum or weight decay in a step without labels."""
    run_ranks(LAYOUT.world, _empty_step, LAYOUT)


def test_a_bad_batch_changes_nothing() -> None:
    """Catches a rank that updates alone, and NaN that stays in a buffer or a moment."""
    run_ranks(LAYOUT.world, _steps, LAYOUT)


def test_a_run_continues_after_a_bad_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a skipped step that is not logged, not counted, or ends the run.

    Step 3 has a NaN loss, and step 5 no label.
    """
    loss, calls, training = StageModule.loss, [], StepData.training

    def bad_once(self: StageModule, *args: Tensor) -> Tensor:
        calls.append(0)
        bad = os.environ["RANK"] == "1" and len(calls) == 3
        return loss(self, *args) * (math.nan if bad else 1.0)

    def empty_once(self: StepData, step: int) -> list[MicroBatch]:
        batches = training(self, step)
        if step == 4:
            batches = [replace(b, labels=torch.full_like(b.labels, IGNORED)) for b in batches]
        return batches

    monkeypatch.setattr(StageModule, "loss", bad_once)
    monkeypatch.setattr(StepData, "training", empty_once)
    run_forked(write_job(tmp_path), "--optimizer.max_skipped_steps", "2")
    (run,) = run_folders(tmp_path / "job.yaml")
    records = read_metrics(run / "metrics.jsonl")
    assert [record.skipped for record in records] == [step in (3, 5) for step in range(1, 9)]
    assert [math.isnan(record.loss) for record in records] == [s == 3 for s in range(1, 9)]
    assert records[4].loss == 0.0
    log = (run / "logs/rank_0.log").read_text()
    assert "step 3: the gradient norm is nan, so the weights were left as they are (1 step" in log
    assert "step 5: no token of its batch has a label other than -100 (ignore_index), so the" in log
    (line,) = [line for line in log.splitlines() if "step=3/8 loss=nan" in line]
    assert line.endswith(" skipped")
