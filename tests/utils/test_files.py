"""Foreign files: pipes and devices are refused in one line, and no write follows a link."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from isp.checkpoint.folder import folder_lock
from isp.config import load_config
from isp.config.data import DataConfig
from isp.data.sources import open_datasets
from isp.data.tokenizer import HFTokenizer
from isp.metrics import MetricsFile, TrackedRun, Tracker, Trackers, read_metrics
from isp.metrics.evaluation import Evaluation
from isp.models.huggingface.adapter_config import with_adapter
from isp.models.huggingface.weight_files import WeightFiles, copy_tokenizer
from isp.profile import Profile
from isp.profile.page import write_page
from isp.profile.trace import write_trace
from isp.train.folder.environment import Environment, RankPlace
from isp.train.folder.log_files import run_logging
from isp.train.folder.run_folder import LaunchRecord, RunFolder
from isp.utils.files import read_json, read_limited
from tests.models.folders import write_job

# -- readers -----------------------------------------------------------------------------------


def _config(folder: Path) -> object:
    return load_config(write_job(folder.parent, folder))


def _dataset(folder: Path) -> object:
    (folder / "data.arrow").write_bytes(b"")
    return open_datasets(DataConfig(source=str(folder), seq_len=8), seed=0)


def _adapter(folder: Path) -> object:
    return with_adapter({"hf": str(folder), "adapter": {"folder": str(folder)}})


def _index(folder: Path) -> object:
    return WeightFiles(folder).names


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": _config,
    "model.safetensors.index.json": _index,
    "adapter_config.json": _adapter,
    "state.json": _dataset,
    "dataset_dict.json": _dataset,
    "generation_config.json": lambda folder: read_json(folder / "generation_config.json"),
    "tokenizer.json": HFTokenizer,
    "model.safetensors": _index,
    "config.yaml": lambda folder: load_config(folder / "config.yaml"),
    "metrics.jsonl": lambda folder: read_metrics(folder / "metrics.jsonl"),
    "profile.json": lambda folder: Profile.load(folder / "profile.json"),
    "evaluation.json": lambda folder: Evaluation.load(folder / "evaluation.json"),
    "tokenizer_config.json": lambda folder: copy_tokenizer(folder, folder.parent),
}
"""Functions that read each file of a foreign folder, by its name."""

PLACED: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    # sparse: without a block on disk
    "endless": lambda path: (path.touch(), os.truncate(path, 2**40)),
    "nested": lambda path: path.write_text('{"a": ' + "[" * 200_000 + "\n"),
}


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", READERS)
@pytest.mark.timeout(60)
def test_pipes_devices_and_endless_files_are_refused(
    tmp_path: Path, name: str, placed: str
) -> None:
    """Catches a reader that waits for a pipe, takes all memory, or ends with a traceback."""
    folder = tmp_path / "folder"
    folder.mkdir()
    PLACED[placed](folder / name)
    if name == "tokenizer_config.json" and placed == "nested":
        pytest.skip("is copied as it is")
    with pytest.raises((ValueError, OSError)) as refused:
        READERS[name](folder)
    said = str(refused.value)
    assert name in said
    assert len(said.splitlines()) == 1
    assert len(said) < 1000


def test_an_unreadable_launch_file_counts_as_none(tmp_path: Path) -> None:
    """Catches a resume that waits for a pipe."""
    for number, place in enumerate(PLACED.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        place(folder / "launch.json")
        assert RunFolder(folder).launch() is None


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    """Catches a limit that is off by one."""
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert read_limited(file, 3) == b"abc"
    with pytest.raises(ValueError, match="file has more than 2 bytes"):
        read_limited(file, 2)


DATASET_FILES = ["../data.arrow", "/etc/hostname", "..", "", "a/b.arrow", 5, None, "absent.arrow"]


@pytest.mark.parametrize("name", DATASET_FILES)
def test_a_dataset_may_only_name_files_of_its_folder(tmp_path: Path, name: object) -> None:
    """Catches a downloaded dataset that trains on, or shows, any file of this machine."""
    (tmp_path / "data.arrow").write_bytes(b"")
    folder = tmp_path / "dataset"
    folder.mkdir()
    state = {"_data_files": [{"filename": name}]}
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"which is not in the folder|or it is no regular file"):
        open_datasets(DataConfig(source=str(folder), seq_len=8), seed=0)


# -- writers -----------------------------------------------------------------------------------

NAME = "2026-11-21_03-06-12"


class _Named(Tracker):
    def init(self, run: TrackedRun) -> str:
        return "id"

    def finish(self, *, failed: bool) -> None: ...


def _describe(run: RunFolder) -> None:
    run.describe("a: 1\n", Environment.of([RankPlace("host", "cpu")]).to_json())


def _track(run: RunFolder) -> None:
    with Trackers([f"{__name__}:_Named"], TrackedRun("job", "now", run.path)):
        pass


def _log(run: RunFolder) -> None:
    with run_logging(run.log_file(0), rank=1):
        logging.getLogger("isp").info("a line")


def _lock(run: RunFolder) -> None:
    with folder_lock(run.checkpoint_folder):
        pass


WRITERS: dict[str, Callable[[RunFolder], object]] = {
    "launch.json": lambda run: run.write_launch(LaunchRecord("id", 0.0)),
    ".launch.json": lambda run: run.write_launch(LaunchRecord("id", 0.0)),
    "config.yaml": _describe,
    ".config.yaml": _describe,
    "config.1.yaml": _describe,
    "env.json": _describe,
    ".env.json": _describe,
    ".probe": lambda run: RunFolder.reopen(run.path),
    f".tracker.{__name__}:_Named": _track,
    "trace.json.gz": lambda run: write_trace(run.path / "trace.json.gz", []),
    "profile.html": lambda run: write_page("page", run.path / "profile.html"),
    "metrics.jsonl": lambda run: MetricsFile(run.metrics_file).close(),
    "logs/rank_0.log": _log,
    "checkpoint/.lock": _lock,
}
"""Functions that write each file of a run's folder, by its name."""
REFUSED = {"metrics.jsonl", "logs/rank_0.log", "checkpoint/.lock"}
"""Files that are appended to or locked, for which a link is refused."""


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", WRITERS)
def test_no_file_of_a_run_is_written_through_a_link(tmp_path: Path, name: str, there: bool) -> None:
    """Catches a downloaded run that overwrites or creates a file elsewhere when it resumes."""
    run = RunFolder(tmp_path / "job" / NAME)
    run.checkpoint_folder.mkdir(parents=True)
    run.log_folder.mkdir()
    outside, link = tmp_path / "outside", run.path / name
    if there:
        outside.write_text("mine")
    link.symlink_to(outside)
    if name in REFUSED:
        with pytest.raises(OSError, match="symbolic link") as refused:
            WRITERS[name](run)
        assert refused.value.filename == str(link)
    else:
        WRITERS[name](run)
    assert (outside.read_text() == "mine") if there else not outside.exists()
    assert not list(run.path.rglob(".new.*"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/rank_0.log"])
def test_a_link_is_refused_before_ranks_start(tmp_path: Path, name: str) -> None:
    """Catches a link that is only found after all ranks have started."""
    run = RunFolder(tmp_path / "job" / NAME)
    run.log_folder.mkdir(parents=True)
    for place, said in ((os.mkfifo, "a pipe"), (lambda p: p.symlink_to(tmp_path), "symbolic link")):
        (run.path / name).unlink(missing_ok=True)
        place(run.path / name)
        with pytest.raises(ValueError, match=said):
            RunFolder.reopen(run.path)


def test_a_folder_that_is_a_link_stays_allowed(tmp_path: Path) -> None:
    """Catches a run on another disk that cannot resume."""
    (tmp_path / "disk").mkdir()
    (tmp_path / NAME).symlink_to(tmp_path / "disk")
    run = RunFolder.reopen(tmp_path / NAME)
    _describe(run)
    MetricsFile(run.metrics_file).close()
    _log(run)
    _lock(run)
    assert (tmp_path / "disk/config.yaml").read_text() == "a: 1\n"
    assert "a line" in (tmp_path / "disk/logs/rank_0.log").read_text()
