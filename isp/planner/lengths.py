"""How a layout's memory grows with the length of sequences, and the longest that fits.

Most owners are affine in the tokens, so two lengths give a fixed part and one for each token; what
is larger at one length than at another may be another moment of the step. The longest sequence is
looked for by those lines and found by rehearsals of it and of the next, which does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from isp.config import ConfigError, JobConfig
from isp.planner.case import PlanCase
from isp.planner.fabric import Fabric
from isp.planner.memory import Memory, busiest, moments, peak

__all__ = ["Budget", "Growth", "Longest", "Planned", "Show", "silent"]

GRAIN = 1024
"""Tokens: only multiples of this, and of the layout's own, are looked at."""


Show = Callable[[Sequence[Any], str], Iterable[Any]]
"""Gives items one by one, and shows how many were taken; what is done with them is in words."""


def silent(items: Sequence[Any], what: str) -> Iterable[Any]:
    """`items`, with nothing shown."""
    return items


class Budget(NamedTuple):
    """Bytes that a rank may take."""

    device: int
    host: int | None
    """None: no limit is known."""

    @classmethod
    def of(cls, fabric: Fabric, world_size: int) -> Budget:
        """A rank's part of a node of `fabric`."""
        ranks = min(world_size, fabric.devices_per_node)
        return cls(fabric.device.usable_bytes, fabric.host.usable_bytes(ranks))

    def excess(self, memory: Memory) -> int:
        """Bytes by which `memory` is too much; below 0 if it fits."""
        over = memory.total - self.device
        return over if self.host is None else max(over, memory.host - self.host)

    def fits(self, memory: Memory) -> bool:
        """Whether there is enough of both."""
        return self.excess(memory) <= 0

    def on_host(self, memory: Memory) -> bool:
        """Whether it is the host whose memory ends first."""
        return self.host is not None and memory.host - self.host > memory.total - self.device


class Growth(NamedTuple):
    """Bytes of each owner at one moment: a fixed part, and so many for a token of a rank."""

    fixed: Memory
    per_token: Memory
    """Its bytes are no whole numbers."""
    seq_len: int
    """Tokens of the sequences at which the moment is the largest."""
    tokens: int
    """Those of them that a rank holds, between the linears."""
    memory: Memory


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, and why the next does not."""

    seq_len: int
    """0: none fits."""
    memory: Memory
    """Of the shortest that was tried if none fits."""
    next_len: int
    beyond: Memory | str
    """Memory of the next one, or why there is none."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A configuration as it is, with sequences of any length."""

    config: JobConfig
    world_size: int
    on_cpu: bool

    @cached_property
    def unit(self) -> int:
        """Lengths are multiples of it, in tokens."""
        return math.lcm(GRAIN, self.config.parallel.tensor.size)

    def case(self, seq_len: int) -> PlanCase:
        """The case of sequences of `seq_len` tokens.  Raises ConfigError if there are none."""
        try:
            longer = replace(self.config, data=replace(self.config.data, seq_len=seq_len))
            longer.check_folder_model()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return PlanCase.of(longer, self.world_size, on_cpu=self.on_cpu)

    def peak(self, seq_len: int) -> Memory:
        """The memory of sequences of `seq_len` tokens."""
        return peak(self.case(seq_len))

    def growth(self, seq_len: int) -> Growth:
        """The lines through the largest moment of `seq_len` tokens and of half as many.

        Of more if half are too few to try. Raises ConfigError if those are refused.
        """
        longer = max(2 * self.unit, seq_len)
        shorter = longer // 2 // self.unit * self.unit
        try:
            case = self.case(longer)
        except ConfigError as error:
            raise ConfigError(
                f"sequences of {longer:,} tokens, to see memory grow: {error}"
            ) from error
        rank, most = max(
            ((rank, m) for rank in busiest(case) for m in moments(case, rank)),
            key=lambda pair: pair[1].total,
        )
        few = self.case(shorter)
        below = next(m for m in moments(few, rank) if m.moment == most.moment)
        tokens, less = (c.rows * c.tokens_between for c in (case, few))
        names = (*most.by_owner(), "host")
        slopes: Any = {n: (getattr(most, n) - getattr(below, n)) / (tokens - less) for n in names}
        fixed: Any = {n: getattr(most, n) - slopes[n] * tokens for n in names}
        return Growth(Memory(**fixed), Memory(**slopes), longer, tokens, most)

    def longest(self, budget: Budget) -> Longest:
        """The longest sequence that `budget` has memory for.

        Raises ConfigError if the shortest that is tried is refused.
        """
        low = self._try(1, budget)
        if isinstance(low.found, str):
            raise ConfigError(f"sequences of {self.unit:,} tokens, the shortest tried: {low.found}")
        if low.excess > 0:
            return Longest(0, low.found, self.unit, low.found)
        high = self._try(max(2, self.config.data.seq_len // self.unit), budget)
        while high.excess <= 0:
            low, high = high, self._try(_beyond(low, high), budget)
        halve = False
        while (gap := high.units - low.units) > 1:
            middle = self._try(_between(low, high, halve=halve), budget)
            low, high = (low, middle) if middle.excess > 0 else (middle, high)
            halve = high.units - low.units > gap / 2
        assert isinstance(low.found, Memory)
        return Longest(low.units * self.unit, low.found, high.units * self.unit, high.found)

    def _try(self, units: int, budget: Budget) -> _Tried:
        try:
            memory = self.peak(units * self.unit)
        except ConfigError as error:
            return _Tried(units, math.inf, str(error))
        return _Tried(units, budget.excess(memory), memory)


class _Tried(NamedTuple):
    """A length, in units, and what it takes."""

    units: int
    excess: float
    """Bytes that are too many; infinite where the length is refused."""
    found: Memory | str


def _beyond(low: _Tried, high: _Tried) -> int:
    """Where a line through two lengths that fit says that the first is which does not."""
    slope = (high.excess - low.excess) / (high.units - low.units)
    more = int(-high.excess / slope) + 1 if slope > 0 else high.units
    return high.units + max(1, high.units // 64, min(more, 31 * high.units))


def _between(low: _Tried, high: _Tried, *, halve: bool) -> int:
    """Where a line through both says that memory ends, or the middle; neither of the two."""
    share = 0.5
    if not halve and math.isfinite(high.excess):
        share = low.excess / (low.excess - high.excess)
    guess = low.units + int(share * (high.units - low.units))
    return min(max(guess, low.units + 1), high.units - 1)
