"""What looks wrong in a run that goes on: a loss that jumps, a rank that is slow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from isp.parallel import Axis, Topology

__all__ = ["LossWatch", "SlowRankWatch"]

_WINDOW = 100
"""Losses that a new one is compared with."""
_ENOUGH = 20
"""Fewer losses say nothing."""
_SIGMA = 1.4826
"""Standard deviations in a median absolute deviation, for normal numbers."""
_LEAST_SPREAD = 0.01
"""A deviation is taken as at least this part of the median: losses may be almost equal."""


class LossWatch:
    """Tells of a loss more than `deviations` above the median of the steps before; 0: never.

    A deviation is the median absolute one, in units of a standard deviation: both are hardly moved
    by the spikes themselves. A spike that lasts is told of once.
    """

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._high = False

    def look(self, step: int, loss: float) -> str | None:
        """A line about the loss of `step`, if it begins a spike."""
        if not self._deviations or not math.isfinite(loss):
            return None
        line, high = None, False
        if len(self._losses) >= _ENOUGH:
            middle = median(self._losses)
            spread = _SIGMA * median(abs(other - middle) for other in self._losses)
            spread = max(spread, _LEAST_SPREAD * abs(middle))
            away = (loss - middle) / spread if spread else 0.0
            high = away > self._deviations
            if high and not self._high:
                line = (
                    f"step {step}: the loss {loss:.4f} is {loss - middle:.4f} above {middle:.4f},"
                    f" the median of the {len(self._losses)} steps before: {away:.1f} deviations"
                    f" (told from metrics.loss_spike_deviations={self._deviations:g} on)"
                )
        self._high = high
        self._losses.append(loss)
        return line


class SlowRankWatch:
    """Tells of a rank whose own time is `factor` times that of the others; a factor of 0: never.

    Its own time is that of a step without waiting for other ranks; the others are the ranks of its
    pipeline stage, and their median counts. It has to be so for `steps` in a row, and is told of
    once as long as it lasts. Stages are not compared, as their work differs: a slow stage
    of one rank is not found.
    """

    def __init__(
        self, topology: Topology, hostnames: Sequence[str], *, factor: float, steps: int
    ) -> None:
        self._stages = [ranks for ranks in topology.groups(Axis.STAGE) if len(ranks) > 1]
        self._hostnames = hostnames
        self._factor = factor
        self._slow: list[deque[tuple[float, float]]] = [deque(maxlen=steps) for _ in hostnames]
        """Own time and that of the others in each rank's last slow steps, all in a row."""
        self._told: set[int] = set()

    def look(self, step: int, own_seconds: Sequence[float]) -> list[str]:
        """A line for each rank that is found slow at `step`; its own time by rank."""
        if not self._factor:
            return []
        lines = []
        for ranks in self._stages:
            ordered = sorted((own_seconds[rank], rank) for rank in ranks)
            for place, (own, rank) in enumerate(ordered):
                others = _median_without(ordered, place)
                if own <= self._factor * others:
                    self._slow[rank].clear()
                    self._told.discard(rank)
                    continue
                self._slow[rank].append((own, others))
                if len(self._slow[rank]) == self._slow[rank].maxlen and rank not in self._told:
                    self._told.add(rank)
                    lines.append(self._describe(step, rank))
        return lines

    def _describe(self, step: int, rank: int) -> str:
        slow = self._slow[rank]
        own, others = (fmean(column) for column in zip(*slow, strict=True))
        return (
            f"step {step}: rank {rank} on {self._hostnames[rank]} is slow: for {len(slow)} steps it"
            f" was at work {own * 1e3:.0f} ms a step, the others of its stage {others * 1e3:.0f} ms"
            f" (told from metrics.slow_rank_factor={self._factor:g} on)"
        )


def _median_without(ordered: Sequence[tuple[float, int]], place: int) -> float:
    """The median of `ordered` values but the one at `place`."""
    last = len(ordered) - 2
    low, high = last // 2, (last + 1) // 2
    return (ordered[low + (low >= place)][0] + ordered[high + (high >= place)][0]) / 2
