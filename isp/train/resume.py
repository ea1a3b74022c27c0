"""Which run a process goes on with: one that was stopped, or that torchrun has started again.

[Note: Restarts] Ranks that torchrun starts again are in the same run still, whether it has a
checkpoint yet or has saved its last one: else a rank that dies while the run ends would have all of
it trained once more. A run knows the launch it was last started by, so that a launch whose ranks
died before they opened a folder does not take another's for theirs.
"""

from __future__ import annotations

import json
import os
import time
from typing import NamedTuple

from isp.checkpoint.folder import CheckpointFolder
from isp.config import JobConfig
from isp.run_folder import RunFolder, earlier_runs, latest_run, run_name

__all__ = ["Start", "open_run"]


class Start(NamedTuple):
    """Where a run is written to, and how it begins."""

    folder: RunFolder
    resumes: bool
    """Whether there may be checkpoints in the folder to go on from."""
    launched_at: float
    """When the run was started, by the clock; an earlier one's restarts do not count."""


def open_run(config: JobConfig) -> Start:
    """Make or reopen the folder of the run; to be called on one rank.

    Raises ValueError if it cannot be written to, or there is nothing where `load_step` asks for it.
    """
    interrupted = _interrupted(config)
    if interrupted is not None:
        launched_at = float(_launch(interrupted).get("at", 0.0))
        return Start(RunFolder.reopen(interrupted.path), resumes=True, launched_at=launched_at)
    earlier = _to_resume(config)
    if earlier is None:
        folder = RunFolder.create(config.job, run_name())
    else:
        folder = RunFolder.reopen(earlier.path)
    start = Start(folder, resumes=earlier is not None, launched_at=time.time())
    folder.write_launch(json.dumps({"id": _launch_id(), "at": start.launched_at}))
    return start


def _interrupted(config: JobConfig) -> RunFolder | None:
    """The run that these ranks were in when torchrun started them again."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    run = latest_run(config.job) if restarted and _goes_on(config) else None
    return run if run is not None and _launch(run).get("id") == _launch_id() else None


def _to_resume(config: JobConfig) -> RunFolder | None:
    """The newest run of the job that has a checkpoint, unless it is finished."""
    wanted = config.checkpoint.load_step
    if config.checkpoint.folder is not None or not _goes_on(config):
        return None
    for run in earlier_runs(config.job):
        checkpoints = CheckpointFolder(run.checkpoint_folder)
        checkpoints.restore()
        if steps := checkpoints.steps():
            finished = wanted is None and steps[0] >= config.training.steps
            return None if finished else run
    if wanted is not None:
        raise ValueError(
            f"checkpoint.load_step={wanted}: no run of job.name={config.job.name} under"
            f" job.dump_folder={config.job.dump_folder} has a checkpoint"
        )
    return None


def _goes_on(config: JobConfig) -> bool:
    checkpoint = config.checkpoint
    asked = checkpoint.load_step is not None or checkpoint.folder is not None
    return checkpoint.auto_resume or asked


def _launch_id() -> str:
    """torchrun's name of the launch; where it gives none, all are one."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


def _launch(run: RunFolder) -> dict[str, str | float]:
    """The launch that started `run` last: its `id`, and `at` which time; empty if unknown."""
    try:
        found: dict[str, str | float] = json.loads(run.launch_file.read_text())
    except (OSError, ValueError):
        return {}
    return found
