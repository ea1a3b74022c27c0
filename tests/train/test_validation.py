"""The loss on held-out text."""

from __future__ import annotations

from pathlib import Path

import pytest

from isp.metrics import StepRecord, read_metrics
from tests.train.jobs import run_folders, run_forked, write_job


def test_each_source_of_a_mixture_is_evaluated_as_alone(tmp_path: Path) -> None:
    """Catches samples of one source counted for another, or a number of them that depends on
    layout.
    """
    job = write_job(tmp_path)
    for letter, count in (("a", 90), ("b", 40)):
        text = "".join(f"{letter} {letter * (i % 7)} {i}\n" for i in range(count))
        (tmp_path / f"{letter}.txt").write_text(text)
    words = ["--training.steps=1", "--validation.freq=1", "--validation.steps=3"]
    words += ["--training.dtype=float64", "--training.global_batch_size=4", "--model.num_layers=2"]

    def evaluated(name: str, source: str, ranks: int, *layout: str) -> StepRecord:
        own = [f"--data.valid_source={source}", f"--job.name={name}", *layout]
        run_forked(job, *words, *own, num_ranks=ranks)
        (record,) = read_metrics(run_folders(job, name)[0] / "metrics.jsonl")
        return record

    one = ("--parallel.tensor.size=1", "--parallel.weight.size=1")
    a, b = (evaluated(x, str(tmp_path / f"{x}.txt"), 1, *one).val_loss for x in "ab")
    assert a is not None
    assert b is not None
    assert abs(a - b) > 0.01
    mixture = f"[{{path: {tmp_path}/a.txt, weight: 3, name: a}}, {{path: {tmp_path}/b.txt}}]"
    second = f"{str(tmp_path).lstrip('/')}/b.txt"
    pipeline = ("--parallel.pipeline.size=2", *one)
    context = ("--parallel.sequence_2D.enable", "--parallel.sequence_2D.context_size=2")
    for name, ranks, *layout in (
        ("isp", 2),
        ("data", 2, *one),
        ("pipeline", 2, *pipeline),
        ("context", 2, *context),
    ):
        record = evaluated(name, mixture, ranks, *layout)
        assert record.val_losses == pytest.approx({"a": a, second: b}, rel=1e-10), name
        assert record.val_loss == pytest.approx(0.75 * a + 0.25 * b, rel=1e-10), name
        assert record.values()["validation/loss/a"] == record.val_losses["a"]
