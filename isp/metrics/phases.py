"""`PhaseClock`: what a rank is doing, and how long it has done what."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import NamedTuple

import torch

from isp.comm import streams

__all__ = ["PhaseClock", "PhaseTimes", "RunPhase", "training_seconds"]


class RunPhase(StrEnum):
    """What a rank is doing, in words for people."""

    DATA = "data loading"
    FORWARD_BACKWARD = "forward and backward"
    REDUCE = "gradient reduction"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    PROFILE = "writing a profile"
    OTHER = "other work"
    """Between steps: agreeing, reporting."""

    @property
    def is_of_step(self) -> bool:
        """Whether it is a phase of training steps."""
        return self in (
            RunPhase.DATA,
            RunPhase.FORWARD_BACKWARD,
            RunPhase.REDUCE,
            RunPhase.OPTIMIZER,
        )


PhaseTimes = dict[RunPhase, float]
"""Seconds of each phase."""

_STEP = (RunPhase.FORWARD_BACKWARD, RunPhase.REDUCE, RunPhase.OPTIMIZER)


def training_seconds(times: PhaseTimes) -> float:
    """All of `times` but evaluations, checkpoints and the writing of profiles."""
    apart = (RunPhase.EVALUATION, RunPhase.CHECKPOINT, RunPhase.PROFILE)
    return sum(seconds for phase, seconds in times.items() if phase not in apart)


class _Mark(NamedTuple):
    """A moment, on the host and (on CUDA) in the stream of compute."""

    host: float
    event: streams.Event | None


class PhaseClock:
    """Where this rank's time goes: it is in one phase at a time, and entering one ends the last.

    An exception leaves it in the phase it was raised in.

    [Note: Time on CUDA] The phases of a step only launch work there, so they are measured between
    events in the stream of compute: how long the device was at them, waiting included. Nothing
    waits for an event: the loss is read at the end of each step, and they have passed then. The
    other phases are measured on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: PhaseTimes = dict.fromkeys(RunPhase, 0.0)
        self._on_device: list[tuple[RunPhase, streams.Event, streams.Event]] = []
        self._since = self._mark()
        self.current = RunPhase.OTHER

    def enter(self, phase: RunPhase) -> None:
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
        for phase, begin, end in self._on_device:
            end.synchronize()
            self._seconds[phase] += begin.elapsed_time(end) / 1e3
        self._on_device.clear()
        taken, self._seconds = self._seconds, dict.fromkeys(RunPhase, 0.0)
        return taken

    def _mark(self) -> _Mark:
        return _Mark(time.perf_counter(), streams.mark(self._device, timed=True))
