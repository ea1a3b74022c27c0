"""Hugging Face folders as checkpoints, and runs that begin from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isp.cli import main
from model.huggingface import with_init_from
from tests.model.folders import make_folder
from tests.train.jobs import numbers, run_folders, run_forked, write_job

KEYS = ("--data.micro_bsz=1", "--data.seq_len=32", "--training.dtype=float64", "--training.steps=2")


def test_a_folder_is_a_checkpoint_and_a_folder_again(tmp_path: Path) -> None:
    """Catches rows in other places, and a checkpoint that no run, or no export, can read."""
    source, into = tmp_path / "hf", tmp_path / "imported"
    make_folder("llama, tied", source)
    words = [str(source), "--into", str(into), "--dtype", "float64"]
    assert main(["checkpoint", "import", *words]) == 0
    assert main(["checkpoint", "verify", str(into)]) == 0
    assert main(["checkpoint", "export", str(into), "--hf", str(tmp_path / "again")]) == 0
    theirs, ours = (load_file(f / "model.safetensors") for f in (source, tmp_path / "again"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.double()), name

    job = write_job(tmp_path)
    lines = job.read_text().splitlines()
    job.write_text("\n".join(line for line in lines if not line.startswith("model:")))
    init = f"--model.init_from={source}"
    run_forked(job, *KEYS, init, "--job.name=direct")
    section = with_init_from({"init_from": str(source)})
    del section["init_from"]
    job.write_text(f"{job.read_text()}\nmodel: {json.dumps(section)}\n")
    run_forked(job, *KEYS, f"--checkpoint.initial_load_path={into}")
    (direct,), (imported,) = run_folders(job, "direct"), run_folders(job)
    assert len(numbers(direct)) == 2
    assert numbers(direct) == numbers(imported)


def test_what_is_there_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches checkpoints of a run that are lost."""
    (tmp_path / "step_1").mkdir()
    assert main(["checkpoint", "import", str(tmp_path), "--into", str(tmp_path)]) == 2
    assert "--into" in capsys.readouterr().err
