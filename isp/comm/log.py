"""What crossed the channels: one record per collective, bytes, duration, exposed time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

__all__ = ["CommLog", "CommTotals", "Transfer"]


@dataclass(slots=True)
class Transfer:
    """One collective on this rank; times are seconds of `time.perf_counter`.

    On CUDA the times come from events on the device and are filled in by `CommLog.take`.
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

    @property
    def duration(self) -> float:
        """Seconds from launch to end."""
        return max(0.0, self.ended - self.launched)


class CommTotals(NamedTuple):
    """What the transfers of a step come to."""

    num_transfers: int
    sent_bytes: int
    comm_seconds: float
    """For which at least one transfer was under way."""
    exposed_seconds: float


@dataclass
class CommLog:
    """Collects the transfers of this rank, until `take` hands them out and starts afresh."""

    transfers: list[Transfer] = field(default_factory=list)
    _device_times: list[tuple[Transfer, tuple[torch.cuda.Event, ...]]] = field(default_factory=list)
    _observer: torch.cuda.Stream | None = None

    def start(self, kind: str, channel: str, label: str, sent_bytes: int) -> Transfer:
        """A new record, launched now."""
        transfer = Transfer(kind, channel, label, sent_bytes, time.perf_counter())
        self.transfers.append(transfer)
        return transfer

    def observer(self) -> torch.cuda.Stream:
        """A stream that does nothing but see transfers end."""
        if self._observer is None:
            self._observer = torch.cuda.Stream()
        return self._observer

    def defer(self, transfer: Transfer, events: tuple[torch.cuda.Event, ...]) -> None:
        """Take the times of `transfer` from (launch, end, wait begin, wait end) events later."""
        transfer.waited = True
        self._device_times.append((transfer, events))

    def take(self) -> list[Transfer]:
        """All transfers since the last call, with device times (synchronises on CUDA)."""
        for transfer, (launch, end, begin, finish) in self._device_times:
            finish.synchronize()
            transfer.ended = transfer.launched + launch.elapsed_time(end) / 1e3
            transfer.exposed = begin.elapsed_time(finish) / 1e3
        taken, self.transfers, self._device_times = self.transfers, [], []
        return taken

    def take_waited(self) -> list[Transfer]:
        """As `take`, of those that have been waited for; the others are left for a later call.

        What travels between two steps so belongs to the step that waits for it.
        """
        taken = self.take()
        self.transfers = [t for t in taken if not t.waited]
        return [t for t in taken if t.waited]

    @staticmethod
    def totals(transfers: list[Transfer]) -> CommTotals:
        """Count, bytes and exposed time summed over `transfers`, and the time they cover."""
        return CommTotals(
            num_transfers=len(transfers),
            sent_bytes=sum(t.sent_bytes for t in transfers),
            comm_seconds=_covered(transfers),
            exposed_seconds=sum(t.exposed for t in transfers),
        )


def _covered(transfers: list[Transfer]) -> float:
    """Length of the union of the transfers' intervals, in seconds."""
    covered, reached = 0.0, 0.0
    for transfer in sorted(transfers, key=lambda t: t.launched):
        begin = max(transfer.launched, reached)
        if transfer.ended > begin:
            covered += transfer.ended - begin
            reached = transfer.ended
    return covered
