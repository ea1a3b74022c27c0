"""`Recorder` records what a rank does in some steps, by time stamps: it waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isp.core.comm import CommLog, DeviceClock, TimedTransfer, streams
from isp.core.mesh.phase import Phase
from isp.metrics import MemoryMeter, peak_memory_gib

__all__ = ["Mark", "RankRecord", "Recorder", "RegisterHook"]

RegisterHook = Callable[[Callable[..., None]], RemovableHandle]
"""A function that lets a hook be called at a place of the forward, until its handle is removed."""


@dataclass(frozen=True)
class Mark:
    """The moment at which a rank begins a part of the model, or reaches the use of a weight in it.

    Times are in seconds of the rank's `time.perf_counter`.
    """

    at: float
    phase: Phase
    block: str
    site: str = ""
    """The use of a weight that begins here, such as `wo`; empty at the start of a block."""
    memory_gib: float = 0.0
    """Memory in use at this moment; read at block starts only."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Steps, transfers and marks of one rank; in seconds of its `time.perf_counter`."""

    begins: tuple[float, ...]
    """Start of each recorded step, and end of the last one."""
    transfers: tuple[TimedTransfer, ...]
    """Transfers that were waited for, in order of launch."""
    marks: tuple[Mark, ...] = ()
    """The moments at which this rank began a part of the model, in order of time."""
    parts: tuple[str, ...] = ()
    """Names of the parts of the model, such as blocks, in the order of a forward."""
    peak_memory_gib: float = 0.0
    channels: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each channel, by its name."""
    clock_lead: float = 0.0
    """Seconds by which `time.perf_counter` on this rank is ahead of that on rank 0."""
    unix_zero: float = 0.0
    """Unix time, in seconds, at which `time.perf_counter` was 0 on this rank.

    It aligns torch.profiler's times, which are Unix times, with the record's. `clock_lead` puts
    ranks on one clock."""


_Moment = tuple[streams.Event | None, Mark]
"""A mark and a CUDA event on the stream, whose time replaces the mark's; None on CPU."""


@dataclass(eq=False)
class Recorder:
    """Context manager that records what happens in `log`.

    `parts` are the modules that a forward calls in order, by name; `sites` the uses of weights
    within them, each with the function that registers a hook on it. Hooks exist only within the
    context. On CUDA times come from events on the streams; the recorder does not wait for the
    device before the context is left.
    """

    log: CommLog
    device: torch.device
    parts: Mapping[str, nn.Module]
    sites: Iterable[tuple[str, RegisterHook]] = ()
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
            self._handles.append(site(self._reaches(name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            # After an exception transfers may never end, so only a clean exit waits for them.
            self.log.settle()
        self.log.unwatch()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._memory.close()

    def begin_step(self) -> None:
        """Record the moment at which a step starts and the step before it ends.

        Call it before each step, and once more after the last step.
        """
        self._begins.append(self._moment(self.log.phase, self.log.block))

    @property
    def num_steps(self) -> int:
        """Number of recorded steps that have ended."""
        return len(self._begins) - 1

    def record(self) -> RankRecord:
        """Return the record.  Call it only after the context was left without an exception."""
        assert self.log.observer is None, "the record is not complete yet"
        return RankRecord(
            begins=tuple(self._timed(moment).at for moment in self._begins),
            transfers=tuple(t for t in self._transfers if t.waited),
            marks=tuple(map(self._timed, self._moments)),
            parts=tuple(self.parts),
            peak_memory_gib=peak_memory_gib(self.device),
        )

    def launched(self, transfer: TimedTransfer) -> None:
        """Record a launched transfer (called by the log)."""
        self._transfers.append(transfer)

    def entered(self, phase: Phase, block: str) -> None:
        """Record that a block was entered (called by the log), with the memory in use."""
        self._moments.append(self._moment(phase, block, memory=self._memory.gib()))

    # -- inside ------------------------------------------------------------------------------

    def _begins_forward(self, name: str) -> Any:
        """Return a forward pre-hook that enters part `name`."""

        def hook(_: nn.Module, __: Any) -> None:
            self.log.enter(self.log.phase, name)

        return hook

    def _begins_backward(self, name: str) -> Any:
        """Return a forward hook that enters `name` again when backward reaches it.

        Backward of a part starts when the gradient of its output is there.
        """

        def enter(_: Tensor) -> None:
            self.log.enter(self.log.phase, name)

        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(enter)

        return hook

    def _reaches(self, name: str) -> Any:
        """Return a hook that marks the use `name`; it ignores its arguments."""

        def hook(*_: object) -> None:
            self._moments.append(self._moment(self.log.phase, self.log.block, site=name))

        return hook

    def _moment(self, phase: Phase, block: str, *, site: str = "", memory: float = 0.0) -> _Moment:
        """Return a mark with the time now, and on CUDA an event on the stream."""
        event = None if self._clock is None else self._clock.mark()
        return event, Mark(time.perf_counter(), phase, block, site, memory)

    def _timed(self, moment: _Moment) -> Mark:
        """Return the mark of a moment at the time of its event."""
        event, mark = moment
        if event is None:
            return mark
        assert self._clock is not None
        event.synchronize()
        return replace(mark, at=self._clock(event))
