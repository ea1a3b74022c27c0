"""Ranks that are killed at any time are restarted, and the results are the same."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from isp.config import load_config
from isp.train.run import main
from tests.ranks import run_programs
from tests.train.jobs import numbers, run_folders, run_forked, tensors, write_job


@dataclass(kw_only=True)
class Death:
    """The moment at which a rank is killed, by an audit hook, which Python calls before each
    operation.
    """

    rank: int
    event: str
    """The audit event, raised before the operation."""
    name: str
    """The end of the file or folder name in the event's first argument."""
    times: int = 1
    """The occurrence of the event at which the rank dies, in this attempt."""
    seconds: float = 0.0
    """A delay of the death after the event."""
    seen: int = 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Kill the process at the chosen event, as Python's audit hook."""
        if event != self.event or not str(args[0]).endswith(self.name):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return  # only a write counts: a resuming rank reads the same file
        self.seen += 1
        if self.seen == self.times and self.seconds:
            threading.Timer(self.seconds, _die).start()
        elif self.seen == self.times:
            _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS = [
    # in the middle of a save: as rank 1 begins to write its shard
    Death(rank=1, event="open", name="__1_0.distcp", times=2),
    # in the steps after it
    Death(rank=0, event="open", name="__0_0.distcp", seconds=0.05),
    # when complete files are renamed: the table of contents first, then the save
    Death(rank=0, event="os.rename", name=".tmp", times=2),
    # half-way through an old checkpoint that is removed
    Death(rank=0, event="os.remove", name=".distcp", times=2),
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def _rank(rank: int, job: Path, words: Sequence[str], death: Death) -> None:
    if rank == death.rank:
        sys.addaudithook(death)
    main(load_config(job, words))


def _expect_the_same(job: Path, steps: int) -> None:
    """Compare the only run with the undisturbed run, called whole, bit by bit."""
    (run,), (whole,) = run_folders(job), run_folders(job, "whole")
    expected = numbers(whole)
    assert [number[0] for number in expected] == list(range(1, steps + 1))
    assert expected[-1][1] < expected[0][1], "it has learned"
    assert numbers(run) == expected
    ours, theirs = tensors(run, steps), tensors(whole, steps)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


STEPS = 32


@pytest.mark.slow
def test_ranks_killed_at_chosen_moments_lose_nothing(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a moment at which a death loses a checkpoint, a step, a record, or the end of the
    run.
    """
    options = ["--training.steps", str(STEPS), "--checkpoint.interval", "2"]
    options += ["--checkpoint.keep_latest_k", "2"]
    run_forked(job, *options, "--job.name", "whole")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch")
    for attempt, death in enumerate(DEATHS):  # as torchrun does: all ranks, in one launch
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with pytest.raises(RuntimeError, match=f"rank {death.rank} died"):
            run_programs(2, _rank, job, options, death)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(len(DEATHS)))
    run_forked(job, *options)
    _expect_the_same(job, STEPS)
    (run,) = run_folders(job)
    assert (run / "logs/rank_0.log").read_text().count("resumed from") == len(DEATHS)
    left = sorted(path.name for path in (run / "checkpoint").glob("step_*"))
    assert left == [f"step_{STEPS - 2}", f"step_{STEPS}"]


def test_a_truncated_shard_is_skipped(job: Path) -> None:
    """Catches a damaged checkpoint that ends the run, is loaded, or is silently skipped."""
    run_forked(job, "--training.steps", "6", "--job.name", "whole")
    run_forked(job, "--training.steps", "4", "--checkpoint.interval", "1")
    (run,) = run_folders(job)
    newest = run / "checkpoint/step_4/__1_0.distcp"
    whole = newest.stat().st_size
    os.truncate(newest, whole - 1)
    run_forked(job, "--training.steps", "6")
    _expect_the_same(job, 6)
    log = (run / "logs/rank_0.log").read_text()
    assert "resumed from" in log
    assert "step_3, the newest good one\n  passed over step_4: verifying" in log
    assert f"{newest.name} has {whole - 1} bytes instead of {whole}" in log


@pytest.mark.parametrize(
    ("saved", "elsewhere"),
    [(0, False), (2, True), (4, False)],
    ids=["none saved", "half-way in checkpoint.folder", "all saved"],
)
def test_a_restart_stays_in_its_run(
    job: Path, monkeypatch: pytest.MonkeyPatch, saved: int, elsewhere: bool
) -> None:
    """Catches a restart that trains a finished run again, or splits a run over two folders."""
    checkpoints = job.parent / "checkpoints"
    options = ["--checkpoint.folder", str(checkpoints)] if elsewhere else []
    options += ["--training.steps", "4", "--checkpoint.interval", "2"]
    run_forked(job, *options)
    (run,) = run_folders(job)
    expected = numbers(run)
    if not elsewhere:
        checkpoints = run / "checkpoint"
    for step in {2, 4} - set(range(saved + 1)):
        shutil.rmtree(checkpoints / f"step_{step}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run_forked(job, *options)
    assert run_folders(job) == [run]
    assert numbers(run) == expected
    assert (run / "logs/rank_0.log").read_text().count("resumed from") == (saved > 0)


def test_a_restart_does_not_go_back_to_load_step(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that goes back to load_step each time one of its ranks dies."""
    options = ["--checkpoint.interval", "1", "--training.steps"]
    run_forked(job, *options, "6", "--job.name", "whole")
    run_forked(job, *options, "3")
    back = ["--checkpoint.load_step", "1"]
    run_forked(job, *options, "4", *back)  # as far as it came before a rank died
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run_forked(job, *options, "6", *back)
    _expect_the_same(job, 6)
    (run,) = run_folders(job)
    log = (run / "logs/rank_0.log").read_text()
    assert "step_1, as load_step=1 says" in log
    assert "step_4, the newest good one since the run went back to load_step=1" in log
