"""`Recorder`, which keeps what a rank does in some steps, with nothing added but time stamps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isp.core.comm import CommLog, DeviceClock, TimedTransfer, streams
from isp.core.mesh.phase import Phase
from isp.metrics import MemoryMeter, peak_memory_gib

__all__ = ["Mark", "RankRecord", "Recorder"]


@dataclass(frozen=True)
class Mark:
    """From here on this part of the model is computed in this phase; seconds of perf_counter."""

    at: float
    phase: Phase
    block: str
    site: str = ""
    """The use of the block, such as `wo`, where one was reached; else the block was entered."""
    memory_gib: float = 0.0
    """In use at this moment; read where no site was reached."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """A rank's record: its steps, its transfers and where it was; seconds of its perf_counter."""

    begins: tuple[float, ...]
    """Start of each recorded step, and end of the last one."""
    transfers: tuple[TimedTransfer, ...]
    """Those that were waited for, in order of launch."""
    marks: tuple[Mark, ...] = ()
    """In order of time."""
    parts: tuple[str, ...] = ()
    """The parts of the model, in order."""
    peak_memory_gib: float = 0.0
    channels: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of each of its channels, by name."""
    clock_lead: float = 0.0
    """Seconds by which its `time.perf_counter` is ahead of rank 0's."""
    unix_zero: float = 0.0
    """Unix time, in seconds, when its `time.perf_counter` was 0."""


_Moment = tuple[streams.Event | None, Mark]
"""A mark; where there is an event, that has the time, once the device has come by."""


@dataclass(eq=False)
class Recorder:
    """Keeps what happens to `log` within it; a context.

    `parts` are the modules that a forward calls in turn, by name; `sites` the uses within them.
    Hooks on them are there only within the context. Times on CUDA are those of events on the
    streams; nothing waits for the device until `record` is asked for.
    """

    log: CommLog
    device: torch.device
    parts: Mapping[str, nn.Module]
    sites: Iterable[tuple[str, nn.Module]] = ()
    _clock: DeviceClock | None = field(default=None, init=False)
    _transfers: list[TimedTransfer] = field(default_factory=list, init=False)
    _moments: list[_Moment] = field(default_factory=list, init=False)
    _begins: list[_Moment] = field(default_factory=list, init=False)
    _handles: list[RemovableHandle] = field(default_factory=list, init=False)
    _memory: MemoryMeter = field(init=False)

    def __enter__(self) -> Self:
        self.log.watch(self, self.device)
        self._clock, self._memory = self.log.clock, MemoryMeter(self.device)
        for name, part in self.parts.items():
            self._handles.append(part.register_forward_pre_hook(self._begins_forward(name)))
            self._handles.append(part.register_forward_hook(self._begins_backward(name)))
        for name, site in self.sites:
            self._handles.append(site.register_forward_pre_hook(self._reaches(name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.log.settle()
        self.log.unwatch()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._memory.close()

    def begin_step(self) -> None:
        """A step begins here, and the one before it ends; to be called after the last one, too."""
        self._begins.append(self._moment(self.log.phase, self.log.block))

    @property
    def num_steps(self) -> int:
        """The recorded steps that have ended."""
        return len(self._begins) - 1

    def record(self) -> RankRecord:
        """The record; to be asked for after the context has been left without an exception."""
        assert self.log.observer is None, "the record is not complete yet"
        return RankRecord(
            begins=tuple(self._timed(moment).at for moment in self._begins),
            transfers=tuple(t for t in self._transfers if t.waited),
            marks=tuple(map(self._timed, self._moments)),
            parts=tuple(self.parts),
            peak_memory_gib=peak_memory_gib(self.device),
        )

    def launched(self, transfer: TimedTransfer) -> None:
        self._transfers.append(transfer)

    def entered(self, phase: Phase, block: str) -> None:
        self._moments.append(self._moment(phase, block, memory=self._memory.gib()))

    # -- inside ------------------------------------------------------------------------------

    def _begins_forward(self, name: str) -> Any:
        def hook(_: nn.Module, __: Any) -> None:
            self.log.enter(self.log.phase, name)

        return hook

    def _begins_backward(self, name: str) -> Any:
        """The backward of a part begins when the gradient of its output is there."""

        def enter(_: Tensor) -> None:
            self.log.enter(self.log.phase, name)

        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(enter)

        return hook

    def _reaches(self, name: str) -> Any:
        def hook(_: nn.Module, __: Any) -> None:
            self._moments.append(self._moment(self.log.phase, self.log.block, site=name))

        return hook

    def _moment(self, phase: Phase, block: str, *, site: str = "", memory: float = 0.0) -> _Moment:
        event = None if self._clock is None else self._clock.mark()
        return event, Mark(time.perf_counter(), phase, block, site, memory)

    def _timed(self, moment: _Moment) -> Mark:
        event, mark = moment
        if event is None:
            return mark
        assert self._clock is not None
        event.synchronize()
        return replace(mark, at=self._clock(event))
