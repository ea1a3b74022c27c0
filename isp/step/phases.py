"""`PhaseClock`, which measures the time that a rank spends in each phase of training."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

from isp.core.comm import streams
from isp.core.mesh.phase import Phase

__all__ = ["PhaseClock", "PhaseTimes", "is_of_step", "training_seconds"]


PhaseTimes = dict[Phase, float]
"""Seconds spent in each phase."""

_STEP = (Phase.FORWARD_BACKWARD, Phase.REDUCE, Phase.OPTIMIZER)
"""The phases whose host code mostly launches work on the device, where their time is measured."""


def is_of_step(phase: Phase) -> bool:
    """Return True if a clock counts `phase` as part of a training step."""
    return phase is Phase.DATA or phase in _STEP


def training_seconds(times: PhaseTimes) -> float:
    """Return the seconds of `times` without evaluations, checkpoints and profiles."""
    apart = (Phase.EVALUATION, Phase.CHECKPOINT, Phase.PROFILE)
    return sum(seconds for phase, seconds in times.items() if phase not in apart)


class _Mark(NamedTuple):
    """A moment on the host and, on CUDA, on the compute stream."""

    host: float
    """`time.perf_counter()`, in seconds."""
    event: streams.Event | None
    """Event on the compute stream; None on CPU."""


class PhaseClock:
    """A clock of this rank's phases; entering a phase ends the previous one.

    After an exception the clock stays in the phase in which it was raised. On CUDA, the phases of
    a step are measured by events on the compute stream. See [Note: Time on CUDA] in
    docs/design/notes/step.md.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: PhaseTimes = dict.fromkeys(Phase, 0.0)
        """Seconds of each phase since the last `take`."""
        self._on_device: deque[tuple[Phase, streams.Event, streams.Event]] = deque()
        """Phases of steps that are not counted yet, oldest first, each with its start and end."""
        self._since = self._mark()
        """The start of the current phase."""
        self.current = Phase.OTHER
        """The phase that was entered last."""

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin `phase`."""
        last, since, now = self.current, self._since, self._mark()
        self.current, self._since = phase, now
        if last in _STEP and since.event is not None and now.event is not None:
            self._on_device.append((last, since.event, now.event))
        else:
            self._seconds[last] += now.host - since.host

    def take(self) -> PhaseTimes:
        """Return the seconds of each phase since the last call; call this between steps.

        On CUDA, phases that the device has not finished are left for the next call.
        """
        # Enter the current phase again, so that its time up to now is counted.
        self.enter(self.current)
        while self._on_device and self._on_device[0][2].query():
            phase, begin, end = self._on_device.popleft()
            self._seconds[phase] += begin.elapsed_time(end) / 1e3
        taken, self._seconds = self._seconds, dict.fromkeys(Phase, 0.0)
        return taken

    def _mark(self) -> _Mark:
        """Return the time now, on the host and on the compute stream."""
        return _Mark(time.perf_counter(), streams.mark(self._device, timed=True))
