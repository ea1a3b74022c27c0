"""`StepProfiler`: a profile and a trace of every n-th step of a run, as it trains."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from isp.comm.tag import Tag
from isp.config import JobConfig
from isp.profile.collectives import clock_lead
from isp.profile.recorder import Recorder
from isp.profile.table import sentence
from isp.run.folder import RunFolder
from isp.train.profile_parts import (
    leave_part,
    parts_folder,
    recorder_for,
    torch_profiler,
    write_profile,
)
from isp.train.step import TrainStep

__all__ = ["StepProfiler"]

logger = logging.getLogger(__name__)

_TAG = Tag(tensor="profile")


class StepProfiler:
    """Profiles steps `profile_freq`, 2 `profile_freq`, ... of a run; nothing if it is switched off.

    The step before is recorded too, for at its end the first gathers of the profiled one set off.
    """

    def __init__(
        self, config: JobConfig, step: TrainStep, device: torch.device, folder: RunFolder
    ) -> None:
        self._config = config
        self._step = step
        self._device = device
        self._traces = folder.path / config.profiler.save_traces_folder
        enabled = config.profiler.enable_profiling
        self._lead = clock_lead(step.mesh.host) if enabled else 0.0
        self._recorder: Recorder | None = None
        self._watching = ExitStack()

    def begin(self, step: int) -> None:
        """The run's step number `step`, counted from 1, is about to be taken."""
        if not self.is_due(step) and not self.is_due(step + 1):
            return
        if self._recorder is None:
            self._recorder = recorder_for(self._step, self._device)
            self._watching.enter_context(self._recorder)
        self._recorder.begin_step()
        if self.is_due(step) and self._config.profiler.with_torch:
            folder = self._parts(step)
            self._watching.enter_context(torch_profiler(folder, self._step))
            self._recorder.begin_step()

    def is_due(self, step: int) -> bool:
        """Whether `step` is one of those that are profiled."""
        profiler = self._config.profiler
        return profiler.enable_profiling and step % profiler.profile_freq == 0

    def end(self, step: int, loss: float) -> None:
        """Step number `step`, a profiled one, has been taken: write what was seen of it.

        A collective. A disk that cannot be written to is logged, and does not end the run.
        """
        recorder, mesh, failure = self._recorder, self._step.mesh, None
        assert recorder is not None
        recorder.begin_step()
        try:
            self._watching.close()
            self._write_part(recorder, step, loss)
        except OSError as error:
            failure = error
        self._recorder = None
        failed = torch.tensor([float(failure is not None)])
        together = mesh.host.all_reduce(failed, tag=_TAG)
        all_written = not together.wait().item()
        if mesh.rank == 0 and all_written:
            try:
                self._assemble(step)
            except OSError as error:
                failure = error
        if failure is not None:
            logger.warning("cannot write the profile of step %d: %s", step, failure)
        mesh.host.all_reduce(torch.zeros(1), tag=_TAG).wait()  # no step waits for rank 0

    def _write_part(self, recorder: Recorder, step: int, loss: float) -> None:
        last = len(recorder.record().begins) - 2
        leave_part(
            self._parts(step),
            recorder,
            self._step.mesh,
            losses=[loss],
            lead=self._lead,
            first_measured=last,
            traced=last if self._config.profiler.with_torch else None,
        )

    def _assemble(self, step: int) -> None:
        config, folder = self._config, self._folder(step)
        world_size = self._step.mesh.topology.world_size
        profile = write_profile(
            folder, config, [config], world_size=world_size, warmup_steps=step - 1
        )
        logger.info("profiled step %d, in %s: %s", step, folder, sentence(profile.modes[0]))

    def _folder(self, step: int) -> Path:
        return self._traces / f"step_{step}"

    def _parts(self, step: int) -> Path:
        return parts_folder(self._folder(step), self._config.parallel.tensor.mode)
