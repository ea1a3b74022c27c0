"""What crossed the channels: one record per collective, bytes, duration, exposed time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from isp.comm import streams

__all__ = ["CommLog", "CommTotals", "DeviceClock", "Observer", "Transfer"]


@dataclass(slots=True)
class Transfer:
    """One collective on this rank; times are seconds of `time.perf_counter`.

    On CUDA the times come from events on the device and are filled in by `CommLog.settle`.
    """

    kind: str
    """all_gather, reduce_scatter, all_to_all, all_reduce, broadcast, send or recv."""
    channel: str
    """Name of the channel, which is the name of its mesh axis."""
    label: str
    """What travels, e.g. `layers.3.attention.wo.weight`."""
    sent_bytes: int
    """Bytes that this rank has to send to others, by the collective's definition."""
    launched: float
    ended: float = 0.0
    """When the transfer was over; 0 while it is under way."""
    exposed: float = 0.0
    """Seconds for which a `wait` really blocked."""
    waited: bool = False
    """Whether it has been waited for: until then, `exposed` is not known."""
    wait_began: float = 0.0
    """When that wait began."""
    phase: str = ""
    """The phase of the step in which it was launched."""
    block: str = ""
    """The part of the model that was computed then, while somebody observes."""

    @property
    def duration(self) -> float:
        """Seconds from launch to end."""
        return max(0.0, self.ended - self.launched)

    @property
    def arrived(self) -> float:
        """When it was there: for who waited for it, as the wait returned and not before."""
        if self.wait_began < self.ended:
            return max(self.ended, self.wait_began + self.exposed)
        return self.ended


class CommTotals(NamedTuple):
    """What the transfers of a step come to."""

    num_transfers: int
    sent_bytes: int
    comm_seconds: float
    """For which at least one transfer was under way."""
    exposed_seconds: float


class DeviceClock:
    """Events of this device as times of `time.perf_counter`; made while the device is idle."""

    def __init__(self) -> None:
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._seconds = time.perf_counter()

    def __call__(self, event: torch.cuda.Event) -> float:
        """When `event`, which is over and was recorded after this was made, came about."""
        milliseconds: float = self._zero.elapsed_time(event)
        return self._seconds + milliseconds / 1e3


class Observer(Protocol):
    """Somebody who is told what happens to a log, as it happens."""

    clock: DeviceClock | None
    """Puts the times of a CUDA device on the host's clock; None: the host's clock alone is used."""

    def launched(self, transfer: Transfer) -> None:
        """A transfer set off; its later times are filled in as they come about."""

    def entered(self, phase: str, block: str) -> None:
        """This is computed from here on."""


@dataclass
class CommLog:
    """Collects the transfers of this rank, until `take` hands them out and starts afresh."""

    transfers: list[Transfer] = field(default_factory=list)
    phase: str = ""
    """The phase of the step: forward, loss, backward, recompute, optimizer or between."""
    block: str = ""
    """The part of the model that is computed, while somebody observes."""
    observer: Observer | None = None
    _device_times: list[tuple[Transfer, tuple[Any, ...]]] = field(default_factory=list)
    _side_stream: streams.Stream | None = None

    def start(self, kind: str, channel: str, label: str, sent_bytes: int) -> Transfer:
        """A new record, launched now."""
        transfer = Transfer(kind, channel, label, sent_bytes, time.perf_counter())
        transfer.phase, transfer.block = self.phase, self.block
        self.transfers.append(transfer)
        if self.observer is not None:
            self.observer.launched(transfer)
        return transfer

    def enter(self, phase: str, block: str = "") -> None:
        """Say what is computed from here on."""
        self.phase, self.block = phase, block
        if self.observer is not None:
            self.observer.entered(phase, block)

    def side_stream(self, device: torch.device) -> streams.Stream | None:
        """A stream that does nothing but see transfers end."""
        if self._side_stream is None:
            self._side_stream = streams.new(device)
        return self._side_stream

    def defer(self, transfer: Transfer, events: tuple[Any, ...]) -> None:
        """Take the times of `transfer` from (launch, end, wait begin, wait end) events later."""
        transfer.waited = True
        self._device_times.append((transfer, events))

    def settle(self) -> None:
        """Fill in the device times of all transfers waited for so far (synchronises on CUDA)."""
        clock = None if self.observer is None else self.observer.clock
        for transfer, (launch, end, begin, finish) in self._device_times:
            end.synchronize()  # on a stream of its own: `finish` does not say that it is over
            finish.synchronize()
            if clock is not None:
                transfer.launched = clock(launch)
            transfer.ended = transfer.launched + launch.elapsed_time(end) / 1e3
            transfer.wait_began = transfer.launched + launch.elapsed_time(begin) / 1e3
            transfer.exposed = begin.elapsed_time(finish) / 1e3
        self._device_times = []

    def take(self) -> list[Transfer]:
        """All transfers since the last call, with device times (synchronises on CUDA)."""
        self.settle()
        taken, self.transfers = self.transfers, []
        return taken

    def take_waited(self) -> list[Transfer]:
        """As `take`, of those that have been waited for; the others are left for a later call.

        What travels between two steps so belongs to the step that waits for it. On CUDA nothing
        is synchronised: a wait that the device has not come to yet is left, too.
        """
        waits = self._device_times
        over = [_is_over(events) for _, events in waits]
        self._device_times = [wait for wait, done in zip(waits, over, strict=True) if done]
        under_way = [wait for wait, done in zip(waits, over, strict=True) if not done]
        self.settle()
        self._device_times = under_way
        left = {id(transfer) for transfer, _ in under_way}
        taken, self.transfers = self.transfers, []
        complete: list[Transfer] = []
        for transfer in taken:
            done = transfer.waited and id(transfer) not in left
            (complete if done else self.transfers).append(transfer)
        return complete

    @staticmethod
    def totals(transfers: list[Transfer]) -> CommTotals:
        """Count, bytes and exposed time summed over `transfers`, and the time they cover."""
        return CommTotals(
            num_transfers=len(transfers),
            sent_bytes=sum(t.sent_bytes for t in transfers),
            comm_seconds=_covered(transfers),
            exposed_seconds=sum(t.exposed for t in transfers),
        )


def _is_over(events: tuple[Any, ...]) -> bool:
    """Whether the device has come to the end of a transfer and of the wait for it."""
    _, end, _, finish = events
    return bool(end.query() and finish.query())


def _covered(transfers: list[Transfer]) -> float:
    """Length of the union of the transfers' intervals, in seconds."""
    covered, reached = 0.0, 0.0
    for transfer in sorted(transfers, key=lambda t: t.launched):
        begin = max(transfer.launched, reached)
        if transfer.arrived > begin:
            covered += transfer.arrived - begin
            reached = transfer.arrived
    return covered
