"""Launches of a job: the order in which its runs were launched, and the launcher of a rank."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from isp.config.sections import JobSection
from isp.train.folder.run_folder import LaunchRecord, RunFolder, run_name
from isp.train.state.resume import earlier_runs, launch_time, launcher, process_name

NAME = "2026-11-21_03-06-12Z"
SECONDS = 1795230372.0
"""The same moment since 1970."""


@pytest.fixture
def job(tmp_path: Path) -> JobSection:
    return JobSection(name="words", dump_folder=str(tmp_path / "outputs"))


def test_earlier_runs_are_found_in_order(job: JobSection) -> None:
    """Catches the wrong order, another job's run, and a link or foreign folder taken for a run."""
    assert earlier_runs(job) == []
    names = ["2026-01-02_00-00-00Z", "2025-12-31_23-59-59Z", "2026-01-01_00-00-00Z"]
    for name in names:
        RunFolder.create(job, name)
    RunFolder.create(replace(job, name="other"), NAME)
    of_job = Path(job.dump_folder, "words")
    (of_job / "notes").mkdir()
    (of_job / "2026-13-01_00-00-00Z").mkdir()
    (of_job / NAME).write_text("a file")
    assert [run.path.name for run in earlier_runs(job)] == sorted(names, reverse=True)


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set local time to nine hours ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def _set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(time, "time", lambda: seconds)


def _launch(job: JobSection, name: str, at: float | None) -> str:
    """Create a run, and its launch.json unless `at` is None."""
    run = RunFolder.create(job, name)
    if at is not None:
        run.write_launch(LaunchRecord("none", at))
    return run.path.name


@pytest.mark.parametrize(
    "runs",
    [
        [("2026-11-21_12-06-12", SECONDS), ("2026-11-21_04-06-12", SECONDS + 3600)],
        [("2026-10-25_02-50-00", SECONDS), ("2026-10-25_02-10-00", SECONDS + 1200)],
        [("2026-11-21_12-06-12", SECONDS), ("2026-11-21_04-06-12Z", SECONDS + 3600)],
        [("2026-11-21_12-06-12", None), ("2026-11-21_04-06-12Z", None)],
        [("2026-11-21_12-06-12", None), ("2026-11-21_04-06-12Z", SECONDS + 3600)],
        [("2026-11-21_03-06-12Z", SECONDS), ("2026-11-21_12-06-13", None)],
    ],
    ids=[
        "another time zone",
        "the hour repeated in autumn",
        "an old name and a new one",
        "both without launch.json",
        "an old one without launch.json",
        "a later one without launch.json",
    ],
)
def test_the_run_launched_last_is_the_newest(
    job: JobSection, tokyo: None, runs: list[tuple[str, float | None]]
) -> None:
    """Catches an order by names, some of which are in local time."""
    names = [_launch(job, *run) for run in runs]
    assert [run.path.name for run in earlier_runs(job)] == names[::-1]


@pytest.mark.parametrize("back", [3600.0, 0.0], ids=["set back", "standing still"])
def test_a_clock_set_back_hides_no_launch(
    job: JobSection, tokyo: None, monkeypatch: pytest.MonkeyPatch, back: float
) -> None:
    """Catches a run whose launch seems as old as that of an earlier run, or older."""
    names = []
    for number in range(3):
        _set_clock(monkeypatch, SECONDS - number * back)
        names.append(_launch(job, run_name(), launch_time(job)))
    assert names[0] == NAME, "in UTC"
    assert [run.path.name for run in earlier_runs(job)] == names[::-1]
    _set_clock(monkeypatch, SECONDS + 1e6)
    assert launch_time(job) == SECONDS + 1e6, "the clock again, once it is ahead"


def _report(to: Connection, generations: int) -> None:
    """Send the launcher of a process that is this many forks away."""
    to.send(_of_rank(generations - 1) if generations else launcher())


def _of_rank(generations: int = 0) -> str:
    """Return the launcher of a rank that this process, or a child of it, has started."""
    fork = mp.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=_report, args=(there, generations))
    process.start()
    assert here.poll(60)
    found: str = here.recv()
    process.join()
    return found


def test_ranks_of_one_launcher_identify_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two launches taken for one, and a restarted rank that does not recognize its
    launch.
    """
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert _of_rank() == "", "no launcher: two commands of one shell are two launches"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert _of_rank() == _of_rank() == process_name(os.getpid())
    assert _of_rank(1) not in ("", _of_rank())
    assert process_name(2**30) == ""
    assert launcher() == process_name(os.getppid())
