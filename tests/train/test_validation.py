"""The loss on held-out text."""

from __future__ import annotations

from pathlib import Path

import pytest

from isp.metrics import read_metrics
from tests.train.jobs import run_folders, run_forked, write_job


def test_val_loss_is_the_same_in_all_layouts_of_a_global_batch(tmp_path: Path) -> None:
    """Catches samples that are evaluated on one number of data ranks and not on another.

    The three global batches of 4 that are asked for are more than the 9 samples that are held out.
    """
    job = write_job(tmp_path)
    (tmp_path / "valid.txt").write_text("".join(f"other {i}\n" for i in range(60)))
    words = ["--training.steps=1", "--validation.freq=1", "--validation.steps=3"]
    words += [f"--data.valid_source={tmp_path / 'valid.txt'}", "--training.dtype=float64"]
    words += ["--parallel.tensor.size=1", "--parallel.weight.size=1"]
    found = []
    for data_size in (1, 2, 4):
        layout = [f"--data.micro_num={4 // data_size}", f"--job.name=data{data_size}"]
        run_forked(job, *words, *layout, num_ranks=data_size)
        (record,) = read_metrics(run_folders(job, f"data{data_size}")[0] / "metrics.jsonl")
        assert record.val_loss is not None
        found.append(record.val_loss)
    assert found == pytest.approx([found[0]] * 3, rel=1e-12)
