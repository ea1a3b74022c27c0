"""`CommLog`, the log of the channels: one record per transfer with bytes and times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from isp.core.comm import streams
from isp.core.comm.tag import BETWEEN_TWO, Tag
from isp.core.mesh.phase import Phase

__all__ = ["CommLog", "CommTotals", "DeviceClock", "Observer", "TimedTransfer", "covered"]

_RENEWED_AFTER_MS = 1000.0
"""Age at which `DeviceClock` renews its zero point, in milliseconds: CUDA returns the time between
two events in float32, so a long time has a coarse resolution."""


@dataclass(slots=True)
class TimedTransfer:
    """The record of a `Transfer` with its times, in seconds of `time.perf_counter`.

    On CUDA the times come from events on the device and are filled in by `CommLog.settle`.
    """

    kind: str
    channel: str
    tag: Tag
    sent_bytes: int
    launched: float
    """The time at which the transfer was launched."""
    ended: float = 0.0
    """Time of the end of the transfer; 0 while it is in flight."""
    exposed: float = 0.0
    """Seconds for which its `wait` blocked compute."""
    waited: bool = False
    """True once the transfer has been waited for; until then `exposed` is unknown."""
    wait_began: float = 0.0
    """The time at which the wait for the transfer began."""
    phase: Phase = Phase.OTHER
    """Phase of the step in which the transfer was launched."""
    block: str = ""
    """Part of the model that was computed at the launch; set while the log has an observer."""

    @property
    def label(self) -> str:
        """Return the text of the tag, e.g. `layers.3.attention.wo.weight`."""
        return str(self.tag)

    @property
    def is_between_two(self) -> bool:
        """Return whether this is a send or recv."""
        return self.kind in BETWEEN_TWO

    @property
    def began(self) -> float:
        """Return the time from which the transfer counts as in flight.

        This is the launch or, for a send or recv, the begin of the wait: receives are posted long
        before the sender is ready, and gloo does not report the end of a send or recv.
        """
        return self.wait_began if self.is_between_two else self.launched

    @property
    def duration(self) -> float:
        """Return for how many seconds the transfer was in flight."""
        return max(0.0, self.ended - self.began)

    @property
    def arrived(self) -> float:
        """Return when the result could be used: at the end of the wait, if compute had to wait."""
        if self.wait_began < self.ended:
            return max(self.ended, self.wait_began + self.exposed)
        return self.ended

    def timed_on_host(
        self, work: dist.Work, wait: Callable[[], None], arrival: float, *, listens: bool
    ) -> Callable[[], None]:
        """Return a function that calls `wait`, which blocks until `work` ends, and records times.

        The returned function does not return before the time `arrival`, by which tools simulate a
        slow network (`Channel.arrival`). If the log `listens`, a callback records when `work` ends;
        else the transfer counts as ended when the wait returns. Without a listener no callback is
        registered, because gloo's thread would call one that is pending when the interpreter exits,
        which aborts the process.
        """

        def note_end(_: object) -> None:
            self.ended = max(time.perf_counter(), arrival)

        # gloo's reduce-scatter, send and recv have no future: they count as ended after the wait.
        if listens:
            with suppress(RuntimeError):
                work.get_future().add_done_callback(note_end)

        def timed() -> None:
            begin = self.wait_began = time.perf_counter()
            wait()
            if (left := arrival - time.perf_counter()) > 0:
                time.sleep(left)
            self.exposed = time.perf_counter() - begin
            # If `note_end` has set the end, keep it: it is more exact than the end of the wait.
            self.ended = self.ended or begin + self.exposed
            self.waited = True

        return timed


class CommTotals(NamedTuple):
    """Number of transfers that a rank made in a step, with their bytes and times."""

    num_transfers: int
    """Number of transfers of the step."""
    sent_bytes: int
    """Number of bytes that this rank has sent in these transfers."""
    comm_seconds: float
    """Seconds in which at least one transfer was in flight."""
    exposed_seconds: float
    """Seconds for which waits blocked compute."""


class DeviceClock:
    """Converts events of `device` to `time.perf_counter` seconds; the constructor synchronizes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = streams.current(device)
        """Stream that was current when the clock was made. A wait on any other delays no compute,
        and counts as not exposed."""
        self._zero = self.mark()
        self._zero.synchronize()  # so that the host reads its clock when the event completes
        self._seconds = time.perf_counter()

    def mark(self) -> streams.Event:
        """Record a timed event on the current stream."""
        event = streams.mark(self.device, timed=True)
        assert event is not None, "this device has no streams"
        return event

    def __call__(self, event: streams.Event) -> float:
        """Return the time at which the device passed `event`, which must have completed."""
        milliseconds: float = self._zero.elapsed_time(event)
        seconds = self._seconds + milliseconds / 1e3
        # Count later times from this event: only short differences between events are precise.
        if milliseconds > _RENEWED_AFTER_MS:
            self._zero, self._seconds = event, seconds
        return seconds


class Observer(Protocol):
    """Receiver of the events of a log, such as a profile of a step."""

    def launched(self, transfer: TimedTransfer) -> None:
        """Record the launch of `transfer`, whose later times are filled in once they are known."""

    def entered(self, phase: Phase, block: str) -> None:
        """Record that from now on `block` is computed, in `phase`."""


class _Timed(NamedTuple):
    """The device events of a transfer that has been waited for."""

    transfer: TimedTransfer
    clock: DeviceClock
    launch: streams.Event
    end: streams.Event
    begin: streams.Event
    """The event at which the wait for the transfer began."""
    finish: streams.Event
    """End of the wait; the event `begin` if compute did not wait."""

    def is_over(self) -> bool:
        """Return whether the device has passed the ends of the transfer and of its wait."""
        return bool(self.end.query() and self.finish.query())

    def settle(self) -> None:
        """Fill in the times of the transfer; blocks the host until its events are complete."""
        self.end.synchronize()  # on another stream, so `finish` may complete before it
        self.finish.synchronize()
        transfer = self.transfer
        # Short times between events are precise; only the launch is converted by the clock.
        transfer.launched = self.clock(self.launch)
        transfer.ended = transfer.launched + self.launch.elapsed_time(self.end) / 1e3
        transfer.wait_began = transfer.launched + self.launch.elapsed_time(self.begin) / 1e3
        transfer.exposed = self.begin.elapsed_time(self.finish) / 1e3


@dataclass
class CommLog:
    """The log of this rank's channels, idle until `collect` or `watch` is called.

    Until then it keeps no records, and times nothing on a device.
    """

    transfers: list[TimedTransfer] = field(default_factory=list)
    """The transfers that were launched and recorded since the last `take`."""
    phase: Phase = Phase.OTHER
    """The phase of the step that runs now, which launched transfers are recorded with."""
    block: str = ""
    """Part of the model that is computed now; set while there is an observer."""
    observer: Observer | None = None
    clock: DeviceClock | None = None
    """Clock for transfers on streams; None: they are not timed."""
    listens: bool = field(default=False, init=False)
    """True if transfers are collected or observed; if not, channels skip the log where they can."""
    _collects: bool = False
    _timed: list[_Timed] = field(default_factory=list)

    def collect(self, device: torch.device | None = None) -> None:
        """Start to keep records of all transfers launched from now on, until `take` returns them.

        Transfers on streams are timed by events on `device`; without it they have no times.
        """
        self._collects = self.listens = True
        self.transfers = []
        self._start_clock(device)

    def watch(self, observer: Observer, device: torch.device) -> None:
        """Report all later launches and phases to `observer`, timed on `device`."""
        assert self.observer is None, "this log is observed already"
        self.observer, self.listens = observer, True
        self._start_clock(device)

    def unwatch(self) -> None:
        """Stop reporting to the observer; drop device timing too, unless records are collected."""
        self.observer, self.block, self.listens = None, "", self._collects
        if not self._collects:
            self.clock, self._timed = None, []

    def start(self, kind: str, channel: str, tag: Tag, sent_bytes: int) -> TimedTransfer:
        """Return a new record of a transfer launched now, and report it."""
        transfer = TimedTransfer(kind, channel, tag, sent_bytes, time.perf_counter())
        transfer.phase, transfer.block = self.phase, self.block
        if self._collects:
            self.transfers.append(transfer)
        if self.observer is not None:
            self.observer.launched(transfer)
        return transfer

    def enter(self, phase: Phase, block: str = "") -> None:
        """Set the phase, and the part of the model, that is computed from now on."""
        self.phase, self.block = phase, block
        if self.observer is not None:
            self.observer.entered(phase, block)

    def timed_on_device(
        self, transfer: TimedTransfer, start: Callable[[], dist.Work], ends: streams.Stream | None
    ) -> Callable[[], None]:
        """Start the transfer; return a function by which the current stream waits, not the host.

        With a clock, events before and after the transfer and its wait give the times. The end is
        an event on `ends`, a stream that only waits for the transfers of one channel: so the event
        comes as soon as the transfer ends, and no other work is delayed.
        """
        clock = self.clock
        if clock is None:
            work = start()

            def untimed() -> None:
                work.wait()
                transfer.waited = True

            return untimed

        launch, work = clock.mark(), start()
        with streams.on(ends):
            work.wait()  # makes `ends` wait: the event below is at the transfer's end
            end = clock.mark()

        def timed() -> None:
            begin = finish = clock.mark()
            work.wait()
            # A wait on another stream delays no compute, so it counts as no time.
            if streams.current(clock.device) == clock.compute:
                finish = clock.mark()
            transfer.waited = True
            if self.clock is not None:  # it is None if `unwatch` was called after the launch
                self._timed.append(_Timed(transfer, self.clock, launch, end, begin, finish))

        return timed

    def settle(self) -> None:
        """Fill in the device times of all transfers waited for so far; synchronizes on CUDA."""
        for timed in self._timed:
            timed.settle()
        self._timed = []

    def take(self) -> list[TimedTransfer]:
        """Return all transfers since the last call, with device times; synchronizes on CUDA.

        Raises RuntimeError without an earlier `collect`.
        """
        self._check_collects()
        self.settle()
        taken, self.transfers = self.transfers, []
        return taken

    def take_waited(self) -> list[TimedTransfer]:
        """Return the transfers that have been waited for; leave the others for a later call.

        So a transfer in flight between two steps counts for the step that waits for it. On CUDA
        this does not synchronize: transfers whose wait the device has not passed are left as well.
        Raises RuntimeError without an earlier `collect`.
        """
        self._check_collects()
        under_way = []
        for timed in self._timed:
            if timed.is_over():
                timed.settle()
            else:
                under_way.append(timed)
        self._timed = under_way
        # Transfers are compared by `id`, because they are not hashable.
        unsettled = {id(timed.transfer) for timed in under_way}
        taken, self.transfers = self.transfers, []
        complete: list[TimedTransfer] = []
        for transfer in taken:
            done = transfer.waited and id(transfer) not in unsettled
            (complete if done else self.transfers).append(transfer)
        return complete

    def _start_clock(self, device: torch.device | None) -> None:
        self.clock = None
        if device is not None and streams.current(device) is not None:
            self.clock = DeviceClock(device)

    def _check_collects(self) -> None:
        if not self._collects:
            raise RuntimeError("no transfers were recorded: call collect() before their launch")

    @staticmethod
    def totals(transfers: list[TimedTransfer]) -> CommTotals:
        """Return number, bytes and exposed time of `transfers`, and the time that they cover."""
        return CommTotals(
            num_transfers=len(transfers),
            sent_bytes=sum(t.sent_bytes for t in transfers),
            comm_seconds=covered((t.began, t.arrived) for t in transfers),
            exposed_seconds=sum(t.exposed for t in transfers),
        )


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of `intervals`, pairs of begin and end."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals, key=lambda interval: interval[0]):
        begin = max(begin, reached)
        if end > begin:
            total += end - begin
            reached = end
    return total
