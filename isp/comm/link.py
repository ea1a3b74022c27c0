"""A modelled link: makes transfers take the time that a slower wire would take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["Link"]


@dataclass
class Link:
    """One wire of given speed, shared by every channel it is given to: transfers queue on it.

    A transfer of n bytes launched at t is there at max(t, end of the one before) + latency +
    n / bandwidth, or when the real transfer is done, whichever is later. Waiting sleeps, so the
    cores stay free for compute, as they do while a network card works.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    _busy_until: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.latency_seconds < 0:
            raise ValueError(
                f"a link needs bytes_per_second > 0 and latency_seconds >= 0, got"
                f" {self.bytes_per_second} and {self.latency_seconds}"
            )

    def book(self, num_bytes: int) -> float:
        """The end of a transfer of `num_bytes` launched now, in `time.perf_counter`."""
        start = max(time.perf_counter(), self._busy_until)
        self._busy_until = start + self.latency_seconds + num_bytes / self.bytes_per_second
        return self._busy_until
