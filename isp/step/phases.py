"""`PhaseClock`: what a rank is doing, and how long it has done what."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

from isp.core.comm import streams
from isp.core.mesh.phase import Phase

__all__ = ["PhaseClock", "PhaseTimes", "is_of_step", "training_seconds"]


PhaseTimes = dict[Phase, float]
"""Seconds of each phase."""

_STEP = (Phase.FORWARD_BACKWARD, Phase.REDUCE, Phase.OPTIMIZER)


def is_of_step(phase: Phase) -> bool:
    """Whether a clock measures it as a part of training steps."""
    return phase is Phase.DATA or phase in _STEP


def training_seconds(times: PhaseTimes) -> float:
    """All of `times` but evaluations, checkpoints and the writing of profiles."""
    apart = (Phase.EVALUATION, Phase.CHECKPOINT, Phase.PROFILE)
    return sum(seconds for phase, seconds in times.items() if phase not in apart)


class _Mark(NamedTuple):
    """A moment, on the host and (on CUDA) in the stream of compute."""

    host: float
    event: streams.Event | None


class PhaseClock:
    """A clock of this rank's phases: it is in one at a time; entering one ends the last.

    An exception leaves it in the phase it was raised in.

    [Note: Time on CUDA] The phases of a step only launch work there, so they are measured between
    events in the stream of compute: how long the device was at them, waiting included. Nothing
    waits for an event: a phase that the device is still at is left for the next call of `take`, as
    the update is at the end of a step. The other phases are measured on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: PhaseTimes = dict.fromkeys(Phase, 0.0)
        self._on_device: deque[tuple[Phase, streams.Event, streams.Event]] = deque()
        self._since = self._mark()
        self.current = Phase.OTHER

    def enter(self, phase: Phase) -> None:
        """`phase` begins here."""
        last, since, now = self.current, self._since, self._mark()
        self.current, self._since = phase, now
        if last in _STEP and since.event is not None and now.event is not None:
            self._on_device.append((last, since.event, now.event))
        else:
            self._seconds[last] += now.host - since.host

    def take(self) -> PhaseTimes:
        """The seconds of each phase since the last call; to be called between steps."""
        self.enter(self.current)
        while self._on_device and self._on_device[0][2].query():
            phase, begin, end = self._on_device.popleft()
            self._seconds[phase] += begin.elapsed_time(end) / 1e3
        taken, self._seconds = self._seconds, dict.fromkeys(Phase, 0.0)
        return taken

    def _mark(self) -> _Mark:
        return _Mark(time.perf_counter(), streams.mark(self._device, timed=True))
