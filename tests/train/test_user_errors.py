"""The real command line on real ranks: what a person sees when something is wrong or stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isp.metrics import read_metrics

ROOT = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[str]"]

JOB = """
job: {name: job, dump_folder: out}
model: {vocab_size: 272, hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 24}
data: {source: text.txt, seq_len: 64}
parallel: {tensor: {size: 2, mode: isp}, weight: {size: 2}}
training: {steps: 100000, device: cpu}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a text and a job that trains on it for longer than any test."""
    (tmp_path / "text.txt").write_text("some words to learn " * 500)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts the job on two ranks; nothing that it started outlives the test."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    started = []

    def run(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-m", "isp", "train", "job.yaml", "--nproc", "2", *options]
        run = subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)
        started.append(run)
        return run

    yield run
    for process in started:
        process.kill()  # its ranks follow
        process.communicate(timeout=60)


def _await_step(run: subprocess.Popen[str], step: int) -> None:
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith(f"step: {step}/"):
            return
    raise AssertionError(f"ended before step {step}: {run.communicate()[1]}")


@pytest.mark.parametrize("name", ["absent.txt", "empty.txt"])
def test_text_that_cannot_be_read_is_told_once(start: Start, name: str) -> None:
    """A traceback, or the same message from every rank, where a file is missing or empty."""
    run = start("--data.source", name)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 2
    assert err.count(name) == 1, err
    assert "Traceback" not in err


def test_ctrl_c_saves_and_the_same_command_goes_on(start: Start, folder: Path) -> None:
    """A stop that loses steps, or a resume that begins anew."""
    run = start()
    _await_step(run, 2)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=100)
    assert run.returncode == 128 + signal.SIGINT
    assert "the same command goes on from there" in out
    assert "Traceback" not in err
    done = read_metrics(folder / "out/job/latest/metrics.jsonl")[-1].step
    again = start("--training.steps", str(done + 2))
    out, err = again.communicate(timeout=100)
    assert again.returncode == 0, err
    assert f"step: {done + 1}/{done + 2}" in out
    records = read_metrics(folder / "out/job/latest/metrics.jsonl")
    assert [record.step for record in records] == list(range(1, done + 3))


def test_a_killed_rank_ends_the_others_and_keeps_the_checkpoint(start: Start, folder: Path) -> None:
    """A hang of the ranks that are left, or a checkpoint lost with the one that died."""
    run = start("--checkpoint.interval", "2")
    _await_step(run, 6)
    workers = subprocess.run(
        ["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    begin = time.monotonic()
    _, err = run.communicate(timeout=100)
    assert time.monotonic() - begin < 60
    assert run.returncode not in (0, None)
    assert "SIGKILL" in err or "killed" in err, err
    steps = read_metrics(folder / "out/job/latest/metrics.jsonl")[-1].step + 1
    again = start("--training.steps", str(steps))
    out, err = again.communicate(timeout=100)
    assert again.returncode == 0, err
    assert "resumed from" in out
    assert f"step: {steps}/{steps}" in out


def test_damaged_checkpoints_are_told(start: Start, folder: Path) -> None:
    """A traceback, an abort or ranks that start, where a line says what is wrong."""
    checkpoint = folder / "out/job/2026-11-21_03-06-12/checkpoint/step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    run = start()
    _, err = run.communicate(timeout=100)
    assert run.returncode == 2
    assert err.startswith("error: no good checkpoint in")
    assert "Traceback" not in err
