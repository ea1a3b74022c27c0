"""The messages that a user sees when a run is stopped, or its data are wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from isp.checkpoint import verify
from isp.config import load_config
from isp.data.dataset import Dataset
from isp.data.indexed import IndexedDatasetWriter, token_dtype
from isp.data.sources import open_datasets
from isp.metrics import read_metrics
from tests.train.jobs import ROOT, run_forked, write_job


def test_ctrl_c_saves_and_the_same_command_resumes(tmp_path: Path) -> None:
    """Catches a stop of the real command line that loses steps, and a resume that starts anew."""
    job = write_job(tmp_path)
    command = [sys.executable, "-u", "-m", "isp", "train", str(job), "--nproc", "2"]
    with subprocess.Popen(
        [*command, "--training.steps", "100000"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        try:
            assert any(line.startswith("step=2") for line in run.stdout)
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=100)
        finally:
            run.kill()  # its ranks end with it
    assert run.returncode == 128 + signal.SIGINT
    assert "run the same command again to resume" in out
    assert "Traceback" not in err
    metrics = tmp_path / "out/job/latest/metrics.jsonl"
    done = read_metrics(metrics)[-1].step
    run_forked(job, "--training.steps", str(done + 2))
    assert [record.step for record in read_metrics(metrics)] == list(range(1, done + 3))


def test_an_id_outside_the_vocabulary_is_reported_in_one_line(tmp_path: Path) -> None:
    """Catches an error without file and position, and a check that needs a pass over the data."""
    job = write_job(tmp_path)
    with IndexedDatasetWriter(tmp_path / "corpus", dtype=token_dtype(272)) as writer:
        for document in range(12):
            writer.add_document(np.full(63, 260 if document == 7 else 5), np.array([256]))
    words = [f"--data.source={tmp_path / 'corpus'}", "--checkpoint.interval=1"]
    data = open_datasets(load_config(job, words).data, seed=0).train
    bad = next(i for i in range(12) if _is_refused(data, i))  # a step takes one sample
    assert 0 < bad < 8, "the test needs a step before it"
    with pytest.raises(RuntimeError) as ended:
        run_forked(job, *words)
    told = str(ended.value).splitlines()[-1]
    assert told.startswith("ValueError: "), "which the command line tells in a line"
    assert f"{tmp_path / 'corpus.bin'}, document 7, token 0 is id 260" in told
    (checkpoint,) = (tmp_path / "out/job/latest/checkpoint").glob(f"step_{bad}")
    assert verify(checkpoint).good


def _is_refused(data: Dataset, index: int) -> bool:
    try:
        data.sample(index)
    except ValueError:
        return True
    return False
