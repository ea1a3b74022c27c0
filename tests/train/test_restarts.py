"""Ranks that are killed, whenever it may be: they are started again, and nothing shows."""

from __future__ import annotations

import os
import random
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
from isp.train import main
from tests.ranks import run_programs
from tests.train.jobs import numbers, run_folders, run_forked, tensors, write_job


@dataclass(frozen=True, kw_only=True)
class Death:
    """When a rank is killed, in an attempt of its own: Python tells its hooks what it will do."""

    rank: int
    event: str
    """The call, before it is made: one of Python's audit events."""
    name: str
    """How the file or folder's name ends, which is the call's first argument."""
    times: int = 1
    """How often it has been called by then, in this attempt."""
    seconds: float = 0.0
    """Later by this, in whatever follows."""


def shard(rank: int, times: int = 1, seconds: float = 0.0) -> Death:
    """As `rank` begins to write its shard."""
    return Death(rank=rank, event="open", name=f"__{rank}_0.distcp", times=times, seconds=seconds)


def publishing(times: int = 1) -> Death:
    """As rank 0 renames what is complete: odd times the table of contents, even times the save."""
    return Death(rank=0, event="os.rename", name=".tmp", times=times)


def deleting(times: int = 1) -> Death:
    """As rank 0 removes a shard of an old checkpoint, the other one being there or not."""
    return Death(rank=0, event="os.remove", name=".distcp", times=times)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def _rank(rank: int, job: Path, words: Sequence[str], death: Death | None) -> None:
    if death is not None and rank == death.rank:
        sys.addaudithook(_Watch(death))
    main(load_config(job, words))


class _Watch:
    """Python's hook that kills this process as `death` says."""

    def __init__(self, death: Death) -> None:
        self._death, self._seen = death, 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        death = self._death
        if event != death.event or not str(args[0]).endswith(death.name):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return  # a resuming rank reads what it is to die writing
        self._seen += 1
        if self._seen == death.times and death.seconds:
            threading.Timer(death.seconds, _die).start()
        elif self._seen == death.times:
            _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _train(
    monkeypatch: pytest.MonkeyPatch, job: Path, deaths: Sequence[Death], *words: str
) -> None:
    """The job, started again after each of `deaths` as torchrun does: all ranks, in one launch."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch")
    for attempt, death in enumerate([*deaths, None]):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        if death is None:
            run_programs(2, _rank, job, words, None)
        else:
            with pytest.raises(RuntimeError, match=f"rank {death.rank} died"):
                run_programs(2, _rank, job, words, death)


def _expect_the_same(job: Path, steps: int) -> None:
    """Compare the only run with the undisturbed one, called whole, bit by bit."""
    (run,), (whole,) = run_folders(job), run_folders(job, "whole")
    wanted = numbers(whole)
    assert [number[0] for number in wanted] == list(range(1, steps + 1))
    assert wanted[-1][1] < wanted[0][1], "it has learned"
    assert numbers(run) == wanted
    ours, theirs = tensors(run, steps), tensors(whole, steps)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


STEPS = 40


def test_ranks_killed_at_chosen_moments(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a moment at which a death costs a checkpoint, a step, a record, or the run's end."""
    deaths = [
        shard(1, times=2),  # in the middle of a save
        shard(0, seconds=0.1),  # in the steps after it
        publishing(times=2),
        deleting(times=2),  # half-way through
    ]
    options = ["--training.steps", str(STEPS), "--checkpoint.interval", "2"]
    options += ["--checkpoint.keep_latest_k", "2"]
    run_forked(job, *options, "--job.name", "whole")
    _train(monkeypatch, job, deaths, *options)
    _expect_the_same(job, STEPS)
    (run,) = run_folders(job)
    assert (run / "logs/rank_0.log").read_text().count("resumed from") == len(deaths)
    left = sorted(path.name for path in (run / "checkpoint").glob("step_*"))
    assert left == [f"step_{STEPS - 2}", f"step_{STEPS}"]


def _any_death(random: random.Random) -> Death:
    """A death some saves from the start of an attempt."""
    times = random.randint(2, 5)  # the first save done: each attempt gets on
    rank = random.randint(0, 1)
    return random.choice(
        [
            shard(rank, times),
            shard(rank, times, seconds=random.uniform(0.001, 0.1)),
            shard(rank, times, seconds=random.uniform(0.001, 0.1)),
            publishing(2 * times - random.randint(0, 1)),
            deleting(2 * times),
        ]
    )


@pytest.mark.skipif("ISP_MANY_DEATHS" not in os.environ, reason="minutes: set ISP_MANY_DEATHS=1")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_ranks_killed_twenty_times(job: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Catches what the test above does, at moments that nobody has chosen."""
    chance = random.Random(mode)
    deaths = [_any_death(chance) for _ in range(20)]
    options = ["--training.steps", "300", "--checkpoint.interval", "1"]
    options += ["--checkpoint.keep_latest_k", "2", "--checkpoint.async_mode", mode]
    run_forked(job, *options, "--job.name", "whole")
    _train(monkeypatch, job, deaths, *options)
    _expect_the_same(job, 300)


def test_a_shard_cut_off_is_passed_over(job: Path) -> None:
    """Catches a damaged checkpoint that ends the run, or is taken, or left out without a word."""
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
    """Catches a restart that trains a finished run again, or spreads a run over two folders."""
    checkpoints = job.parent / "checkpoints"
    options = ["--checkpoint.folder", str(checkpoints)] if elsewhere else []
    options += ["--training.steps", "4", "--checkpoint.interval", "2"]
    run_forked(job, *options)
    (run,) = run_folders(job)
    wanted = numbers(run)
    if not elsewhere:
        checkpoints = run / "checkpoint"
    for step in {2, 4} - set(range(saved + 1)):
        shutil.rmtree(checkpoints / f"step_{step}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run_forked(job, *options)
    assert run_folders(job) == [run]
    assert numbers(run) == wanted
    assert (run / "logs/rank_0.log").read_text().count("resumed from") == (saved > 0)


def test_a_restart_does_not_go_back_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that goes back to load_step each time that one of its ranks dies."""
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
