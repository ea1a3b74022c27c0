"""Log of the channels: one record per transfer, bytes, duration, exposed time."""

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
"""CUDA gives times between events in float32: their resolution falls with their length."""


@dataclass(slots=True)
class TimedTransfer:
    """A `Transfer` and its times, in seconds of `time.perf_counter`.

    On CUDA the times come from events on the device and are filled in by `CommLog.settle`.
    """

    kind: str
    channel: str
    tag: Tag
    sent_bytes: int
    launched: float
    ended: float = 0.0
    """End of the transfer; 0 while it is under way."""
    exposed: float = 0.0
    """Seconds for which a `wait` really blocked."""
    waited: bool = False
    """Whether it has been waited for: until then, `exposed` is not known."""
    wait_began: float = 0.0
    """Start of that wait."""
    phase: Phase = Phase.OTHER
    """The phase of the step in which it was launched."""
    block: str = ""
    """The part of the model that was computed then, while somebody observes."""

    @property
    def label(self) -> str:
        """The tag, for people, e.g. `layers.3.attention.wo.weight`."""
        return str(self.tag)

    @property
    def is_between_two(self) -> bool:
        """Whether it is a send or recv."""
        return self.kind in BETWEEN_TWO

    @property
    def began(self) -> float:
        """From when it counts as under way: a send or recv only while it is waited for.

        Receives are posted long before somebody sends, and gloo tells the end of neither.
        """
        return self.wait_began if self.is_between_two else self.launched

    @property
    def duration(self) -> float:
        """Seconds for which it was under way."""
        return max(0.0, self.ended - self.began)

    @property
    def arrived(self) -> float:
        """The time of arrival: for who waited for it, as the wait returned and not before."""
        if self.wait_began < self.ended:
            return max(self.ended, self.wait_began + self.exposed)
        return self.ended

    def timed_on_host(
        self, work: dist.Work, wait: Callable[[], None], arrival: float, *, listens: bool
    ) -> Callable[[], None]:
        """`wait`, which blocks until `work` is over, with its times; not before `arrival`.

        Without a listener it ends with the wait: a thread of gloo that calls Python at the end of
        what is still under way when the interpreter ends would abort the process.
        """

        def note_end(_: object) -> None:
            self.ended = max(time.perf_counter(), arrival)

        # gloo's own reduce-scatter, send and recv have no future: the wait ends them
        if listens:
            with suppress(RuntimeError):
                work.get_future().add_done_callback(note_end)

        def timed() -> None:
            begin = self.wait_began = time.perf_counter()
            wait()
            if (left := arrival - time.perf_counter()) > 0:
                time.sleep(left)
            self.exposed = time.perf_counter() - begin
            self.ended = self.ended or begin + self.exposed
            self.waited = True

        return timed


class CommTotals(NamedTuple):
    """The totals of a step's transfers."""

    num_transfers: int
    sent_bytes: int
    comm_seconds: float
    """For which at least one transfer was under way."""
    exposed_seconds: float


class DeviceClock:
    """Events of `device` as times of `time.perf_counter`; making one waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = streams.current(device)
        """The stream that was current then: a wait on another one holds up no compute."""
        self._zero = self.mark()
        self._zero.synchronize()
        self._seconds = time.perf_counter()

    def mark(self) -> streams.Event:
        """A moment of the current stream."""
        event = streams.mark(self.device, timed=True)
        assert event is not None, "this device has no streams"
        return event

    def __call__(self, event: streams.Event) -> float:
        """The time `event`, which is over, came."""
        milliseconds: float = self._zero.elapsed_time(event)
        seconds = self._seconds + milliseconds / 1e3
        if milliseconds > _RENEWED_AFTER_MS:
            self._zero, self._seconds = event, seconds
        return seconds


class Observer(Protocol):
    """Follows what happens to a log, as it happens."""

    def launched(self, transfer: TimedTransfer) -> None:
        """A transfer set off; its later times are filled in as they come about."""

    def entered(self, phase: Phase, block: str) -> None:
        """This is computed from here on."""


class _Timed(NamedTuple):
    """The device's events of a transfer that has been waited for."""

    transfer: TimedTransfer
    clock: DeviceClock
    launch: streams.Event
    end: streams.Event
    begin: streams.Event
    """Of the wait."""
    finish: streams.Event
    """Of the wait; `begin` itself if compute did not wait."""

    def is_over(self) -> bool:
        """Whether the device has come to the end of the transfer and of the wait for it."""
        return bool(self.end.query() and self.finish.query())

    def settle(self) -> None:
        """Fill in the times of the transfer (synchronises)."""
        self.end.synchronize()  # on a stream of its own: `finish` does not say that it is over
        self.finish.synchronize()
        transfer = self.transfer
        transfer.launched = self.clock(self.launch)
        transfer.ended = transfer.launched + self.launch.elapsed_time(self.end) / 1e3
        transfer.wait_began = transfer.launched + self.launch.elapsed_time(self.begin) / 1e3
        transfer.exposed = self.begin.elapsed_time(self.finish) / 1e3


@dataclass
class CommLog:
    """The log of this rank's channels, for those who ask beforehand.

    Until `collect` or `watch` is called nothing is kept, and nothing is timed on a device.
    """

    transfers: list[TimedTransfer] = field(default_factory=list)
    """Those kept since the last `take`."""
    phase: Phase = Phase.OTHER
    """The phase of the step."""
    block: str = ""
    """The part of the model that is computed, while somebody observes."""
    observer: Observer | None = None
    clock: DeviceClock | None = None
    """Clock of transfers on streams; None: they are not timed."""
    listens: bool = field(default=False, init=False)
    """Whether somebody wants to know of transfers."""
    _collects: bool = False
    _timed: list[_Timed] = field(default_factory=list)

    def collect(self, device: torch.device | None = None) -> None:
        """Keep what is launched from here on, until `take` hands it out.

        Times of transfers on streams are those of `device`; without one they are not known.
        """
        self._collects = self.listens = True
        self.transfers = []
        self._start_clock(device)

    def watch(self, observer: Observer, device: torch.device) -> None:
        """Tell `observer` of everything from here on, timed on `device`."""
        assert self.observer is None, "this log is observed already"
        self.observer, self.listens = observer, True
        self._start_clock(device)

    def unwatch(self) -> None:
        """The observer has seen enough."""
        self.observer, self.block, self.listens = None, "", self._collects
        if not self._collects:
            self.clock, self._timed = None, []

    def start(self, kind: str, channel: str, tag: Tag, sent_bytes: int) -> TimedTransfer:
        """A new record, launched now."""
        transfer = TimedTransfer(kind, channel, tag, sent_bytes, time.perf_counter())
        transfer.phase, transfer.block = self.phase, self.block
        if self._collects:
            self.transfers.append(transfer)
        if self.observer is not None:
            self.observer.launched(transfer)
        return transfer

    def enter(self, phase: Phase, block: str = "") -> None:
        """Say what is computed from here on."""
        self.phase, self.block = phase, block
        if self.observer is not None:
            self.observer.entered(phase, block)

    def timed_on_device(
        self, transfer: TimedTransfer, start: Callable[[], dist.Work], ends: streams.Stream | None
    ) -> Callable[[], None]:
        """Start the transfer; the result makes the stream that is current then wait, not the host.

        It is timed, if at all, by events around it and around the wait. A transfer ends where
        `ends`, a stream that does nothing but wait for those of one channel, ends: they follow each
        other there as they do on the wire, and hold up nothing else.
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
            work.wait()
            end = clock.mark()

        def timed() -> None:
            begin = finish = clock.mark()
            work.wait()
            if streams.current(clock.device) == clock.compute:
                finish = clock.mark()
            transfer.waited = True
            if self.clock is not None:
                self._timed.append(_Timed(transfer, self.clock, launch, end, begin, finish))

        return timed

    def settle(self) -> None:
        """Fill in the device times of all transfers waited for so far (synchronises on CUDA)."""
        for timed in self._timed:
            timed.settle()
        self._timed = []

    def take(self) -> list[TimedTransfer]:
        """All transfers since the last call, with device times (synchronises on CUDA).

        Raises RuntimeError if nobody has called `collect`.
        """
        self._check_collects()
        self.settle()
        taken, self.transfers = self.transfers, []
        return taken

    def take_waited(self) -> list[TimedTransfer]:
        """As `take`, of those that have been waited for; the others are left for a later call.

        What travels between two steps so belongs to the step that waits for it. On CUDA nothing
        is synchronised: a wait that the device has not come to yet is left, too.
        """
        self._check_collects()
        under_way = []
        for timed in self._timed:
            if timed.is_over():
                timed.settle()
            else:
                under_way.append(timed)
        self._timed = under_way
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
            raise RuntimeError("nothing was kept of what crossed: call collect() before it does")

    @staticmethod
    def totals(transfers: list[TimedTransfer]) -> CommTotals:
        """Count, bytes and exposed time summed over `transfers`, and the time they cover."""
        return CommTotals(
            num_transfers=len(transfers),
            sent_bytes=sum(t.sent_bytes for t in transfers),
            comm_seconds=covered((t.began, t.arrived) for t in transfers),
            exposed_seconds=sum(t.exposed for t in transfers),
        )


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of the intervals, each from its begin to its end."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals, key=lambda interval: interval[0]):
        begin = max(begin, reached)
        if end > begin:
            total += end - begin
            reached = end
    return total
