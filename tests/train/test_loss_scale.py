"""Training with a loss scale, and the end of a run whose gradients stay infinite."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from isp.core.mesh import Mode, PipelineSchedule
from isp.core.optim.config import GradScalerConfig
from isp.metrics import read_metrics
from model.config import ModelConfig
from tests.ranks import Said, run_isp, run_ranks
from tests.train.runs import OPTIMIZER, Layout, Meshes, Numbers, Task, make_run

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


def _same_bits(rank: int, layout: Layout) -> None:
    mesh = Meshes(rank).of(layout)
    plain = make_run(mesh, layout, TASK, dtype=torch.float32)
    numbers, weights = plain.numbers(range(4)), plain.weights()
    plain.close()
    config = replace(OPTIMIZER, grad_scaler=ALWAYS)
    scaled = make_run(mesh, layout, TASK, dtype=torch.float32, config=config)
    assert scaled.numbers(range(4)) == numbers
    assert all(norm > 0 for _, norm in numbers)
    assert scaled.optimizer.scaler is not None
    assert scaled.optimizer.scaler.scale == 2.0**14, "raised after every other step"
    for name, weight in scaled.weights().items():
        assert np.array_equal(weight, weights[name]), name
    scaled.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_scaled_loss_trains_to_the_same_bits(name: str) -> None:
    """Catches a micro-batch, or a route of gradients, to which the scale is not applied."""
    run_ranks(LAYOUTS[name].world, _same_bits, LAYOUTS[name])


def _learn(rank: int, layout: Layout) -> tuple[Numbers, Numbers, int, float]:
    """Train repeatedly on one batch in float32 and float16; return losses, skips and the last
    scale.
    """
    config = replace(OPTIMIZER, grad_scaler=GradScalerConfig(initial_scale=2.0**24))
    mesh, found = Meshes(rank).of(layout), []
    for dtype, steps in ((torch.float32, 8), (torch.float16, 22)):
        run = make_run(mesh, layout, TASK, dtype=dtype, config=config)
        found.append([number for _ in range(steps) for number in run.numbers(range(1))])
        run.close()
    assert run.optimizer.scaler is not None
    return *found, run.optimizer.num_skipped, run.optimizer.scaler.scale  # type: ignore[return-value]


def test_float16_finds_its_scale_and_learns() -> None:
    """Catches ranks that skip or scale differently, and float16 that does not learn like
    float32.
    """
    layout = LAYOUTS["zero bubble"]
    found = run_ranks(layout.world, _learn, layout)
    assert len({str(of_rank) for of_rank in found}) == 1, "as text, because nan is not nan"
    expected, numbers, skipped, scale = found[0]
    assert 1 < skipped < 8, "2 ** 24 overflows, and the search ends"
    assert scale == 2.0 ** (24 - (skipped - 1)), "the first overflow leaves the scale"
    taken = [(loss, norm) for loss, norm in numbers if math.isfinite(norm)]
    assert len(taken) == len(numbers) - skipped
    assert taken[-1][0] < 0.85 * taken[0][0]
    # 2e-3 and 5e-3: float16 has 11 bits. Later updates carry its roundings on to other gradients.
    for (loss, norm), (other, other_norm) in zip(taken, expected, strict=False):
        assert loss == pytest.approx(other, rel=2e-3)
        assert norm == pytest.approx(other_norm, rel=5e-3)


JOB = """
job: {{name: job, dump_folder: {folder}/out}}
model: {{vocab_size: 272, hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 24}}
data: {{source: {folder}/text.txt, seq_len: 64}}
training: {{steps: 12, device: cpu}}
checkpoint: {{interval: 1}}
"""


def _train(folder: Path, *options: str, num_ranks: int = 1) -> Said:
    """Train; return the error of the first rank, which must be that of all ranks."""
    (folder / "text.txt").write_text("some words to learn " * 500)
    (folder / "job.yaml").write_text(JOB.format(folder=folder))
    said = run_isp(num_ranks, "train", str(folder / "job.yaml"), *options)
    assert {of_rank.code for of_rank in said} == {said[0].code}
    return said[0]


BROKEN = ("--optimizer.lr", "1e30", "--optimizer.max_skipped_steps")
"""The first update makes the weights so large that no gradient is finite from then on."""


def test_a_run_that_only_skips_ends_with_one_error(tmp_path: Path) -> None:
    """Catches a run that skips forever, and an error that does not name the checkpoint to resume
    from.
    """
    run = _train(tmp_path, *BROKEN, "3", num_ranks=2)
    assert run.code == 2, run.err
    assert "Traceback" not in run.err
    (error,) = [line for line in run.err.splitlines() if line.startswith("error")]
    assert error.startswith("error: step 4: the gradients of 3 consecutive steps were not finite")
    assert "optimizer.max_skipped_steps=3" in error
    last = (tmp_path / "out/job/latest").resolve() / "checkpoint/step_1"
    assert last.is_dir()
    assert f"{last}: resume from there (checkpoint.load_step=1)" in error


def test_a_limit_of_0_never_ends_a_run_that_skips(tmp_path: Path) -> None:
    """Catches a limit of 0 that ends the run at once."""
    run = _train(tmp_path, *BROKEN, "0")
    assert run.code == 0, run.err
    records = read_metrics(tmp_path / "out/job/latest/metrics.jsonl")
    assert [record.skipped for record in records] == [False] + [True] * 11


def test_without_a_checkpoint_the_error_says_so(tmp_path: Path) -> None:
    """Catches an error that names a checkpoint that is not there."""
    run = _train(tmp_path, *BROKEN, "11", "--checkpoint.interval", "0")
    assert run.code == 2, run.err
    assert "step 12: the gradients of 11 consecutive steps" in run.err
    assert "there is no checkpoint from before them" in run.err


def test_the_search_for_a_float16_scale_does_not_count_as_skips(tmp_path: Path) -> None:
    """Catches a search for the scale that ends the run, and float16 refused by the
    configuration.
    """
    run = _train(
        tmp_path,
        *("--training.dtype", "float16", "--optimizer.max_skipped_steps", "2"),
        *("--optimizer.grad_scaler.initial_scale", "16777216", "--training.steps", "24"),
        *("--checkpoint.interval", "0", "--optimizer.lr", "0.01"),
    )
    assert run.code == 0, run.err
    assert "the next loss scale is 8388608" in run.out + run.err
    records = read_metrics(tmp_path / "out/job/latest/metrics.jsonl")
    assert sum(record.skipped for record in records) > 2
    scales = [record.loss_scale for record in records]
    assert scales[:2] == [2.0**24, 2.0**24], "that of the step, not of the next"
    assert scales[-1] == 2.0 ** (24 + 1 - sum(record.skipped for record in records))
    assert records[-1].loss < 0.9 * records[0].loss
