"""Values about its run in a checkpoint: saved, loaded, compared with the configuration now.

Next to the state of a training step (`SavedStep`) these are plain values, under the keys below. A
checkpoint from elsewhere may lack any of them, or have it in another form.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from isp.checkpoint import Checkpointer, CheckpointError, CheckpointInfo
from isp.checkpoint.agreement import attempt
from isp.checkpoint.folder import LAUNCH
from isp.checkpoint.plain import Plain
from isp.config import JobConfig, to_plain
from isp.config.keys import KeyTable
from isp.core.comm import Mesh
from isp.core.mesh import Axis, Topology
from isp.core.section import KeyRole
from isp.data.sources import takes_bos
from isp.data.stream import is_place
from isp.metrics import StepRecord
from isp.step.saved_step import SavedStep
from isp.step.train_step import TrainStep
from isp.utils.text import redacted_values

__all__ = [
    "Progress",
    "RunCheckpoints",
    "check_changes",
    "compare",
    "saved_config",
    "saved_sequences",
    "saved_values",
    "stream_place",
]

logger = logging.getLogger(__name__)

_CONFIG = "config"
"""Key of the configuration of the run."""
_SEQUENCES = "sequences_per_step"
"""Key of the number of sequences of a step, over all ranks."""
_STREAM = "stream"
"""Key of the place in the stream of data where the next step begins."""
_RECORD = "record"
"""Key of the record of the step, as it stands in `metrics.jsonl`."""

_SHARES = (".weight", ".name")
"""Suffixes of keys of a mixture that do not change the order in which a source is read."""
RETRY_SECONDS = 10
"""Seconds between attempts at the last save of a run."""


class Progress(NamedTuple):
    """The progress of a run at the end of a step, as checkpoints keep it."""

    step: int
    """Number of steps done."""
    tokens: int
    """Number of tokens in these steps, over all ranks, without padding."""
    record: StepRecord | None = None
    """Record of the last step, without its evaluation; None if the step has no record.

    With it, a run that ended after the save but before writing the record completes its metrics
    when it resumes.
    """
    place: Plain = None
    """Place in the stream of data where the next step begins; None without a stream, and on ranks
    that do not read it."""


class RunCheckpoints:
    """Saves and loads a run: tensors, skipped steps, random states, and values about the run.

    `folder` is where it saves, `launched_at` the time of its launch. All methods are collectives
    over the world.
    """

    def __init__(
        self,
        folder: Path,
        config: JobConfig,
        train_step: TrainStep,
        mesh: Mesh,
        *,
        launched_at: float | None,
    ) -> None:
        self.checkpointer = Checkpointer(folder, config.checkpoint, world=mesh[Axis.WORLD])
        self.are_whole: bool = train_step.built.model.checkpoints_frozen
        """False if checkpoints have adapters only: loading one leaves the base model as it is."""
        self._launched_at = launched_at
        self._config = config
        self._mesh = mesh
        self._train_step = train_step
        self._saved = SavedStep(train_step)

    def init_weights(self) -> None:
        """Give the model its initial weights; raises on all ranks if that fails on any."""
        seed, what = self._config.training.seed, "making the initial weights"
        attempt(self._mesh.host, what, lambda: self._train_step.init_weights(seed))
        self._train_step.weights_changed()

    def load_weights(self, info: CheckpointInfo) -> None:
        """Load the weights of a checkpoint of any run of this model, to begin at step 0."""
        self._saved.load(self.checkpointer, info, weights_only=True)
        logger.info("begins at step 0 with the weights of %s", info.describe())

    def load(self, info: CheckpointInfo) -> Progress:
        """Load all of a checkpoint, log the differences to its run, and return its progress.

        Raises ValueError for a checkpoint of another model or other data, or without a place in the
        stream of data.
        """
        changes = check_changes(info, self._config, self._mesh.topology)
        place = stream_place(info, self._config)
        resumed = self._saved.load(self.checkpointer, info)
        logger.info("resumed from %s", info.describe())
        for change in changes:
            logger.info("  %s", change)
        text, record = resumed.shared.get(_RECORD), None
        if isinstance(text, str):
            with suppress(ValueError):  # a record of another version: the step is then without one
                record = StepRecord.from_json(text)
        return Progress(resumed.step, resumed.tokens, record, place)

    def save(self, done: Progress, *, wait: bool = False) -> None:
        """Save a checkpoint; see `Checkpointer.save`, also for its errors."""
        self._saved.save(
            self.checkpointer,
            done.step,
            tokens=done.tokens,
            shared={
                _RECORD: None if done.record is None else done.record.to_json(),
                **({} if done.place is None else {_STREAM: done.place}),
                LAUNCH: self._launched_at,
                **saved_values(self._config, self._mesh.topology),
            },
            wait=wait,
        )

    def save_at_last(self, done: Progress) -> None:
        """Save at the end of a run, retrying for `checkpoint.last_save_retry_seconds`.

        Raises CheckpointError if that fails.
        """
        given = left = self._config.checkpoint.last_save_retry_seconds
        while True:
            try:
                return self.save(done, wait=True)
            except CheckpointError as error:
                if left <= 0:
                    raise CheckpointError(
                        f"{error} The last save of the run was tried for {given} s"
                        f" (checkpoint.last_save_retry_seconds): steps after them are lost."
                    ) from None
                logger.error("%s Trying again for %.0f s: make room there.", error, left)
            # Counted instead of timed: all ranks have to make the same number of attempts.
            time.sleep(min(left, RETRY_SECONDS))
            left -= RETRY_SECONDS


# -- compared with the configuration now ------------------------------------------------------


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


def compare(
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


def check_changes(info: CheckpointInfo, config: JobConfig, topology: Topology) -> list[str]:
    """Return the differences from the run that saved a checkpoint, a line each.

    Raises ValueError for differences that make another model or another order of the data, unless
    `checkpoint.allow_changes` is set.
    """
    refused, lines = compare(info, config, topology)
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
    place, parts = info.manifest.shared.get(_STREAM), len(config.data.parts)
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
