"""`RunFolder`: the folder of a run, `outputs/<job>/<time>/`, and its files.

    config.yaml      the whole configuration       (config.1.yaml: before the run was resumed)
    env.json         software and machines         (env.1.json)
    launch.json      the launch that started the run last, and the step at which the run finished
    metrics.jsonl    a line for each record: see `isp.metrics`
    logs/            rank_0.log ... (elsewhere with `job.log_folder`)
    checkpoint/      see `isp.checkpoint`
    evaluation/      results of `isp evaluate` on the newest checkpoint

Next to it, `latest` is a link to the run that was started or resumed last. Only rank 0 writes,
except for the log, checkpoint files, traces and memory snapshots of each rank.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from isp.config.sections import CHECKPOINT_FOLDER, ENVIRONMENT_FILE, JobSection
from isp.utils.files import (
    check_written_on,
    new_file,
    read_limited,
    write_durably,
    write_whole,
    written_whole,
)

__all__ = [
    "RUN_NAME",
    "LaunchRecord",
    "RunFolder",
    "check_can_create",
    "explained",
    "make_unique",
    "named_time",
    "run_name",
    "try_writing",
]

logger = logging.getLogger(__name__)

_TIME = "%Y-%m-%d_%H-%M-%S"
RUN_NAME = re.compile(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)(Z?)(?:_(\d+))?")
"""Pattern of a run's name: a time, Z if the time is in UTC, and a number if the name was taken."""
_PROBE_BYTES = 2**16
"""Bytes that `try_writing` writes: enough to find a full disk."""


def run_name() -> str:
    """Return the name of a run that starts now, such as `2026-11-21_03-06-12Z`.

    Names are in UTC, marked by `Z`; earlier versions of ISP wrote local time, without it.
    """
    return datetime.fromtimestamp(time.time(), UTC).strftime(f"{_TIME}Z")


def named_time(match: re.Match[str]) -> float | None:
    """Return the time in a run's name that matches `RUN_NAME`, in seconds since 1970.

    Returns None if the digits are not a valid date and time.
    """
    try:
        named = datetime.strptime(match[1], _TIME)
        return (named.replace(tzinfo=UTC) if match[2] else named).timestamp()
    except (ValueError, OverflowError):
        return None


class LaunchRecord(NamedTuple):
    """The last launch of a run: the content of its `launch.json`."""

    id: str
    """torchrun's name for the launch (`--rdzv-id`)."""
    at: float
    """Time of the launch from `state.resume.launch_time`, in seconds since 1970."""
    finished_step: int | None = None
    """The step at which the run finished, all files written; None if it has not finished."""
    launcher: str = ""
    """The process of torchrun that started rank 0, from `state.resume.launcher`; "" if unknown."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of the run at `path`.

    Rank 0 makes it with `create` or opens it with `reopen`; then all ranks call `join`.
    """

    path: Path
    logs: Path | None = None
    """Folder of this machine's logs if it is outside of the run's folder, else None."""

    @classmethod
    def create(cls, job: JobSection, name: str) -> RunFolder:
        """Make the folder of a new run of `job`, called `name`, or `name_2` ... if that exists.

        Call it on rank 0, which sends `path` to the other ranks. Raises ValueError if the folder
        cannot be written to.
        """
        folder = Path(job.dump_folder) / job.name
        assert RUN_NAME.fullmatch(name)
        with explained(f"job.dump_folder={job.dump_folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            run = cls(make_unique(folder.absolute(), name))
            try:
                run._prepare()
            except OSError:  # leave no folder that the next start would take for a run
                shutil.rmtree(run.path, ignore_errors=True)
                raise
        return run

    @classmethod
    def reopen(cls, path: str | Path) -> RunFolder:
        """Open the folder of a run to resume it, on rank 0.

        Raises ValueError if it does not exist or cannot be written to.
        """
        run = cls(Path(path).absolute())
        if not run.path.is_dir():
            raise ValueError(f"{run.path}: no such run to resume: its folder is gone")
        with explained(f"job.dump_folder={run.path.parent.parent}"):
            run.check_written_on()
            run._prepare()
        return run

    @classmethod
    def join(cls, path: str | Path, log_folder: str | None = None) -> RunFolder:
        """Return the folder that rank 0 has made, and make the folder for this machine's logs.

        Call it on every rank. Without `log_folder`, logs go to the run's folder, which is then also
        made on machines that do not share rank 0's disk. Raises ValueError if the folder of logs
        cannot be written to.
        """
        run = cls(Path(path))
        key = f"job.dump_folder={run.path.parent.parent}"
        if log_folder is not None:
            key = f"job.log_folder={log_folder}"
            run = cls(run.path, Path(log_folder).absolute() / run.path.parent.name / run.path.name)
        with explained(key):
            run.log_folder.mkdir(parents=True, exist_ok=True)
        return run

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment_file(self) -> Path:
        return self.path / ENVIRONMENT_FILE

    @property
    def launch_file(self) -> Path:
        return self.path / "launch.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log_folder(self) -> Path:
        return self.logs or self.path / "logs"

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / CHECKPOINT_FOLDER

    def log_file(self, rank: int) -> Path:
        return self.log_folder / f"rank_{rank}.log"

    def describe(self, config: str, environment: str) -> None:
        """Write config.yaml and env.json, and keep those of earlier launches if they differ."""
        _replace(self.config_file, config)
        _replace(self.environment_file, environment)

    def launch(self) -> LaunchRecord | None:
        """Return the last launch of the run; None if `launch.json` is missing or not valid."""
        try:
            launch = LaunchRecord(**json.loads(read_limited(self.launch_file)))
            has_time = math.isfinite(launch.at)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError):
            return None  # The caller then orders the run by the time in its name.
        return launch if has_time and isinstance(launch.finished_step, int | None) else None

    def write_launch(self, launch: LaunchRecord) -> None:
        """Replace `launch.json` by `launch`, the launch that starts the run now."""
        with explained(f"job.dump_folder={self.path.parent.parent}"):
            write_whole(self.launch_file, json.dumps(launch._asdict()), durable=True)

    def write_finished(self, step: int | None) -> None:
        """Record in `launch.json` that the run finished at `step`; None: that it has not finished.

        Raises ValueError if `launch.json` was removed or changed.
        """
        launch = self.launch()
        if launch is None:
            raise ValueError(f"{self.launch_file} was removed or changed during the run")
        self.write_launch(launch._replace(finished_step=step))

    def check_written_on(self) -> None:
        """Raise OSError if a file that a resumed run appends to is a link or a pipe."""
        for path in (self.metrics_file, *self.log_folder.glob("rank_*.log")):
            check_written_on(path)

    def _prepare(self) -> None:
        """Make the subfolders and the link `latest`; raise OSError if nothing can be written."""
        self.log_folder.mkdir(exist_ok=True)
        self.checkpoint_folder.mkdir(exist_ok=True)
        try_writing(self.path)
        _link_latest(self.path)


def make_unique(folder: Path, name: str) -> Path:
    """Make the folder `name` in `folder`, or the first of `name_2`, `name_3` ... that is free."""
    for number in itertools.count(1):
        path = folder / (name if number == 1 else f"{name}_{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def _link_latest(path: Path) -> None:
    """Point the link `latest` next to `path` to `path`; the old link is replaced in one step."""
    link, new = path.parent / "latest", path.parent / f".latest_{path.name}"
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(path.name, target_is_directory=True)
        os.replace(new, link)
    except OSError as error:  # the file system has no links, or `latest` is a folder
        new.unlink(missing_ok=True)
        logger.warning("cannot link %s to this run: %s", link, error.strerror)


def _replace(path: Path, text: str) -> None:
    """Write `text` to `path` in one step, and keep a file with other text under a numbered name.

    The old `config.yaml` becomes `config.1.yaml`, or the next number that is free.
    """
    if path.is_file() and read_limited(path).decode(errors="replace") == text:
        return

    def write(new: Path) -> None:
        """Write the new file; once it is on disk, rename the old one."""
        write_durably(new, text.encode())
        if os.path.lexists(path):
            numbered = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in itertools.count(1))
            os.replace(path, next(old for old in numbered if not os.path.lexists(old)))

    written_whole(path, write)


def check_can_create(job: JobSection) -> None:
    """Raise ValueError if `RunFolder.create` would fail for `job`; makes no folder."""
    folder = Path(job.dump_folder).absolute() / job.name
    with explained(f"job.dump_folder={job.dump_folder}"):
        # Folders on the way may not exist yet: test the nearest parent that does.
        try_writing(next(path for path in (folder, *folder.parents) if path.exists()))


def try_writing(folder: Path) -> None:
    """Write a file to `folder` and remove it; raise OSError if that fails."""
    with new_file(folder, "probe") as probe:
        write_durably(probe, bytes(_PROBE_BYTES))


@contextmanager
def explained(setting: str) -> Iterator[None]:
    """Context that turns an OSError into a ValueError with `setting` and the remedy.

    `setting` is the key and value that decided the folder, such as `job.dump_folder=outputs`.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{setting}: cannot write to {error.filename or 'it'} ({error.strerror}): name a"
            f" writable folder with room for checkpoints"
        ) from error
