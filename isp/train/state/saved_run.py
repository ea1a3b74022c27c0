"""Facts about a run that its checkpoints keep, and their comparison with the configuration.

These are plain values in the manifest, under the keys below, next to the state of a training step
(`SavedStep`). A checkpoint of another program may lack any of them, or have it in another form.
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
"""Manifest key of the run's configuration."""
_SEQUENCES = "sequences_per_step"
"""Manifest key of the number of sequences in a step, over all ranks."""
_STREAM = "stream"
"""Manifest key of the place in the stream of data where the next step begins."""
_RECORD = "record"
"""Manifest key of the step's record, in the form of a line of `metrics.jsonl`."""

_SHARES = (".weight", ".name")
"""Ends of keys below `data.source` that do not change the order in which a source is read."""
RETRY_SECONDS = 10
"""Seconds between attempts at the last save of a run."""


class Progress(NamedTuple):
    """The progress of a run at the end of a step, as it is saved in checkpoints."""

    step: int
    """Number of steps that the run has done."""
    tokens: int
    """Number of tokens in these steps, over all ranks, without padding."""
    record: StepRecord | None = None
    """Record of the last step, without its evaluation; None if the step has no record.

    A run may end after it has saved and before it has written the record. When it resumes, it
    writes this one.
    """
    place: Plain = None
    """Place in the stream of data where the next step begins; None without a stream, and on ranks
    that do not read it."""


class RunCheckpoints:
    """Saves and loads a run: tensors, skipped steps, random states, and values about the run.

    `folder` is the folder of its checkpoints, `launched_at` the time of its launch. All methods are
    collectives over the world.
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
        """False if checkpoints have only adapters: loading one does not load the base model."""
        self._launched_at = launched_at
        self._config = config
        self._mesh = mesh
        self._train_step = train_step
        self._saved = SavedStep(train_step)

    def init_weights(self) -> None:
        """Give the model its initial weights.

        Raises CheckpointError on all ranks if that fails on any rank.
        """
        seed, what = self._config.training.seed, "making the initial weights"
        attempt(self._mesh.host, what, lambda: self._train_step.init_weights(seed))
        self._train_step.weights_changed()

    def load_weights(self, info: CheckpointInfo) -> None:
        """Load only the weights of a checkpoint, of any run of this model, to begin at step 0."""
        self._saved.load(self.checkpointer, info, weights_only=True)
        logger.info("the run begins at step 0 with the weights of %s", info.describe())

    def load(self, info: CheckpointInfo) -> Progress:
        """Load a checkpoint, log how its run's configuration differs, and return its progress.

        Raises ValueError if the checkpoint is of another model or other data, or lacks the place in
        the stream of data.
        """
        changes = check_changes(info, self._config, self._mesh.topology)
        place = stream_place(info, self._config)
        resumed = self._saved.load(self.checkpointer, info)
        logger.info("resumed from %s", info.describe())
        for change in changes:
            logger.info("  %s", change)
        text, record = resumed.shared.get(_RECORD), None
        if isinstance(text, str):
            with suppress(ValueError):  # a record of another version: go on without the record
                record = StepRecord.from_json(text)
        return Progress(resumed.step, resumed.tokens, record, place)

    def save(self, done: Progress, *, wait: bool = False) -> None:
        """Save a checkpoint and publish it; in async mode without `wait`, in the background.

        Raises CheckpointError as `Checkpointer.save` does.
        """
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
        """Save at the end of a run, and retry for `checkpoint.last_save_retry_seconds`.

        Raises CheckpointError if no attempt succeeds.
        """
        given = left = self._config.checkpoint.last_save_retry_seconds
        while True:
            try:
                return self.save(done, wait=True)
            except CheckpointError as error:
                if left <= 0:
                    raise CheckpointError(
                        f"{error} The last save of the run was tried for {given} s"
                        f" (checkpoint.last_save_retry_seconds): steps since the checkpoint before"
                        f" are lost."
                    ) from None
                logger.error("%s Trying again for %.0f s: make room there.", error, left)
            # Count down instead of reading a clock: each attempt is a collective, so all ranks have
            # to make the same number of attempts.
            time.sleep(min(left, RETRY_SECONDS))
            left -= RETRY_SECONDS


# -- comparison of a checkpoint with the present configuration --------------------------------


def saved_config(info: CheckpointInfo) -> dict[str, Any] | None:
    """Return the configuration in a checkpoint as plain values; None if it has none.

    Keys that an earlier version lacked have the values by which that version behaved.
    """
    found = info.manifest.shared.get(_CONFIG)
    return KeyTable.of(JobConfig).upgraded(found) if isinstance(found, dict) else None


def saved_sequences(info: CheckpointInfo) -> int | None:
    """Return the number of sequences in a step, over all ranks, in the run that saved `info`.

    Returns None if the checkpoint does not have it.
    """
    return info.manifest.shared.get(_SEQUENCES)


def saved_values(config: JobConfig, topology: Topology) -> dict[str, Any]:
    """Return the plain values to save in a checkpoint, with which `compare` compares later."""
    return {_CONFIG: to_plain(config, redact=True), _SEQUENCES: config.sequences(topology)}


def compare(
    info: CheckpointInfo, config: JobConfig, topology: Topology | None
) -> tuple[list[str], list[str]]:
    """Return two lists of differences from the run that saved a checkpoint, each as a line.

    The first has those with which a run may not resume, since they make another model or another
    order of the data; the second has the others. `topology` None: no layout has been chosen yet, so
    ranks and sequences are not compared.
    """
    saved = saved_config(info)
    if saved is None:
        return [], ["it does not say its configuration, so nothing was compared"]
    lines: list[str] = []
    refused: list[str] = []
    keys = KeyTable.of(JobConfig)
    # URLs are compared without signatures, which change while the data stays the same. Remove them
    # on both sides: configurations that earlier versions saved still have signatures.
    here_now = to_plain(config, redact=True)
    for key, there, here in keys.differences(redacted_values(saved), here_now):
        if key == "data.add_bos" and not takes_bos(config.data):
            continue  # The key changes no token of this data, so a difference is no change.
        line = f"{key}: {there} there, {here} now"
        # Keys of the model and of the data must not change. This version does not know what a key
        # with role None decides, so such a key must not change either.
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
    """Return the differences from the run that saved a checkpoint, as lines for the log.

    Raises ValueError for differences that make another model or another order of the data, unless
    `checkpoint.allow_changes` is set.
    """
    refused, lines = compare(info, config, topology)
    if refused and not config.checkpoint.allow_changes:
        listed = "".join(f"\n  {line}" for line in refused)
        raise ValueError(
            f"{info.path} is of a run with another model, or other data:{listed}\n"
            "To start a new run, use another job.name (or checkpoint.folder) or"
            " checkpoint.auto_resume=false; to start it with the weights of this checkpoint, also"
            f" checkpoint.initial_load_path={info.path}. To resume this run in spite of the"
            " differences, use checkpoint.allow_changes=true."
        )
    return [*refused, *lines]


def stream_place(info: CheckpointInfo, config: JobConfig) -> Plain:
    """Return where in the stream of data a checkpoint ended; None without `data.streaming`.

    Raises ValueError if the checkpoint has no place that is valid for `config`. With
    `data.streaming_restart` it returns None instead: read from the beginning.
    """
    if not config.data.streaming or info.step == 0:
        return None
    place, parts = info.manifest.shared.get(_STREAM), len(config.data.parts)
    places = [place] if parts == 1 else place
    has_form = isinstance(places, list) and len(places) == parts and all(map(is_place, places))
    why = "" if has_form else "it was saved without one"
    # A place counts files and documents in the order that the seed gives: in other data, or with
    # another seed, it means nothing. Signatures of URLs are not compared, as in `compare`.
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
