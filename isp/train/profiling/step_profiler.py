"""`StepProfiler`: a profile and a trace of every n-th step of a run while it trains."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from isp.checkpoint.agreement import CheckpointError, attempt, attempt_first
from isp.config import JobConfig
from isp.profile.collectives import clock_lead
from isp.profile.recorder import Recorder
from isp.profile.table import sentence
from isp.step.train_step import TrainStep
from isp.train.folder.run_folder import RunFolder
from isp.train.profiling.recording import (
    Measured,
    record_of,
    recorder_for,
    torch_profiler,
    write_profile,
)

__all__ = ["StepProfiler"]

logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiles every `profiler.profile_freq`-th step of a run.

    The step before a profiled one is recorded too: its end launches the first gathers of the
    profiled step. Making a `StepProfiler` and calling `end` are collectives.
    """

    def __init__(
        self, config: JobConfig, step: TrainStep, device: torch.device, folder: RunFolder
    ) -> None:
        self._config = config
        self._step = step
        self._device = device
        self._traces = folder.path / config.profiler.save_traces_folder
        self._lead = clock_lead(step.mesh.host)
        self._recorder: Recorder | None = None
        """The recorder during a profiled step and the one before; else None."""
        self._watching = ExitStack()
        """The contexts of recorder and torch.profiler."""

    def begin(self, step: int) -> None:
        """Start recording if `step` or the next one is profiled; call it before `step` runs.

        Steps are counted from 1.
        """
        if not self.is_due(step) and not self.is_due(step + 1):
            return
        if self._recorder is None:
            self._recorder = recorder_for(self._step, self._device)
            self._watching.enter_context(self._recorder)
        self._recorder.begin_step()
        if self.is_due(step) and self._config.profiler.with_torch:
            self._watching.enter_context(torch_profiler(self._folder(step), self._step))
            # Begin the step again: the time to start torch.profiler must not count as part of it.
            self._recorder.begin_step()

    def is_due(self, step: int) -> bool:
        """Return True if `step` is profiled."""
        return step % self._config.profiler.profile_freq == 0

    def end(self, step: int, loss: float) -> None:
        """Write the profile of `step` after it has run; a collective.

        If the disk cannot be written to, rank 0 logs a warning and the run continues.
        """
        host, what = self._step.mesh.host, f"writing the profile of step {step}"
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        recorder.begin_step()  # ends the profiled step

        def leave() -> str:
            """Stop recorder and torch.profiler on this rank, and return this rank's record."""
            self._watching.close()
            return record_of(recorder, self._step.mesh, self._lead)

        def write() -> None:
            """Write the profile from all ranks' records, on rank 0."""
            folder, last = self._folder(step), recorder.num_steps - 1
            measured = Measured(
                config=self._config,
                records=records,
                losses=[loss],
                first=last,
                traced=last if self._config.profiler.with_torch else None,
            )
            profile = write_profile(
                folder, self._config, [measured], self._device, warmup_steps=step - 1
            )
            logger.info("profiled step %d, in %s: %s", step, folder, sentence(profile.modes[0]))

        try:
            records = attempt(host, what, leave)
            attempt_first(host, what, write)
        except CheckpointError as error:
            if host.rank == 0:
                logger.warning("%s", error)

    def _folder(self, step: int) -> Path:
        """Return the folder of a step's profile."""
        return self._traces / f"step_{step}"
