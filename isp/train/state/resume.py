"""Which run a start continues, and from which checkpoint: find, claim, open.

A start is one `isp train`, on all its ranks: a launch by the user, or a restart by torchrun. It has
three steps, which follow each other in this file:

    find     `_find`: the run and its folder of checkpoints; its four cases are numbered there
    claim    `_claimed`, `open_run`: the locks, a copy from the store, checks, the run's folder
    open     `begin_run`, on all ranks: load the checkpoint

`isp train --nproc` calls `check_start` before its ranks start, which finds and checks but makes
nothing. Rank 0 then calls `open_run`, which finds again: a run may have been started in between.

See [Note: Order of runs], [Note: Finished runs], [Note: Restarts] and [Note: Starts] in
docs/design/notes/train.md.
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
"""Type of functions that return the first undamaged of some candidates, given a function that
finds these: `preview` on one rank, or `Checkpointer.choose` on all."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The run that a start continues or begins, and the folder of its checkpoints."""

    folder: RunFolder
    """Folder of the run. For a new run it is made by `open_run`, which may add a number to it."""
    is_new: bool
    """True if the run is new, False if it is continued."""
    checkpoints: Path
    """Folder that the run saves checkpoints to: `checkpoint.folder`, or the one in its folder."""
    resumes: bool
    """True if that folder may have a checkpoint to resume from."""
    launched_at: float | None = None
    """Time of the launch, from `launch_time`; a restart of its ranks keeps it. None for a new
    launch until `open_run` has written it to `launch.json`."""
    note: str = ""
    """Warnings, one on each line: why the previous run is not resumed, and which copies in the
    store cannot be used."""
    copied: int | None = None
    """Step of the checkpoint that was copied from `checkpoint.upload_to`; None if none was."""


# -- called from other files ------------------------------------------------------------------


def check_start(config: JobConfig, topology: Topology) -> None:
    """Raise the errors that `open_run` would raise, as far as they show without making anything.

    A launcher calls it before its ranks start.
    """
    with _claimed(config, topology, makes=False) as start:
        if start.is_new:
            check_can_create(config.job)
        else:
            start.folder.check_written_on()


def resumed(config: JobConfig) -> CheckpointInfo | None:
    """Return the checkpoint that `config` would resume from, in any layout; None for a new run.

    Makes no file or folder. Raises ValueError or OSError if the run cannot be found or continued.
    """
    return _own_checkpoint(_find(config, None), config.checkpoint, preview)


@contextmanager
def open_on_all_ranks(config: JobConfig, mesh: Mesh) -> Iterator[Start]:
    """Enter `open_run` on rank 0, and yield its result on all ranks; entering is a collective.

    Raises ValueError on all ranks if `open_run` fails on rank 0.
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
        # Send an error too: if rank 0 raised before this, the others would wait here.
        opened, fault = exchange(mesh.host, (opened, fault))[0]
        if fault is not None:
            raise ValueError(fault)
        assert opened is not None
        folder = RunFolder.join(opened["folder"], config.job.log_folder)
        paths_here = {"folder": folder, "checkpoints": Path(opened["checkpoints"])}
        yield Start(**{**opened, **paths_here})


@contextmanager
def open_run(config: JobConfig, topology: Topology) -> Iterator[Start]:
    """Context that makes or reopens the folder of the run, with its checkpoints locked.

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
                # The file must not have the name of the lock on a folder of checkpoints, `.lock`:
                # checkpoint.folder may be this folder, and the lock taken here would then refuse
                # the lock that this start takes on its checkpoints.
                other = "another start of this job, which may be copying from checkpoint.upload_to"
                starting.enter_context(folder_lock(job_folder, ".start.lock", waits_for=other))
            start = held.enter_context(_claimed(config, topology, makes=True))
            if start.is_new:
                folder = RunFolder.create(job, start.folder.path.name)
            else:
                folder = RunFolder.reopen(start.folder.path)
            start = replace(start, folder=folder)
            # `_claimed` has locked `checkpoint.folder`, or an existing run's folder of checkpoints.
            # That of a new run was created above: lock it now.
            if not start.resumes:
                start = replace(start, checkpoints=folder.checkpoint_folder)
                held.enter_context(_locked(start.checkpoints))
            # `launched_at` is set if torchrun has restarted these ranks: the launch stays the same.
            if start.launched_at is None:
                at = launch_time(job)
                folder.write_launch(LaunchRecord(launch_id(), at, launcher=launcher()))
                start = replace(start, launched_at=at)
        yield start


def reopen_finished(job: JobSection) -> None:
    """Mark the newest run as not finished, if it was finished by ranks that this process started.

    A launcher calls this if one of its ranks failed although the run had finished: the same command
    then resumes the run, finds no step left, and marks it as finished.
    """
    for run in earlier_runs(job)[:1]:
        launch, own = run.launch(), process_name(os.getpid())
        if launch is not None and launch.finished_step is not None and own == launch.launcher != "":
            run.write_finished(None)


# -- find -------------------------------------------------------------------------------------


def _find(config: JobConfig, topology: Topology | None) -> Start:
    """Return the run to continue, or the new one to make: the first of four cases that applies.

    Makes no file or folder. Raises ValueError, with the reason, if the run of the first such case
    cannot be continued. `topology`: see `compare`.
    """
    job, checkpoint = config.job, config.checkpoint
    given: Path | None = None
    if checkpoint.folder is not None:
        _check_folder(Path(checkpoint.folder))
        # The path may go through the link `latest`, which this start will point to its own run.
        given = Path(checkpoint.folder).resolve()

    # Case 1: torchrun has restarted the ranks. They stay in their run, whatever auto_resume and
    # load_step say, and also if the run has finished [Note: Restarts].
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
    may_resume = checkpoint.auto_resume or load_step is not None

    # Case 2: `checkpoint.folder` is set. A new run resumes from the checkpoints in it.
    if given is not None:
        steps = CheckpointFolder(given).steps()
        if steps and not may_resume:
            raise ValueError(
                f"checkpoint.auto_resume=false, but checkpoint.folder={given} has checkpoints, up"
                f" to step {steps[0]}: name another folder, or leave out auto_resume to resume"
                " from them"
            )
        return Start(folder=new, is_new=True, checkpoints=given, resumes=True)

    # Case 3: the job has a run with checkpoints. Continue the one that was launched last
    # [Note: Order of runs].
    new_start = Start(folder=new, is_new=True, checkpoints=new.checkpoint_folder, resumes=False)
    for run in earlier_runs(job) if may_resume else ():
        found = Start(folder=run, is_new=False, checkpoints=run.checkpoint_folder, resumes=True)
        launched = run.launch()
        # A finished run is resumed only for a reason [Note: Finished runs]. With load_step the user
        # has named its checkpoint; if the run lacks that step, `candidates_in` refuses the start.
        if launched is not None and launched.finished_step is not None and load_step is None:
            note = _why_not_resumed(run, launched.finished_step, config, topology)
            return replace(new_start, note=note) if note else found
        if not CheckpointFolder(run.checkpoint_folder).steps():
            # If a process holds the lock, this run is in progress and has not saved yet: refuse, or
            # the same command, given twice, would train the same steps in two runs. Without a lock
            # the run ended before its first checkpoint: look at the run before it.
            check_unlocked(run.checkpoint_folder)
            continue
        return found
    if load_step is not None:
        raise ValueError(
            f"checkpoint.load_step={load_step}: no run of job.name={job.name} under"
            f" job.dump_folder={job.dump_folder} has a checkpoint: leave load_step out, or correct"
            f" job.name"
        )

    # Case 4: there is no run to continue. Make a new one.
    return new_start


def _check_folder(folder: Path) -> None:
    """Raise ValueError unless `checkpoint.folder` has checkpoints, is empty, or can be made."""
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
    """Return the runs of `job`, the last launched one first.

    See [Note: Order of runs] in docs/design/notes/train.md.
    """
    return [run for *_, run in sorted(_launches(job), key=lambda found: found[:2], reverse=True)]


def launch_time(job: JobSection) -> float:
    """Return the current time, made greater than that of each earlier launch of `job`."""
    newest = max((at for at, *_ in _launches(job)), default=0.0)
    return max(time.time(), math.nextafter(newest, math.inf))


def _launches(job: JobSection) -> Iterator[tuple[float, int, RunFolder]]:
    """Yield, for each run of `job`, the time of its last launch, its number, and its folder.

    The number is that in its name (`<time>_2`), or 1. A run without a valid `launch.json` has the
    time in its name; a folder with neither is left out.
    """
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
    """Return the run of these ranks and its launch, if torchrun has restarted the ranks; else None.

    See [Note: Restarts] in docs/design/notes/train.md.
    """
    own, environment = launcher(), os.environ
    counted = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    on_one_machine = environment.get("GROUP_WORLD_SIZE") == "1"
    for number, run in enumerate(earlier_runs(job)):
        launch = run.launch()
        if launch is None or launch.id != launch_id():
            continue
        # `run` is the run of these ranks if the same torchrun process started it. But one process
        # may launch several times: on one machine, a restart count of 0 means a new launch. If
        # another process started it, as on another machine, ranks with a restart count belong to
        # the newest run only, since several launches may have the same id ("none").
        is_same = own and launch.launcher == own and (counted or not on_one_machine)
        if is_same or (counted and number == 0):
            return run, launch
    return None


def launch_id() -> str:
    """Return torchrun's name for the launch; "none" if it has none."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


def launcher() -> str:
    """Return a unique name for the torchrun process that started this rank; "" if unknown.

    It stays the same when torchrun restarts its ranks.
    """
    return process_name(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else ""


def process_name(process: int) -> str:
    """Return a name for the process with id `process` that no other process ever has.

    Returns "" if the process does not exist or the system is not Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    # Process ids are reused, so add the time of the start: field 22 of /proc/<id>/stat. Field 2,
    # the program's name in parentheses, may contain spaces, so count from its end.
    ticks = stat.rpartition(")")[2].split()[19]
    return f"process {process} of boot {boot}, started at tick {ticks}"


def _why_not_resumed(
    run: RunFolder, finished_step: int, config: JobConfig, topology: Topology | None
) -> str:
    """Return the reason why `run`, which has finished, is not resumed; "" if it is resumed.

    See [Note: Finished runs] in docs/design/notes/train.md.
    """
    own = preview(lambda: candidates_in(CheckpointFolder(run.checkpoint_folder)))
    finished = f"not resumed: {run.path} finished at step {finished_step}"
    if own is None or own.step >= config.training.steps:
        return (
            f"{finished}; this is a new run (to resume the finished one, increase training.steps;"
            " to keep runs apart, use another job.name)"
        )
    refused, _ = compare(own, config, topology)
    if not refused or config.checkpoint.allow_changes:
        return ""
    return (
        f"{finished}, with another model or other data ({'; '.join(refused)}); this is a new run"
        " (to keep runs apart, use another job.name)"
    )


# -- claim ------------------------------------------------------------------------------------


@contextmanager
def _claimed(config: JobConfig, topology: Topology, *, makes: bool) -> Iterator[Start]:
    """Context that finds and checks the run, with its folder of checkpoints locked if it exists.

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
    """Context that locks the folder of checkpoints `folder`, and makes it if necessary.

    Raises ValueError if it cannot be written to, or if another run holds the lock.
    """
    with ExitStack() as held:
        with explained(f"checkpoint.folder={folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(folder_lock(folder))
            try_writing(folder)
        yield


def _filled(start: Start, checkpoint: CheckpointConfig) -> Start:
    """Copy a checkpoint from `checkpoint.upload_to`, if the folder of checkpoints has none.

    Copies that of `load_step`, or the newest good one. Returns `start` with the copied step, and a
    warning for each newer copy in the store that is damaged. Raises ValueError if the store cannot
    be read, has only damaged copies, or lacks `load_step`.
    """
    url, load_step, folder = checkpoint.upload_to, checkpoint.load_step, start.checkpoints
    there = CheckpointFolder(folder)
    if url is None or there.steps() or not (checkpoint.auto_resume or load_step is not None):
        return start
    remedy = "checkpoint.auto_resume=false begins a new run"
    if load_step is not None:
        remedy = f"name another step than checkpoint.load_step={load_step}, or leave the key out"
    try:
        copied, faults = RemoteCheckpoints(url).fill(there, load_step)
    except Damaged as error:
        raise ValueError(f"checkpoint.upload_to={url}: {error}; {remedy}") from error
    except Exception as error:  # libraries of file systems raise exceptions of their own
        why = first_line(error)
        raise ValueError(
            f"checkpoint.upload_to={url} cannot be read ({why}), and {folder} is empty: {remedy}"
        ) from error
    if copied is None and load_step is not None:
        raise ValueError(
            f"checkpoint.load_step={load_step}: neither {folder} nor checkpoint.upload_to={url} has"
            " such a checkpoint: name a step of one that exists, or leave load_step out"
        )
    warnings = [start.note, *(f"passed over in {url}: {fault}" for fault in faults)]
    return replace(start, copied=copied, note="\n".join(filter(None, warnings)))


def _check(start: Start, config: JobConfig, topology: Topology) -> None:
    """Check that the run can begin from the checkpoint that it would load, if there is one.

    Reads manifests and file sizes only. Raises ValueError or OSError if it cannot.
    """
    info, is_own = _first_checkpoint(start, config.checkpoint, preview)
    if info is None:
        return
    # If only the weights of a checkpoint are loaded, its step and its data do not matter.
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
    """Return the checkpoint that the run begins from, and whether it is one of the run's own.

    The run's own checkpoint comes before that of `initial_load_path`, which is only for the run's
    first start. Returns None if there is neither: the run begins from the initial weights.
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
    """Return the checkpoint in the run's folder of checkpoints to resume from; None without one.

    It is that of `load_step`, or the newest good one (`candidates_in`).
    """
    if not start.resumes:
        return None
    folder, load_step = CheckpointFolder(start.checkpoints), checkpoint.load_step

    def find() -> Candidates:
        # Without a copy, `load_step` may still be in the store: that is not an error here, since
        # `_filled` copies it or refuses the start.
        in_store = checkpoint.upload_to is not None and not folder.steps()
        return candidates_in(folder, None if in_store else load_step, launch=start.launched_at)

    return choose(find)


def begin_run(start: Start, config: JobConfig, checkpoints: RunCheckpoints) -> Progress:
    """Load the state that the run begins from, and return its progress.

    A collective. It verifies every byte of a checkpoint before it loads it. Raises ValueError or
    CheckpointError on all ranks.
    """
    # A checkpoint of adapters lacks the base model: give that its weights first.
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
        # Drop the record: it belongs in the metrics file of the run that saved the checkpoint.
        return checkpoints.load(info)._replace(record=None)
    checkpoints.load_weights(info)
    return Progress(0, 0)
