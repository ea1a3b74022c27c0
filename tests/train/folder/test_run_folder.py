"""The folder of a run: created, linked, found again, resumed, and refused where unusable."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from isp.config.sections import JobSection
from isp.metrics import MetricsFile, read_metrics
from isp.train.folder.environment import Environment, RankPlace
from isp.train.folder.run_folder import RunFolder
from isp.train.state.resume import earlier_runs
from tests.disk import no_file_larger_than
from tests.metrics.test_record import RECORD

NAME = "2026-11-21_03-06-12Z"


@pytest.fixture
def job(tmp_path: Path) -> JobSection:
    return JobSection(name="words", dump_folder=str(tmp_path / "outputs"))


def test_a_new_run_has_its_documented_folder(job: JobSection) -> None:
    """Catches a folder in another place than documented, or without a file."""
    run = RunFolder.create(job, NAME)
    run.describe("a: 1\n", Environment.of([RankPlace("host", "cpu")]).to_json())
    MetricsFile(run.metrics_file).close()
    assert run.path == Path(job.dump_folder, "words", NAME)
    found = {p.name for p in run.path.iterdir()}
    assert found == {"config.yaml", "env.json", "metrics.jsonl", "logs", "checkpoint"}
    assert run.config_file.read_text() == "a: 1\n"
    assert run.log_file(3) == run.path / "logs" / "rank_3.log"
    assert run.checkpoint_folder == run.path / "checkpoint"


def test_a_relative_dump_folder_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that loses its folder when the working directory changes."""
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(JobSection(name="words"), NAME)
    assert run.path == tmp_path / "outputs" / "words" / NAME


def test_runs_of_the_same_second_have_ordered_folders(job: JobSection) -> None:
    """Catches two runs that share a folder, and the tenth sorted before the second."""
    names = [RunFolder.create(job, NAME).path.name for _ in range(11)]
    assert names == [NAME, *(f"{NAME}_{n}" for n in range(2, 12))]
    assert [run.path.name for run in earlier_runs(job)] == names[::-1]


def test_latest_follows_new_and_resumed_runs(job: JobSection) -> None:
    """Catches a link that is not replaced, or is broken when the tree is moved."""
    first, second = RunFolder.create(job, NAME), RunFolder.create(job, "2026-11-22_00-00-00Z")
    latest = first.path.parent / "latest"
    assert os.readlink(latest) == second.path.name
    RunFolder.reopen(first.path)
    assert os.readlink(latest) == first.path.name
    assert sorted(p.name for p in latest.parent.iterdir()) == [NAME, second.path.name, "latest"]


def test_a_users_file_called_latest_is_kept(
    job: JobSection, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a folder of the user removed, or a run refused, because of the link."""
    mine = Path(job.dump_folder, "words", "latest")
    mine.mkdir(parents=True)
    RunFolder.create(job, NAME)
    assert not mine.is_symlink()
    assert "cannot link" in caplog.text
    assert sorted(p.name for p in mine.parent.iterdir()) == [NAME, "latest"]


def test_a_resumed_run_continues_in_its_folder(job: JobSection) -> None:
    """Catches metrics of lost steps kept, earlier metrics lost, or a lost first configuration."""
    run = RunFolder.create(job, NAME)
    run.describe("steps: 3\n", "{}")
    with MetricsFile(run.metrics_file) as metrics:
        for step in (1, 2, 3):
            metrics.write(replace(RECORD, step=step))
    for config in ("steps: 3\n", "steps: 4\n", "steps: 5\n"):
        again = RunFolder.reopen(run.path)
        again.describe(config, "{}")
    with MetricsFile(again.metrics_file, last_step=2) as metrics:
        metrics.write(replace(RECORD, step=3, loss=1.0))
    assert again == run
    assert [record.step for record in read_metrics(run.metrics_file)] == [1, 2, 3]
    assert read_metrics(run.metrics_file)[-1].loss == 1.0
    configs = {p.name: p.read_text() for p in run.path.glob("config*")}
    assert configs == {
        "config.1.yaml": "steps: 3\n",
        "config.2.yaml": "steps: 4\n",
        "config.yaml": "steps: 5\n",
    }


def test_other_ranks_use_the_folder_of_rank_0(job: JobSection, tmp_path: Path) -> None:
    """Catches a rank on a machine with a disk of its own that has no folder for its log."""
    run = RunFolder.create(job, NAME)
    assert RunFolder.join(run.path) == run
    elsewhere = tmp_path / "other disk" / "words" / NAME
    assert RunFolder.join(elsewhere).log_folder.is_dir()
    local = RunFolder.join(run.path, str(tmp_path / "local"))
    assert local.log_file(2).parent == tmp_path / "local" / "words" / NAME
    assert local.log_folder.is_dir()
    assert local.checkpoint_folder == run.checkpoint_folder


def test_a_missing_run_cannot_be_resumed(tmp_path: Path) -> None:
    """Catches an empty run created in place of the requested one."""
    with pytest.raises(ValueError, match="gone: no such run to resume"):
        RunFolder.reopen(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


def test_a_dump_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """Catches a traceback of the file system in place of the key to change."""
    file = tmp_path / "file"
    file.write_text("text")
    for folder in (file, file / "below"):
        with pytest.raises(ValueError, match=r"job\.dump_folder=.*cannot write to .*directory"):
            RunFolder.create(JobSection(dump_folder=str(folder)), NAME)
    with pytest.raises(ValueError, match=r"job\.dump_folder="):
        RunFolder.join(file / "words" / NAME)
    with pytest.raises(ValueError, match=r"job\.log_folder=.*file: cannot write"):
        RunFolder.join(tmp_path, str(file))
    assert file.read_text() == "text"


def test_a_full_disk_is_reported_before_the_run(job: JobSection) -> None:
    """Catches training that starts where nothing can be saved, and a partial run folder."""
    run = RunFolder.create(job, NAME)
    with no_file_larger_than(1000):
        with pytest.raises(ValueError, match=r"job\.dump_folder=.*room for checkpoints"):
            RunFolder.create(job, NAME)
        with pytest.raises(ValueError, match=r"job\.dump_folder="):
            RunFolder.reopen(run.path)
    assert earlier_runs(job) == [run]
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoint", "logs"]
    assert (run.path.parent / "latest").resolve() == run.path


def test_the_config_is_replaced_atomically(job: JobSection) -> None:
    """Catches a partial configuration, or none, on a disk that fills up."""
    run = RunFolder.create(job, NAME)
    run.describe("first\n", "{}")
    with no_file_larger_than(3), pytest.raises(OSError, match="File too large"):
        run.describe("second\n", "{}")
    assert run.config_file.read_text() == "first\n"
    assert not list(run.path.glob("config.*.yaml"))
