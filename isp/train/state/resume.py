"""Choice of the run that a start continues, and of its checkpoint: find, claim, open.

A start is one `isp train`, on all its ranks: a launch by the user, or a restart by torchrun. It has
three steps, which follow each other in this file; the design notes draw them ("Which run is
resumed"):

    find     `_find`: the run and its folder of checkpoints; its four cases are numbered there
    claim    `_claimed`, `open_run`: the locks, a copy from the store, checks, the run's folder
    open     `begin_run`, on all ranks: the checkpoint that is loaded

`isp train --nproc` calls `check_start` before its ranks start, which finds and checks but makes
nothing. Rank 0 then calls `open_run`, which finds again: a run may have been started in between.

[Note: Order of runs] The name of a run is the time of its start, but names do not decide which run
is the newest: a clock may be set back, or differ between machines. `launch.json` decides. It keeps
the time of the last launch, which is made greater than that of each earlier launch of the job, so a
launch on a slow clock is still the newest. It is a time and not a number of its own because runs of
earlier versions have it, too, and because a run that has lost its file can be placed among the
others by its name.

[Note: Finished runs] A run has finished when its `launch.json` says so, which is written last,
after the checkpoint, the metrics and the evaluation of the last step. Until then the same command
resumes it, even with no step left, and completes what is missing. A finished run is resumed only
if its newest good checkpoint has fewer than `training.steps` steps and the same model and data, or
`checkpoint.allow_changes` is set.

[Note: Restarts] Ranks that torchrun restarts stay in their run, whatever the configuration says,
whether the run has a checkpoint yet or has finished: otherwise a rank that dies while the others
end would have everything trained once more. `launch.json` names the process of torchrun that
started rank 0, which is the same after a restart. torchrun's count of restarts is less reliable: on
several machines it counts only failures of its own ranks, so it is 0 for rank 0 if another
machine's rank died. The count decides if the process is unknown or rank 0 has moved to another
machine.

A launch by the user is another launch, and does not train a finished run again. With `isp train
--nproc` a run counts as finished only if its ranks also ended well: then a loop that repeats the
command until it succeeds loads the last checkpoint and ends.

[Note: Starts] Starts of one job wait for each other until each has its folder and the lock on its
checkpoints. A start is refused if the run that it would resume, or a newer one without a checkpoint
yet, is in progress.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isp.checkpoint.agreement import exchange
from isp.checkpoint.folder import (
    Candidates,
    CheckpointFolder,
    CheckpointInfo,
    candidates_at,
    candidates_in,
    check_unlocked,
    describe_contents,
    folder_lock,
    preview,
)
from isp.checkpoint.manifest import Damaged
from isp.checkpoint.remote import RemoteCheckpoints
from isp.checkpoint.state import check_shapes
from isp.config import JobConfig
from isp.config.sections import CheckpointConfig, JobSection
from isp.core.comm import Mesh
from isp.core.mesh import Topology
from isp.models.build import parameter_shapes
from isp.step.job_models import trained_model
from isp.train.folder.run_folder import (
    RUN_NAME,
    LaunchRecord,
    RunFolder,
    check_can_create,
    explained,
    named_time,
    run_name,
    try_writing,
)
from isp.train.state.saved_run import (
    Progress,
    RunCheckpoints,
    check_changes,
    compare,
    stream_place,
)
from isp.utils.text import first_line

__all__ = [
    "Start",
    "begin_run",
    "check_start",
    "earlier_runs",
    "launch_time",
    "launcher",
    "open_on_all_ranks",
    "open_run",
    "process_name",
    "reopen_finished",
    "resumed",
]

logger = logging.getLogger(__name__)

_Choose = Callable[[Callable[[], Candidates]], CheckpointInfo | None]
"""Chooses the first good one of the candidates that a function finds: `preview`, or
`Checkpointer.choose` on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The run that this start continues, and its checkpoints, as found, claimed and opened."""

    folder: RunFolder
    """Folder of the run. A new one exists once `open_run` has made it, maybe with a number more."""
    is_new: bool
    """True if the run is new."""
    checkpoints: Path
    """Folder that the run saves checkpoints to: `checkpoint.folder`, or the one in its folder."""
    resumes: bool
    """True if that folder may have a checkpoint to resume from."""
    launched_at: float | None = None
    """Time of the launch, from `launch_time`; the same after a restart of its ranks. None for a new
    launch until `open_run` has written its `launch.json`."""
    note: str = ""
    """Warnings, one a line: why the previous run is not resumed, and copies in a store that cannot
    be used."""
    copied: int | None = None
    """Step of the checkpoint that was copied from `checkpoint.upload_to`; None if none was."""


# -- the calls --------------------------------------------------------------------------------


def check_start(config: JobConfig, topology: Topology) -> None:
    """Raise the errors of `open_run` that can be found without making anything.

    Call it before the ranks start.
    """
    with _claimed(config, topology, makes=False) as start:
        if start.is_new:
            check_can_create(config.job)
        else:
            start.folder.check_written_on()


def resumed(config: JobConfig) -> CheckpointInfo | None:
    """Return the checkpoint that `config` would resume from, in any layout; None for a new run.

    Makes nothing. Raises ValueError or OSError, like `open_run`, for what can be found this way.
    """
    return _own_checkpoint(_find(config, None), config.checkpoint, preview)


@contextmanager
def open_on_all_ranks(config: JobConfig, mesh: Mesh) -> Iterator[Start]:
    """Enter `open_run` on rank 0, and yield its result on all ranks; entering is a collective.

    Raises ValueError on all ranks if it fails on rank 0.
    """
    opened: dict[str, Any] | None = None
    fault: str | None = None
    with ExitStack() as held:
        if mesh.host.rank == 0:
            try:
                start = held.enter_context(open_run(config, mesh.topology))
                paths = {"folder": str(start.folder.path), "checkpoints": str(start.checkpoints)}
                opened = {**vars(start), **paths}
            except (ValueError, OSError) as error:
                fault = str(error)
        opened, fault = exchange(mesh.host, (opened, fault))[0]
        if fault is not None:
            raise ValueError(fault)
        assert opened is not None
        folder = RunFolder.join(opened["folder"], config.job.log_folder)
        paths_here = {"folder": folder, "checkpoints": Path(opened["checkpoints"])}
        yield Start(**{**opened, **paths_here})


@contextmanager
def open_run(config: JobConfig, topology: Topology) -> Iterator[Start]:
    """Make or reopen the folder of the run; in this context its checkpoints are locked.

    Call it on one rank. Raises ValueError or OSError if a folder cannot be written to, if another
    run uses it, or if the checkpoint to begin from does not exist, is damaged, or is of a run with
    another model or other data.
    """
    job = config.job
    job_folder = Path(job.dump_folder) / job.name
    with ExitStack() as held:
        # Other starts of the job wait until this one has its folder and its lock [Note: Starts].
        with ExitStack() as starting:
            with explained(f"job.dump_folder={job.dump_folder}"):
                job_folder.mkdir(parents=True, exist_ok=True)
                # Not the name of a checkpoint folder's lock: checkpoint.folder may be this folder.
                other = "another start of this job, which may be copying from checkpoint.upload_to"
                starting.enter_context(folder_lock(job_folder, ".start.lock", waits_for=other))
            start = held.enter_context(_claimed(config, topology, makes=True))
            if start.is_new:
                folder = RunFolder.create(job, start.folder.path.name)
            else:
                folder = RunFolder.reopen(start.folder.path)
            start = replace(start, folder=folder)
            if not start.resumes:  # the folder of checkpoints is new, so it is locked only now
                start = replace(start, checkpoints=folder.checkpoint_folder)
                held.enter_context(_locked(start.checkpoints))
            if start.launched_at is None:  # else restarted ranks: their launch is recorded already
                at = launch_time(job)
                folder.write_launch(LaunchRecord(launch_id(), at, launcher=launcher()))
                start = replace(start, launched_at=at)
        yield start


def reopen_finished(job: JobSection) -> None:
    """Mark the newest run as not finished, if ranks that this process started have finished it.

    A launcher calls this if one of its ranks failed: the same command then resumes the run, finds
    no step left, and ends it.
    """
    for run in earlier_runs(job)[:1]:
        launch, own = run.launch(), process_name(os.getpid())
        if launch is not None and launch.finished_step is not None and own == launch.launcher != "":
            run.write_finished(None)


# -- find -------------------------------------------------------------------------------------


def _find(config: JobConfig, topology: Topology | None) -> Start:
    """Return the run to continue, or the new one to make, the first of four cases that applies.

    Makes nothing. Raises ValueError, with the reason, if the run that comes first in that list
    cannot be continued. `topology`: see `compare`.
    """
    job, checkpoint = config.job, config.checkpoint
    given: Path | None = None
    if checkpoint.folder is not None:
        _check_folder(Path(checkpoint.folder))
        # It may go through `latest`, which will be this run's link.
        given = Path(checkpoint.folder).resolve()

    # 1. Restarted ranks stay in their run, whatever auto_resume and load_step say, and also if the
    # run has finished.
    if (restarted := _restarted_run(job)) is not None:
        run, launch = restarted
        return Start(
            folder=run,
            is_new=False,
            checkpoints=given or run.checkpoint_folder,
            resumes=True,
            launched_at=launch.at,
        )

    new = RunFolder(Path(job.dump_folder).absolute() / job.name / run_name())
    load_step = checkpoint.load_step
    goes_on = checkpoint.auto_resume or load_step is not None

    # 2. The checkpoints of `checkpoint.folder` are resumed by a new run.
    if given is not None:
        steps = CheckpointFolder(given).steps()
        if steps and not goes_on:
            raise ValueError(
                f"checkpoint.auto_resume=false, but checkpoint.folder={given} has checkpoints, up"
                f" to step {steps[0]}: name another folder, or leave out auto_resume to resume"
                " from them"
            )
        return Start(folder=new, is_new=True, checkpoints=given, resumes=True)

    # 3. The runs of the job, the last launched first.
    new_start = Start(folder=new, is_new=True, checkpoints=new.checkpoint_folder, resumes=False)
    for run in earlier_runs(job) if goes_on else ():
        found = Start(folder=run, is_new=False, checkpoints=run.checkpoint_folder, resumes=True)
        launched = run.launch()
        # With load_step the user names a checkpoint, also of a finished run. If the run lacks that
        # step, `candidates_in` refuses the start.
        if launched is not None and launched.finished_step is not None and load_step is None:
            note = _why_not_resumed(run, launched.finished_step, config, topology)
            return replace(new_start, note=note) if note else found
        if not CheckpointFolder(run.checkpoint_folder).steps():
            # In progress, but not saved yet: the same command given twice must not train the same
            # steps in two runs. Without a lock the run ended before its first checkpoint.
            check_unlocked(run.checkpoint_folder)
            continue
        return found
    if load_step is not None:
        raise ValueError(
            f"checkpoint.load_step={load_step}: no run of job.name={job.name} under"
            f" job.dump_folder={job.dump_folder} has a checkpoint"
        )

    # 4. A new run.
    return new_start


def _check_folder(folder: Path) -> None:
    """Raise ValueError unless `folder` has checkpoints, is empty, or can be made."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    checkpoints = CheckpointFolder(folder)
    contents = describe_contents(there)
    ours = bool(checkpoints.steps() or checkpoints.leftovers())
    empty = contents == "is empty"
    if not there.is_dir() or (there == folder and not (ours or empty)):
        raise ValueError(
            f"checkpoint.folder={folder}: {there} {contents}: name a folder of checkpoints, an"
            f" empty one, or a new one; use checkpoint.initial_load_path for the weights to start"
            f" from"
        )


def earlier_runs(job: JobSection) -> list[RunFolder]:
    """Return the runs of `job`, the last launched one first [Note: Order of runs]."""
    return [run for *_, run in sorted(_launches(job), key=lambda found: found[:2], reverse=True)]


def launch_time(job: JobSection) -> float:
    """Return the time of a launch of `job` now; greater than that of each earlier launch."""
    newest = max((at for at, *_ in _launches(job)), default=0.0)
    return max(time.time(), math.nextafter(newest, math.inf))


def _launches(job: JobSection) -> Iterator[tuple[float, int, RunFolder]]:
    """Yield the time of the last launch, the number in the name, and the folder of each run."""
    folder = Path(job.dump_folder) / job.name
    for path in folder.iterdir() if folder.is_dir() else ():
        match = RUN_NAME.fullmatch(path.name)
        if not match or not path.is_dir() or path.is_symlink():
            continue
        run = RunFolder(path)
        launch = run.launch()
        at = named_time(match) if launch is None else launch.at
        if at is not None:
            yield at, int(match[3] or 1), run


def _restarted_run(job: JobSection) -> tuple[RunFolder, LaunchRecord] | None:
    """Return the run of these ranks and its launch, if torchrun has started them again.

    [Note: Restarts] has the reasons.
    """
    own, environment = launcher(), os.environ
    counted = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    on_one_machine = environment.get("GROUP_WORLD_SIZE") == "1"
    for number, run in enumerate(earlier_runs(job)):
        launch = run.launch()
        if launch is None or launch.id != launch_id():
            continue
        # Launches may share a name ("none"), so the count is taken to mean the newest run only. One
        # process may launch several times: on one machine the count tells a restart from that.
        is_same = own and launch.launcher == own and (counted or not on_one_machine)
        if is_same or (counted and number == 0):
            return run, launch
    return None


def launch_id() -> str:
    """Return torchrun's name for the launch; "none" if it has none."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


def launcher() -> str:
    """Return the name of the torchrun process that started this rank; "" if unknown.

    It stays the same when ranks are restarted. Another process has another name.
    """
    return process_name(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else ""


def process_name(process: int) -> str:
    """Return a name for the process with id `process` that is unique over time; "" off Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    # Time of its start, as ids are used again. The name of the program, in parentheses, may contain
    # spaces, so count the fields after it.
    ticks = stat.rpartition(")")[2].split()[19]
    return f"process {process} of boot {boot}, started at tick {ticks}"


def _why_not_resumed(
    run: RunFolder, finished_step: int, config: JobConfig, topology: Topology | None
) -> str:
    """Return the reason not to resume `run`, which has finished; "" if it is to be resumed."""
    own = preview(lambda: candidates_in(CheckpointFolder(run.checkpoint_folder)))
    over = f"not resumed: {run.path} finished at step {finished_step}"
    if own is None or own.step >= config.training.steps:
        return (
            f"{over}; this is a new run (more training.steps resume the finished one, another"
            " job.name keeps runs apart)"
        )
    refused, _ = compare(own, config, topology)
    if not refused or config.checkpoint.allow_changes:
        return ""
    return (
        f"{over}, with another model or other data ({'; '.join(refused)}); this is a new run"
        " (another job.name keeps runs apart)"
    )


# -- claim ------------------------------------------------------------------------------------


@contextmanager
def _claimed(config: JobConfig, topology: Topology, *, makes: bool) -> Iterator[Start]:
    """Find the run and check it; in this context its folder of checkpoints, if any, is locked.

    `makes`: also make that folder, and copy a checkpoint to it from `checkpoint.upload_to`.
    """
    start = _find(config, topology)
    with ExitStack() as held:
        if start.resumes and (makes or start.checkpoints.exists()):
            held.enter_context(_locked(start.checkpoints))
            if makes:
                start = _filled(start, config.checkpoint)
        _check(start, config, topology)
        yield start


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make `folder` for checkpoints if necessary, and lock it in this context.

    Raises ValueError if it cannot be written to, or if another run holds the lock.
    """
    with ExitStack() as held:
        with explained(f"checkpoint.folder={folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(folder_lock(folder))
            try_writing(folder)
        yield


def _filled(start: Start, checkpoint: CheckpointConfig) -> Start:
    """Copy the checkpoint to resume from out of the store, if the run's folder has none.

    Returns `start` with its step, and a warning for each newer one that cannot be used. Raises
    ValueError if the store cannot be read, or lacks `checkpoint.load_step`.
    """
    url, load_step, folder = checkpoint.upload_to, checkpoint.load_step, start.checkpoints
    there = CheckpointFolder(folder)
    if url is None or there.steps() or not (checkpoint.auto_resume or load_step is not None):
        return start
    way_on = "checkpoint.auto_resume=false begins a new run"
    if load_step is not None:
        way_on = f"name another step than checkpoint.load_step={load_step}, or leave the key out"
    try:
        copied, faults = RemoteCheckpoints(url).fill(there, load_step)
    except Damaged as error:
        raise ValueError(f"checkpoint.upload_to={url}: {error}; {way_on}") from error
    except Exception as error:  # any error of any file system, or of its network
        why = first_line(error)
        raise ValueError(
            f"checkpoint.upload_to={url} cannot be read ({why}), and {folder} is empty: {way_on}"
        ) from error
    if copied is None and load_step is not None:
        raise ValueError(
            f"checkpoint.load_step={load_step}: neither {folder} nor checkpoint.upload_to={url} has"
            " such a checkpoint"
        )
    warnings = [start.note, *(f"passed over in {url}: {fault}" for fault in faults)]
    return replace(start, copied=copied, note="\n".join(filter(None, warnings)))


def _check(start: Start, config: JobConfig, topology: Topology) -> None:
    """Raise ValueError or OSError if the run cannot begin from the checkpoint that it finds."""
    info, is_own = _first_checkpoint(start, config.checkpoint, preview)
    if info is None:
        return
    if is_own or not config.checkpoint.initial_load_model_only:
        if info.step > config.training.steps:
            raise ValueError(
                f"{info.path} is beyond training.steps={config.training.steps}: use at least"
                f" {info.step} steps to resume from it; for a new run use another job.name (or"
                f" checkpoint.folder), or checkpoint.auto_resume=false"
            )
        check_changes(info, config, topology)
        stream_place(info, config)
    model = trained_model(config)
    check_shapes(info, parameter_shapes(model), model.earlier_names)


# -- open -------------------------------------------------------------------------------------


def _first_checkpoint(
    start: Start, checkpoint: CheckpointConfig, choose: _Choose
) -> tuple[CheckpointInfo | None, bool]:
    """Return the checkpoint that the run begins from, and True if it is the run's own.

    A run's own checkpoint comes before `initial_load_path`, which is for its first start. None:
    the run begins from the initial weights.
    """
    if (own := _own_checkpoint(start, checkpoint, choose)) is not None:
        return own, True
    if (path := checkpoint.initial_load_path) is None:
        return None, False

    def find() -> Candidates:
        try:
            return candidates_at(Path(path))
        except ValueError as error:
            raise ValueError(f"checkpoint.initial_load_path: {error}") from None

    return choose(find), False


def _own_checkpoint(
    start: Start, checkpoint: CheckpointConfig, choose: _Choose
) -> CheckpointInfo | None:
    """Return the checkpoint of its own that the run resumes from; None if there is none.

    It is the one of `load_step`, or the newest good one (`candidates_in`).
    """
    if not start.resumes:
        return None
    folder, load_step = CheckpointFolder(start.checkpoints), checkpoint.load_step

    def find() -> Candidates:
        # A step that is only in the store is no error here: `_filled` copies it, or refuses.
        in_store = checkpoint.upload_to is not None and not folder.steps()
        return candidates_in(folder, None if in_store else load_step, launch=start.launched_at)

    return choose(find)


def begin_run(start: Start, config: JobConfig, checkpoints: RunCheckpoints) -> Progress:
    """Load the state that the run begins from, and return its progress.

    A collective, which verifies every byte of a checkpoint before it is loaded. Raises ValueError
    or CheckpointError on all ranks.
    """
    # Checkpoints of adapters lack the base model, so it gets its weights in any case.
    if not checkpoints.are_whole:
        checkpoints.init_weights()
    checkpointer = checkpoints.checkpointer
    info, is_own = _first_checkpoint(start, config.checkpoint, checkpointer.choose)
    if info is None:
        if start.resumes:
            folder = start.checkpoints
            logger.info("no checkpoint in %s: starting from the initial weights", folder)
        if checkpoints.are_whole:
            checkpoints.init_weights()
        return Progress(0, 0)
    if is_own:
        progress = checkpoints.load(info)
        checkpointer.upload_again(info)
        return progress
    if not config.checkpoint.initial_load_model_only:
        # The record belongs to the metrics of the run that saved the checkpoint.
        return checkpoints.load(info)._replace(record=None)
    checkpoints.load_weights(info)
    return Progress(0, 0)
