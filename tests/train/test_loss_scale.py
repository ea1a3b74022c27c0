"""Training with a loss scale, and the end of a run whose gradients stay infinite."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from isp.metrics import read_metrics
from isp.parallel import Mode, PipelineSchedule
from isp.settings import GradScalerConfig
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import OPTIMIZER, Layout, Meshes, Numbers, Task, make_run

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=24
)
TASK = Task(model=MODEL)
LAYOUTS = {
    "isp": Layout(mode=Mode.ISP, tensor=2, weight=4, data=2, micro=2),
    "fsp": Layout(mode=Mode.FSP, tensor=2, data=2, micro=2),
    "zero bubble": Layout(
        mode=Mode.ISP,
        weight=2,
        data=2,
        pipeline=2,
        schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
        micro=2,
    ),
}
ALWAYS = GradScalerConfig(use="always", initial_scale=2.0**12, growth_interval=2)


def _same_bits(rank: int, layout: Layout, dtype: torch.dtype) -> None:
    mesh = Meshes(rank).of(layout)
    plain = make_run(mesh, layout, TASK, dtype=dtype)
    numbers, weights = plain.numbers(range(6)), plain.weights()
    plain.close()
    config = replace(OPTIMIZER, grad_scaler=ALWAYS)
    scaled = make_run(mesh, layout, TASK, dtype=dtype, config=config)
    assert scaled.numbers(range(6)) == numbers
    assert all(norm > 0 for _, norm in numbers)
    assert scaled.optimizer.scaler is not None
    assert scaled.optimizer.scaler.scale == 2.0**15, "raised after every other step"
    for name, weight in scaled.weights().items():
        assert np.array_equal(weight, weights[name]), name
    scaled.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_scaled_loss_trains_to_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Catches a micro-batch, or a route of gradients, that the scale does not reach."""
    run_ranks(LAYOUTS[name].world, _same_bits, LAYOUTS[name], dtype)


def _learn(rank: int, layout: Layout, dtype: torch.dtype) -> tuple[Numbers, int, float]:
    """Numbers on one batch again and again, steps skipped, and the last scale."""
    config = replace(OPTIMIZER, grad_scaler=GradScalerConfig(initial_scale=2.0**24))
    run = make_run(Meshes(rank).of(layout), layout, TASK, dtype=dtype, config=config)
    numbers = [number for _ in range(30) for number in run.numbers(range(1))]
    scaler = run.optimizer.scaler
    run.close()
    return numbers, run.optimizer.num_skipped, 0.0 if scaler is None else scaler.scale


@pytest.mark.parametrize("name", LAYOUTS)
def test_float16_finds_its_scale_and_learns(name: str) -> None:
    """Catches ranks that skip or scale differently, and float16 that does not learn as float32."""
    layout = LAYOUTS[name]
    found = run_ranks(layout.world, _learn, layout, torch.float16)
    assert len({str(of_rank) for of_rank in found}) == 1, "as text, because nan is not nan"
    numbers, skipped, scale = found[0]
    assert 1 < skipped < 20, "2 ** 24 overflows, and the search ends"
    assert scale == 2.0 ** (24 - (skipped - 1)), "the first overflow leaves the scale"
    wanted = run_ranks(layout.world, _learn, layout, torch.float32)[0][0]
    taken = [(loss, norm) for loss, norm in numbers if math.isfinite(norm)]
    assert len(taken) == len(numbers) - skipped
    assert taken[-1][0] < 0.8 * taken[0][0]
    # 2e-3 and 5e-3: float16 has 11 bits. Later updates carry its roundings on to other gradients.
    for (loss, norm), (other, other_norm) in list(zip(taken, wanted, strict=False))[:12]:
        assert loss == pytest.approx(other, rel=2e-3)
        assert norm == pytest.approx(other_norm, rel=5e-3)


JOB = """
job: {name: job, dump_folder: out}
model: {vocab_size: 272, hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 24}
data: {source: text.txt, seq_len: 64}
training: {steps: 12, device: cpu}
checkpoint: {interval: 1}
"""


def _train(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "text.txt").write_text("some words to learn " * 500)
    (folder / "job.yaml").write_text(JOB)
    return subprocess.run(
        [sys.executable, "-m", "isp", "train", "job.yaml", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


BROKEN = ("--optimizer.lr", "1e30", "--optimizer.max_skipped_steps")
"""The first update makes the weights so large that no gradient is finite from then on."""


def test_a_run_that_only_skips_ends_with_one_error(tmp_path: Path) -> None:
    """Catches a run that goes on doing nothing, or ends with the checkpoint left to be guessed."""
    run = _train(tmp_path, *BROKEN, "3", "--nproc", "2")
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    (error,) = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert error.startswith("error: step 4: the gradients of 3 steps in a row were not finite")
    assert "optimizer.max_skipped_steps=3" in error
    last = (tmp_path / "out/job/latest").resolve() / "checkpoint/step_1"
    assert last.is_dir()
    assert f"{last}: go on from there (checkpoint.load_step=1)" in error


@pytest.mark.parametrize("limit", ["0", "12"])
def test_a_run_within_its_limit_goes_on_skipping(tmp_path: Path, limit: str) -> None:
    """Catches a limit of 0 that ends the run at once, and one that comes a step early."""
    run = _train(tmp_path, *BROKEN, limit)
    assert run.returncode == 0, run.stderr
    records = read_metrics(tmp_path / "out/job/latest/metrics.jsonl")
    assert [record.skipped for record in records] == [False] + [True] * 11


def test_without_a_checkpoint_the_error_says_so(tmp_path: Path) -> None:
    """Catches an error that names a checkpoint that is not there."""
    run = _train(tmp_path, *BROKEN, "11", "--checkpoint.interval", "0")
    assert run.returncode == 2, run.stderr
    assert "step 12: the gradients of 11 steps" in run.stderr
    assert "there is no checkpoint from before them" in run.stderr


def test_float16_searches_its_scale_within_any_limit(tmp_path: Path) -> None:
    """Catches a search for the scale that ends the run, and float16 the config does not take."""
    run = _train(
        tmp_path,
        *("--training.dtype", "float16", "--optimizer.max_skipped_steps", "2"),
        *("--optimizer.grad_scaler.initial_scale", "16777216", "--training.steps", "24"),
        *("--checkpoint.interval", "0", "--optimizer.lr", "0.01"),
    )
    assert run.returncode == 0, run.stderr
    assert "the next loss scale is 8388608" in run.stdout + run.stderr
    records = read_metrics(tmp_path / "out/job/latest/metrics.jsonl")
    assert sum(record.skipped for record in records) > 2
    scales = [record.loss_scale for record in records]
    assert scales[:2] == [2.0**24, 2.0**24], "that of the step, not of the next"
    assert scales[-1] == 2.0 ** (24 + 1 - sum(record.skipped for record in records))
    assert records[-1].loss < 0.9 * records[0].loss
