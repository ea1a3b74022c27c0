"""Whole runs of `model.hf`: in every layout, stopped and gone on with, as one process trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.folders import write_folder, write_job
from tests.train.jobs import assert_learns_alike, run_folders, run_forked, tensors

ISP = ("--parallel.tensor.size=2", "--parallel.weight.size=4", "--data.micro_num=1")
MSP = ("--parallel.tensor.size=2", "--parallel.tensor.mode=msp", "--data.micro_num=1")
ALONE = ("--data.micro_num=2",)
"""The micro-batches of the two data ranks of `ISP`."""


@pytest.mark.parametrize(("kind", "weights"), [("llama", True), ("qwen3_moe", False)])
def test_a_folder_trains_alike_in_every_layout(tmp_path: Path, kind: str, weights: bool) -> None:
    """Catches weights that depend on the layout, and shards lost by a resume in another one."""
    model = write_folder(tmp_path / "model", kind, weights=weights)
    alone = write_job(tmp_path, model, "alone")
    run_forked(alone, *ALONE, num_ranks=1)
    job = write_job(tmp_path, model, "spread")
    run_forked(job, *ISP, "--training.steps=2", num_ranks=4)
    run_forked(job, *MSP, "--training.steps=3", num_ranks=4)
    run_forked(job, "--parallel.weight.size=2", "--data.micro_num=1", num_ranks=2)
    (one,), (many,) = run_folders(alone, "alone"), run_folders(job, "spread")
    assert_learns_alike(one, many)
    last = tensors(many, 5)
    for name, tensor in tensors(one, 5).items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-7, atol=1e-9)
