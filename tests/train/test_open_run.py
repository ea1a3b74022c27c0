"""Which folder a run is written to, when it is started, and when torchrun starts it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from isp.config import JobConfig, load_config
from isp.train.resume import open_run
from tests.train.jobs import run_folders, write_job


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


@pytest.fixture
def config(job: Path) -> JobConfig:
    """Of 8 steps."""
    return load_config(job)


def _launch(monkeypatch: pytest.MonkeyPatch, name: str, restarts: int) -> None:
    """What torchrun sets for its ranks."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))


def test_a_checkpoint_that_was_being_replaced_counts(job: Path, config: JobConfig) -> None:
    """Catches a run begun anew because it died between the two renames of its only checkpoint."""
    first = open_run(config)
    (first.folder.checkpoint_folder / "step_4.old").mkdir()
    again = open_run(config)
    assert (again.folder, again.resumes) == (first.folder, True)
    assert [path.name for path in first.folder.checkpoint_folder.iterdir()] == ["step_4"]
    assert run_folders(job) == [first.folder.path]


def test_a_restart_is_in_the_run_of_its_launch(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches restarts that take the last, finished run for theirs, or do not know their own."""
    _launch(monkeypatch, "first", 0)
    finished = open_run(config)
    (finished.folder.checkpoint_folder / "step_8").mkdir()
    _launch(monkeypatch, "second", 1)  # the ranks before died before they had opened a folder
    own = open_run(config)
    assert own.folder != finished.folder
    assert not own.resumes
    _launch(monkeypatch, "second", 2)
    again = open_run(config)
    assert again == own._replace(resumes=True), "also the time at which it was launched"
    (own.folder.checkpoint_folder / "step_4").mkdir()
    _launch(monkeypatch, "third", 0)
    later = open_run(config)
    assert (later.folder, later.resumes) == (own.folder, True)
    assert later.launched_at > own.launched_at


def test_a_launch_file_that_was_cut_off_belongs_to_nobody(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a restart that fails, again and again, on what a full disk has left."""
    _launch(monkeypatch, "one", 0)
    first = open_run(config)
    first.folder.launch_file.write_text('{"id')
    _launch(monkeypatch, "one", 1)
    assert open_run(config).folder != first.folder
