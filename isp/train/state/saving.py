"""`RunCheckpoints`: saves a run, and loads the state that it begins from."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import NamedTuple

from isp.checkpoint import Checkpointer, CheckpointError, CheckpointInfo, Resumed
from isp.checkpoint.agreement import attempt
from isp.checkpoint.folder import LAUNCH
from isp.checkpoint.plain import Plain
from isp.config import JobConfig
from isp.core.comm import Mesh
from isp.core.mesh import Axis
from isp.metrics import StepRecord
from isp.step.saved_step import SavedStep
from isp.step.train_step import TrainStep
from isp.train.state.resume import STREAM, Start, check_changes, saved_values, stream_place

__all__ = ["Progress", "RunCheckpoints"]

logger = logging.getLogger(__name__)

_RECORD = "record"
"""Key of a checkpoint's shared values: the record of its step."""

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
    """Saves and loads the run of `start`: tensors, skipped steps, random states, configuration.

    All methods are collectives over the world.
    """

    def __init__(self, start: Start, config: JobConfig, train_step: TrainStep, mesh: Mesh) -> None:
        self._start = start
        self._config = config
        self._mesh = mesh
        self._train_step = train_step
        self._saved = SavedStep(train_step)
        self.checkpointer = Checkpointer(
            start.checkpoints, config.checkpoint, world=mesh[Axis.WORLD]
        )

    def begin(self) -> Progress:
        """Load the state that the run begins from, and return its progress.

        That is the run's own checkpoint if there is one, else one of
        `checkpoint.initial_load_path`, else the model's initial weights.
        """
        start, checkpoint, own = self._start, self._config.checkpoint, None
        begun = not self._train_step.built.model.checkpoints_frozen
        if begun:  # checkpoints have adapters only, so the base model is needed in any case
            self._init_weights()
        if start.resumes:
            own = self.checkpointer.choose(checkpoint.load_step, launch=start.launched_at)
        if own is not None:
            progress = self._go_on_from(own)
            self.checkpointer.upload_again(own)
            return progress
        if checkpoint.initial_load_path is not None:
            initial = self.checkpointer.choose_initial(Path(checkpoint.initial_load_path))
            if not checkpoint.initial_load_model_only:
                # The record belongs to the metrics of the run that saved the checkpoint.
                return self._go_on_from(initial)._replace(record=None)
            self._saved.load(self.checkpointer, initial, weights_only=True)
            logger.info("begins at step 0 with the weights of %s", initial.describe())
        else:
            if start.resumes:
                folder = self.checkpointer.folder.path
                logger.info("no checkpoint in %s: starting from the initial weights", folder)
            if not begun:
                self._init_weights()
        return Progress(0, 0)

    def _init_weights(self) -> None:
        """Give the model its initial weights; raises on all ranks if that fails on any."""
        seed, what = self._config.training.seed, "making the initial weights"
        attempt(self._mesh.host, what, lambda: self._train_step.init_weights(seed))
        self._train_step.weights_changed()

    def save(self, done: Progress, *, wait: bool = False) -> None:
        """Save a checkpoint; see `Checkpointer.save`, also for its errors."""
        self._saved.save(
            self.checkpointer,
            done.step,
            tokens=done.tokens,
            shared={
                _RECORD: None if done.record is None else done.record.to_json(),
                **({} if done.place is None else {STREAM: done.place}),
                LAUNCH: self._start.launched_at,
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

    def _go_on_from(self, info: CheckpointInfo) -> Progress:
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
        return Progress(resumed.step, resumed.tokens, _saved_record(resumed), place)


def _saved_record(resumed: Resumed) -> StepRecord | None:
    """Return the record in a checkpoint; None if it has none that this version can read."""
    text = resumed.shared.get(_RECORD)
    try:
        return StepRecord.from_json(text) if isinstance(text, str) else None
    except ValueError:
        return None
