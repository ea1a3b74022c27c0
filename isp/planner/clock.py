"""One rank's time: a compute stream, and wires on which transfers queue in the order of launch."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Clock"]


class Clock:
    """Advances with what the rank computes and waits for; seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.exposed = 0.0
        """For which the rank waited for transfers."""
        self.busy = 0.0
        """Of all transfers, one after the other."""
        self._wires: dict[str, float] = {}
        self._arrivals: dict[Hashable, float] = {}

    def compute(self, seconds: float) -> None:
        """Do something else than waiting."""
        self.now += seconds

    def launch(
        self, key: Hashable, wire: str, seconds: float, *, behind: Hashable | None = None
    ) -> None:
        """Set a transfer on its way, behind what is on its wire, and behind transfer `behind`."""
        start = max(self.now, self._wires.get(wire, 0.0), self._arrivals.get(behind, 0.0))
        self._wires[wire] = self._arrivals[key] = start + seconds
        self.busy += seconds

    def join(self, key: Hashable, other: Hashable) -> None:
        """Have `key` arrive when `other`, which is under way, does."""
        self._arrivals[key] = self._arrivals[other]

    def wait(self, key: Hashable) -> None:
        """Wait for a transfer; free if it is over, or was never launched."""
        late = self._arrivals.pop(key, 0.0) - self.now
        if late > 0:
            self.exposed += late
            self.now += late
