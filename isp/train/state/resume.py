"""Finds, claims and opens the run that a process resumes, or a new one.

[Note: Finished runs] A run has finished when its `launch.json` says so, which is written last,
after the checkpoint, the metrics and the evaluation of the last step. Until then the same command
resumes it, even with no step left, and completes what is missing. A finished run is resumed only
if its newest good checkpoint has fewer than `training.steps` steps and the same model and data.

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

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from isp.checkpoint.folder import (
    CheckpointFolder,
    CheckpointInfo,
    candidates_in,
    check_unlocked,
    describe_contents,
    folder_lock,
    newest_at,
    preview,
)
from isp.checkpoint.manifest import Damaged
from isp.checkpoint.plain import Plain
from isp.checkpoint.remote import RemoteCheckpoints
from isp.checkpoint.state import check_shapes
from isp.config import JobConfig, to_plain
from isp.config.keys import KeyTable
from isp.config.sections import CheckpointConfig, JobSection
from isp.core.mesh import Topology
from isp.core.section import KeyRole
from isp.data.sources import takes_bos
from isp.data.stream import is_place
from isp.models.build import parameter_shapes
from isp.train.folder.run_folder import (
    LaunchRecord,
    RunFolder,
    check_can_create,
    earlier_runs,
    explained,
    launch_time,
    run_name,
    try_writing,
)
from isp.train.state.launcher import (
    launch_id,
    launcher,
    on_one_machine,
    process_name,
    was_restarted,
)
from isp.utils.text import first_line, redacted_values

__all__ = [
    "STREAM",
    "Start",
    "check_changes",
    "check_start",
    "open_run",
    "reopen_finished",
    "resumed",
    "saved_config",
    "saved_sequences",
    "saved_values",
    "stream_place",
]

_CONFIG = "config"
"""Key of a checkpoint's shared values: the configuration of its run."""
_SHARES = (".weight", ".name")
"""Suffixes of keys of a mixture that do not change the order in which a source is read."""
_SEQUENCES = "sequences_per_step"
"""Key of a checkpoint's shared values: sequences of a step, over all ranks."""
STREAM = "stream"
"""Key of a checkpoint's shared values: the place in the stream of data where its next step
begins."""


class Start(NamedTuple):
    """The folders of a run that is opened, and how it begins."""

    folder: RunFolder
    checkpoints: Path
    """Folder that the run saves checkpoints to."""
    resumes: bool
    """True if that folder may have a checkpoint to resume from."""
    launched_at: float
    """Time of the launch, from `launch_time`; the same after a restart of its ranks."""
    note: str
    """Warnings, one a line: why the previous run is not resumed, and copies in a store that cannot
    be used."""
    copied: int | None
    """Step of the checkpoint that was copied from `checkpoint.upload_to`; None if none was."""


class _Place(NamedTuple):
    """The folders of a run that is found but not opened; nothing has been made for it yet."""

    run: RunFolder | None
    """Run to resume; None if a new one is to be made."""
    checkpoints: Path | None
    """Folder of the checkpoints; None if it is in the folder of a new run."""
    launched_at: float | None
    """Time of the launch if these ranks have been restarted, else None."""
    note: str = ""
    """See `Start`."""
    copied: int | None = None
    """See `Start`."""


def check_start(config: JobConfig, topology: Topology) -> None:
    """Raise the errors of `open_run` that can be found without making anything.

    Call it before the ranks start.
    """
    with _claimed(config, topology, makes=False) as place:
        if place.run is None:
            check_can_create(config.job)
        else:
            place.run.check_written_on()


def resumed(config: JobConfig) -> CheckpointInfo | None:
    """Return the checkpoint that `config` would resume from, in any layout; None for a new run.

    Makes nothing. Raises ValueError or OSError, like `open_run`, for what can be found this way.
    """
    return _own_checkpoint(config, _find(config, None))


@contextmanager
def open_run(config: JobConfig, topology: Topology) -> Iterator[Start]:
    """Make or reopen the folder of the run; in this context its checkpoints are locked.

    Call it on one rank. Raises ValueError or OSError if a folder cannot be written to, if another
    run uses it, or if the checkpoint to begin from does not exist, is damaged, or is of a run with
    another model or other data.
    """
    with ExitStack() as held:
        # Other starts wait until this one has its folder and its lock [Note: Starts].
        with _starting(config.job):
            place = held.enter_context(_claimed(config, topology, makes=True))
            if place.run is None:
                folder = RunFolder.create(config.job, run_name())
            else:
                folder = RunFolder.reopen(place.run.path)
            checkpoints, resumes = place.checkpoints, place.checkpoints is not None
            if checkpoints is None:
                checkpoints = folder.checkpoint_folder
                held.enter_context(_held(checkpoints))
            launched_at = place.launched_at
            if launched_at is None:  # else restarted ranks: their launch is recorded already
                launched_at = launch_time(config.job)
                record = LaunchRecord(launch_id(), launched_at, launcher=launcher())
                folder.write_launch(record)
        yield Start(folder, checkpoints, resumes, launched_at, place.note, place.copied)


def reopen_finished(job: JobSection) -> None:
    """Mark the newest run as not finished, if ranks that this process started have finished it.

    A launcher calls this if one of its ranks failed: the same command then resumes the run, finds
    no step left, and ends it.
    """
    for run in earlier_runs(job)[:1]:
        launch, own = run.launch(), process_name(os.getpid())
        if launch is not None and launch.finished_step is not None and own == launch.launcher != "":
            run.write_finished(None)


@contextmanager
def _starting(job: JobSection) -> Iterator[None]:
    """Make the folder of the job, and keep other starts of it waiting in this context."""
    folder = Path(job.dump_folder) / job.name
    with ExitStack() as held:
        with explained(f"job.dump_folder={job.dump_folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            # Not the name of a checkpoint folder's lock: checkpoint.folder may be this folder.
            other = "another start of this job, which may be copying from checkpoint.upload_to"
            held.enter_context(folder_lock(folder, ".start.lock", waits_for=other))
        yield


@contextmanager
def _claimed(config: JobConfig, topology: Topology, *, makes: bool) -> Iterator[_Place]:
    """Find the run and check it; in this context its folder of checkpoints, if any, is locked.

    `makes`: also make that folder, and copy a checkpoint to it from `checkpoint.upload_to`.
    """
    place = _find(config, topology)
    with ExitStack() as held:
        if place.checkpoints is not None and (makes or place.checkpoints.exists()):
            held.enter_context(_held(place.checkpoints))
            if makes:
                copied, faults = _fill(place.checkpoints, config.checkpoint)
                note = "\n".join(filter(None, [place.note, *faults]))
                place = place._replace(copied=copied, note=note)
        _check(config, topology, place)
        yield place


def _fill(folder: Path, checkpoint: CheckpointConfig) -> tuple[int | None, list[str]]:
    """Copy the checkpoint to resume from out of the store, if `folder` has none.

    Returns its step, and a warning for each newer one that cannot be used. Raises ValueError if the
    store cannot be read, or lacks `checkpoint.load_step`.
    """
    url, there = checkpoint.upload_to, CheckpointFolder(folder)
    load_step = checkpoint.load_step
    if url is None or there.steps() or not (checkpoint.auto_resume or load_step is not None):
        return None, []
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
    return copied, [f"passed over in {url}: {fault}" for fault in faults]


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Make `folder` for checkpoints if necessary, and lock it in this context.

    Raises ValueError if it cannot be written to, or if another run holds the lock.
    """
    with ExitStack() as held:
        with explained(f"checkpoint.folder={folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(folder_lock(folder))
            try_writing(folder)
        yield


def _find(config: JobConfig, topology: Topology | None) -> _Place:
    """Return the folders of the run: of restarted ranks, else of one to resume, else a new one.

    `topology`: see `_compare`.
    """
    folder = config.checkpoint.folder
    given = None
    if folder is not None:
        _check_folder(Path(folder))
        given = Path(folder).resolve()  # it may go through `latest`, which will be this run's link
    interrupted = _interrupted(config)
    if interrupted is not None:
        run, launched_at = interrupted
        return _Place(run, given or run.checkpoint_folder, launched_at)
    earlier, note = _to_resume(config, topology)
    if earlier is not None:
        return _Place(earlier, earlier.checkpoint_folder, None)
    return _Place(None, given, None, note)


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


def _check(config: JobConfig, topology: Topology, place: _Place) -> None:
    """Raise ValueError or OSError if the run cannot begin from the checkpoint that it finds."""
    own, checkpoint = _own_checkpoint(config, place), config.checkpoint
    # A run's own checkpoint comes before `initial_load_path`, which is for its first start.
    if own is not None:
        _check_length(own, config)
        check_changes(own, config, topology)
        stream_place(own, config)
        _check_model(own, config)
    elif checkpoint.initial_load_path is not None:
        try:
            initial = newest_at(Path(checkpoint.initial_load_path))
        except ValueError as error:
            raise ValueError(f"checkpoint.initial_load_path: {error}") from None
        if not checkpoint.initial_load_model_only:
            _check_length(initial, config)
            check_changes(initial, config, topology)
            stream_place(initial, config)
        _check_model(initial, config)


def _check_model(info: CheckpointInfo, config: JobConfig) -> None:
    """Raise ValueError if names or shapes in a checkpoint are not those of the model."""
    model = config.language_model
    check_shapes(info, parameter_shapes(model), model.earlier_names)


def _check_length(info: CheckpointInfo, config: JobConfig) -> None:
    """Raise ValueError for a checkpoint of a later step than the run's last one."""
    if info.step > config.training.steps:
        raise ValueError(
            f"{info.path} is beyond training.steps={config.training.steps}: use at least"
            f" {info.step} steps to resume from it; for a new run use another job.name (or"
            f" checkpoint.folder), or checkpoint.auto_resume=false"
        )


def _own_checkpoint(config: JobConfig, place: _Place) -> CheckpointInfo | None:
    """Return the checkpoint of its own that the run would resume from; None if there is none.

    Raises ValueError for checkpoints in `checkpoint.folder` with `auto_resume=false`.
    """
    if place.checkpoints is None:
        return None
    folder = CheckpointFolder(place.checkpoints)
    if config.checkpoint.upload_to is not None and not folder.steps():
        return None  # to be copied, see `_fill`
    found = candidates_in(folder, config.checkpoint.load_step, launch=place.launched_at)
    asked = config.checkpoint.auto_resume or config.checkpoint.load_step is not None
    if found.paths and not asked and place.run is None:
        raise ValueError(
            f"checkpoint.auto_resume=false, but checkpoint.folder={place.checkpoints} has"
            f" checkpoints, up to step {folder.steps()[0]}: name another folder, or leave out"
            " auto_resume to resume from them"
        )
    return preview(found)


def _interrupted(config: JobConfig) -> tuple[RunFolder, float] | None:
    """Return the run of these ranks, if torchrun has started them again, and its launch time."""
    own = launcher()
    for number, run in enumerate(earlier_runs(config.job)):
        launch = run.launch()
        if launch is None or launch.id != launch_id():
            continue
        # Launches may share a name ("none"), so the count is taken to mean the newest run only. One
        # process may launch several times: on one machine the count tells a restart from that.
        is_same = own and launch.launcher == own and (was_restarted() or not on_one_machine())
        if is_same or (was_restarted() and number == 0):
            return run, launch.at
    return None


def _to_resume(config: JobConfig, topology: Topology | None) -> tuple[RunFolder | None, str]:
    """Return the newest run of the job that has a checkpoint, if it is to be resumed, else None.

    Also returns the reason, "" if there is none, for not resuming a finished run. Raises ValueError
    if `checkpoint.load_step` is set and no run has any checkpoint (whether the newest one has that
    step is checked later), or if a newer run is in progress.
    """
    load_step = config.checkpoint.load_step
    if config.checkpoint.folder is not None or not _goes_on(config):
        return None, ""
    for run in earlier_runs(config.job):
        launch = run.launch()
        # With load_step the user names a checkpoint, also of a finished run.
        finished_step = None if launch is None or load_step is not None else launch.finished_step
        if finished_step is not None:
            note = _why_not_resumed(run, finished_step, config, topology)
            return (None if note else run), note
        if CheckpointFolder(run.checkpoint_folder).steps():
            return run, ""
        check_unlocked(run.checkpoint_folder)  # raises if it has just begun and has no checkpoint
    if load_step is not None:
        raise ValueError(
            f"checkpoint.load_step={load_step}: no run of job.name={config.job.name} under"
            f" job.dump_folder={config.job.dump_folder} has a checkpoint"
        )
    return None, ""


def _why_not_resumed(
    run: RunFolder, finished_step: int, config: JobConfig, topology: Topology | None
) -> str:
    """Return the reason not to resume `run`, which has finished; "" if it is to be resumed."""
    own = preview(candidates_in(CheckpointFolder(run.checkpoint_folder)))
    over = f"not resumed: {run.path} finished at step {finished_step}"
    if own is None or own.step >= config.training.steps:
        return (
            f"{over}; this is a new run (more training.steps resume the finished one, another"
            " job.name keeps runs apart)"
        )
    refused, _ = _compare(own, config, topology)
    if not refused or config.checkpoint.allow_changes:
        return ""
    return (
        f"{over}, with another model or other data ({'; '.join(refused)}); this is a new run"
        " (another job.name keeps runs apart)"
    )


def _goes_on(config: JobConfig) -> bool:
    """Return True if the configuration lets a run resume."""
    checkpoint = config.checkpoint
    asked = checkpoint.load_step is not None or checkpoint.folder is not None
    return checkpoint.auto_resume or asked


def saved_config(info: CheckpointInfo) -> dict[str, Any] | None:
    """Return the plain values of the configuration in a checkpoint; None if it has none."""
    found = info.manifest.shared.get(_CONFIG)
    return KeyTable.of(JobConfig).upgraded(found) if isinstance(found, dict) else None


def saved_sequences(info: CheckpointInfo) -> int | None:
    """Return the sequences of a step, over all ranks, of the run that saved a checkpoint.

    None if the checkpoint has no such number.
    """
    return info.manifest.shared.get(_SEQUENCES)


def saved_values(config: JobConfig, topology: Topology) -> dict[str, Any]:
    """Return the plain values that a checkpoint keeps for `check_changes` on resuming."""
    return {_CONFIG: to_plain(config, redact=True), _SEQUENCES: config.sequences(topology)}


def check_changes(info: CheckpointInfo, config: JobConfig, topology: Topology) -> list[str]:
    """Return the differences from the run that saved a checkpoint, a line each.

    Raises ValueError for differences that make another model or another order of the data, unless
    `checkpoint.allow_changes` is set.
    """
    refused, lines = _compare(info, config, topology)
    if refused and not config.checkpoint.allow_changes:
        listed = "".join(f"\n  {line}" for line in refused)
        raise ValueError(
            f"{info.path} is of a run with another model, or other data:{listed}\n"
            "for a run of its own use another job.name (or checkpoint.folder) or"
            f" checkpoint.auto_resume=false, and checkpoint.initial_load_path={info.path} to begin"
            " from these weights; to resume with the changes, checkpoint.allow_changes=true"
        )
    return [*refused, *lines]


def stream_place(info: CheckpointInfo, config: JobConfig) -> Plain:
    """Return a checkpoint's place in the stream of data; None without `data.streaming`.

    Raises ValueError if the checkpoint has no place that is valid for `config`, unless
    `data.streaming_restart` is set: then returns None.
    """
    if not config.data.streaming or info.step == 0:
        return None
    place, parts = info.manifest.shared.get(STREAM), len(config.data.parts)
    places = [place] if parts == 1 else place
    has_form = isinstance(places, list) and len(places) == parts and all(map(is_place, places))
    why = "" if has_form else "it was saved without one"
    # A place counts files and documents in the order of the seed: in other data, or with another
    # seed, it means nothing. A URL with another signature names the same data.
    saved = redacted_values(saved_config(info) or {})
    keys = KeyTable.of(JobConfig)
    for key, there, here in keys.differences(saved, to_plain(config, redact=True)):
        is_source = key.startswith("data.source") and not key.endswith(_SHARES)
        if key in ("data.text_key", "training.seed") or is_source:
            why = why or f"{key}: {there} there, {here} now"
    if why and not config.data.streaming_restart:
        raise ValueError(
            f"{info.path} has no place in the stream of data.source ({why}): to read the source"
            " again from its beginning, data.streaming_restart=true"
        )
    return None if why else place


def _compare(
    info: CheckpointInfo, config: JobConfig, topology: Topology | None
) -> tuple[list[str], list[str]]:
    """Return the differences of `check_changes`: those that are refused, and the others.

    Without a topology, which has not been chosen yet, ranks and sequences are not compared.
    """
    saved = saved_config(info)
    if saved is None:
        return [], ["it does not say its configuration, so nothing was compared"]
    lines: list[str] = []
    refused: list[str] = []
    keys = KeyTable.of(JobConfig)
    # A URL with another signature names the same data; older checkpoints have the whole one.
    here_now = to_plain(config, redact=True)
    for key, there, here in keys.differences(redacted_values(saved), here_now):
        if key == "data.add_bos" and not takes_bos(config.data):
            continue  # the same tokens either way
        line = f"{key}: {there} there, {here} now"
        # Keys of model and data are refused, and unknown keys, which may be such keys too.
        role = keys.role(tuple(key.split(".")))
        makes_another = role in (KeyRole.MODEL, KeyRole.DATA, None)
        (refused if makes_another else lines).append(line)
    if topology is None:
        return refused, lines
    there, here = saved_sequences(info), config.sequences(topology)
    if there != here:
        refused.append(f"sequences in a step, over all ranks: {there} there, {here} now")
    if (there := info.manifest.topology.world_size) != topology.world_size:
        lines.append(f"ranks: {there} there, {topology.world_size} now")
    return refused, lines
