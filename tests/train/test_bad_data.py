"""A run whose data turn out to be wrong while it trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from isp.checkpoint import verify
from isp.config import load_config
from isp.data.dataset import PackedDataset, open_datasets
from isp.data.indexed import IndexedDatasetWriter, token_dtype
from tests.train.jobs import ROOT, write_job


@pytest.mark.timeout(400)
def test_an_id_out_of_the_vocabulary_ends_the_run_in_a_line(tmp_path: Path) -> None:
    """Catches a traceback, or ranks left hanging; and a check that costs a pass over the data."""
    job = write_job(tmp_path)
    with IndexedDatasetWriter(tmp_path / "corpus", dtype=token_dtype(272)) as writer:
        for document in range(12):
            writer.add_document(np.full(63, 260 if document == 7 else 5), np.array([256]))
    words = [f"--data.source={tmp_path / 'corpus'}", "--checkpoint.interval=1"]
    data = open_datasets(load_config(job, words).data, seed=0).train
    bad = next(i for i in range(12) if _is_refused(data, i))  # a step takes one sample
    assert 0 < bad < 8, "the test needs a step before it"
    done = subprocess.run(
        [sys.executable, "-m", "isp", "train", str(job), "--nproc", "2", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=350,
    )
    (told,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2
    assert f"{tmp_path / 'corpus.bin'}, document 7, token 0 is id 260" in told
    assert "Traceback" not in done.stderr
    (checkpoint,) = (tmp_path / "out/job/latest/checkpoint").glob(f"step_{bad}")
    assert verify(checkpoint).good


def _is_refused(data: PackedDataset, index: int) -> bool:
    try:
        data.sample(index)
    except ValueError:
        return True
    return False
