"""Memory as a function of the sequence length, and the longest sequence that fits.

The memory of most owners is affine in the number of tokens, so rehearsals of two lengths give a
fixed part and a slope. Different lengths may peak at different moments of the step, so these lines
only guide the search: the longest length is rehearsed itself, and so is the next one, which does
not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from isp.config import ConfigError, JobConfig
from isp.planner.case import PlanCase
from isp.planner.fabric import Fabric
from isp.planner.memory import Memory, busiest, moments, peak
from isp.step.job_models import check_models

__all__ = [
    "OPTIONS",
    "Budget",
    "Growth",
    "LadderStep",
    "Longest",
    "MemoryOption",
    "Planned",
    "Show",
    "changes",
    "climb",
    "silent",
    "with_keys",
]

GRAIN = 1024
"""Granularity in tokens: only multiples of it, and of the tensor group's size, are tried."""


Show = Callable[[Sequence[Any], str], Iterable[Any]]
"""Progress display: yields `items` one by one under the title `what`."""


def silent(items: Sequence[Any], what: str) -> Iterable[Any]:
    """Return `items` without showing progress."""
    return items


class Budget(NamedTuple):
    """Bytes that a rank may use."""

    device: int
    """Bytes of device memory that tensors may take."""
    host: int | None
    """Bytes of host memory that this rank may take; None: the limit is not known."""

    @classmethod
    def of(cls, fabric: Fabric, world_size: int) -> Budget:
        """Return the budget of one rank: a device of `fabric` and a share of its node's memory."""
        ranks = min(world_size, fabric.devices_per_node)
        return cls(fabric.device.usable_bytes, fabric.host.usable_bytes(ranks))

    def excess(self, memory: Memory) -> int:
        """Return the bytes by which `memory` exceeds the budget; negative or zero if it fits."""
        over = memory.total - self.device
        return over if self.host is None else max(over, memory.host - self.host)

    def fits(self, memory: Memory) -> bool:
        """Return True if `memory` fits on the device and on the host."""
        return self.excess(memory) <= 0

    def on_host(self, memory: Memory) -> bool:
        """Return True if host memory is exceeded by more bytes than device memory."""
        return self.host is not None and memory.host - self.host > memory.total - self.device


class Growth(NamedTuple):
    """Growth of peak memory with the length: a fixed part, and bytes for each token of a rank."""

    fixed: Memory
    """Bytes at zero tokens, by the line through two lengths."""
    per_token: Memory
    """Bytes that each further token of a rank adds; these are not whole numbers."""
    seq_len: int
    """Sequence length, in tokens, for which `memory` was planned."""
    tokens: int
    """Tokens of a micro-batch on a rank, outside of attention and regions, at that length."""
    memory: Memory
    """Memory at the peak of a step with sequences of `seq_len` tokens."""


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, and the reason why the next one does not."""

    seq_len: int
    """Length in tokens; 0 if none fits."""
    memory: Memory
    """Memory at that length; if none fits, memory at the shortest length that was tried."""
    next_len: int
    """The next length that was tried, in tokens."""
    beyond: Memory | str
    """Memory at `next_len`, or the reason why the configuration refuses that length."""


@dataclass(frozen=True, eq=False)
class Planned:
    """Plans the memory of a configuration for any sequence length."""

    config: JobConfig
    world_size: int
    on_cpu: bool

    @cached_property
    def unit(self) -> int:
        """Granularity of the lengths that are tried, in tokens."""
        return math.lcm(GRAIN, self.config.parallel.tensor.size)

    def case(self, seq_len: int) -> PlanCase:
        """Return the case with sequences of `seq_len` tokens.

        Raises ConfigError if the configuration does not allow that length.
        """
        try:
            longer = replace(self.config, data=replace(self.config.data, seq_len=seq_len))
            check_models(longer)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return PlanCase.of(longer, self.world_size, on_cpu=self.on_cpu)

    def peak(self, seq_len: int) -> Memory:
        """Return the peak memory with sequences of `seq_len` tokens."""
        return peak(self.case(seq_len))

    def growth(self, seq_len: int) -> Growth:
        """Return lines through two points: the peak at `seq_len`, and its moment at half of it.

        `seq_len` is raised to two units if it is less. Raises ConfigError if a length is refused.
        """
        longer = max(2 * self.unit, seq_len)
        shorter = longer // 2 // self.unit * self.unit
        try:
            case = self.case(longer)
        except ConfigError as error:
            raise ConfigError(
                f"sequences of {longer:,} tokens, planned to see how memory grows: {error}"
            ) from error
        rank, most = max(
            ((rank, m) for rank in busiest(case) for m in moments(case, rank)),
            key=lambda pair: pair[1].total,
        )
        few = self.case(shorter)
        below = next(m for m in moments(few, rank) if m.moment == most.moment)
        # Both points of a line have to be the same moment of the step; the peak at half the length
        # may be at another moment.
        tokens, less = (c.rows * c.tokens_between for c in (case, few))
        names = (*most.by_owner(), "host")
        slopes: Any = {n: (getattr(most, n) - getattr(below, n)) / (tokens - less) for n in names}
        fixed: Any = {n: getattr(most, n) - slopes[n] * tokens for n in names}
        return Growth(Memory(**fixed), Memory(**slopes), longer, tokens, most)

    def longest(self, budget: Budget) -> Longest:
        """Return the longest sequence that fits into `budget`.

        Raises ConfigError if the shortest length is refused.
        """
        low = self._try(1, budget)
        if isinstance(low.found, str):
            raise ConfigError(f"sequences of {self.unit:,} tokens, the shortest tried: {low.found}")
        if low.excess > 0:
            return Longest(0, low.found, self.unit, low.found)
        # Extrapolate until a length does not fit; `low` and `high` then bracket the longest.
        high = self._try(max(2, self.config.data.seq_len // self.unit), budget)
        while high.excess <= 0:
            low, high = high, self._try(_beyond(low, high), budget)
        # Interpolate; halve instead whenever interpolation did not halve the bracket.
        halve = False
        while (gap := high.units - low.units) > 1:
            middle = self._try(_between(low, high, halve=halve), budget)
            low, high = (low, middle) if middle.excess > 0 else (middle, high)
            halve = high.units - low.units > gap / 2
        assert isinstance(low.found, Memory)
        return Longest(low.units * self.unit, low.found, high.units * self.unit, high.found)

    def _try(self, units: int, budget: Budget) -> _Tried:
        """Plan a length of `units`; a refused length counts as too long."""
        try:
            memory = self.peak(units * self.unit)
        except ConfigError as error:
            return _Tried(units, math.inf, str(error))
        return _Tried(units, budget.excess(memory), memory)


class _Tried(NamedTuple):
    """A length that was tried, and its memory."""

    units: int
    excess: float
    """Bytes over the budget; infinite if the length is refused."""
    found: Memory | str


def _beyond(low: _Tried, high: _Tried) -> int:
    """Return the length at which the line through two fitting lengths exceeds the budget."""
    slope = (high.excess - low.excess) / (high.units - low.units)
    more = int(-high.excess / slope) + 1 if slope > 0 else high.units
    # At least 1/64 more, so that few steps are needed where the line is too steep; at most 32 times
    # as much, so that a line that is too flat does not lead to an absurd length.
    return high.units + max(1, high.units // 64, min(more, 31 * high.units))


def _between(low: _Tried, high: _Tried, *, halve: bool) -> int:
    """Return a length between `low`, which fits, and `high`, which does not.

    It is the length at which the line through both reaches the budget, or, if `halve`, the middle.
    It is never `low` or `high` itself, so the search ends.
    """
    share = 0.5
    if not halve and math.isfinite(high.excess):
        share = low.excess / (low.excess - high.excess)
    guess = low.units + int(share * (high.units - low.units))
    return min(max(guess, low.units + 1), high.units - 1)


# -- the memory ladder: options that save memory, from cheap to costly ------------------------


Keys = Mapping[str, Any]
"""Values of configuration keys, by `section.key`."""


class MemoryOption(NamedTuple):
    """A named set of keys that saves memory."""

    name: str
    keys: Keys
    of_states: bool = False
    """True if it saves memory that does not grow with the sequence length."""


WITHOUT: Keys = {
    "model.checkpoint": 0.0,
    "model.checkpoint_keeps_attention": False,
    "model.checkpoint_distribute_activations": False,
    "model.checkpoint_norm_outputs": False,
    "model.checkpoint_mlp_activation": False,
    "model.loss_chunk_tokens": 0,
    "model.mlp_tile_tokens": 0,
    "model.checkpoint_offload": False,
    "model.checkpoint_segment": 0,
    "optimizer.offload_states": False,
    "optimizer.moment_dtype": "float32",
}
"""Keys of the first step, without any option."""
RECOMPUTE: Keys = {
    "model.checkpoint": 1.0,
    "model.checkpoint_keeps_attention": False,
    "model.checkpoint_norm_outputs": False,
    "model.checkpoint_mlp_activation": False,
}
OPTIONS = (
    MemoryOption("loss in chunks of tokens", {"model.loss_chunk_tokens": 4096}),
    MemoryOption(
        "recompute norms and activations",
        {"model.checkpoint_norm_outputs": True, "model.checkpoint_mlp_activation": True},
    ),
    MemoryOption(
        "recompute all but attention", {**RECOMPUTE, "model.checkpoint_keeps_attention": True}
    ),
    MemoryOption("recompute all", RECOMPUTE),
    MemoryOption("MLP in tiles of tokens", {"model.mlp_tile_tokens": 8192}),
    MemoryOption("inputs of blocks on the host", {"model.checkpoint_offload": True}),
    MemoryOption("inputs of every 4th block", {"model.checkpoint_segment": 4}),
    MemoryOption("moments in bfloat16", {"optimizer.moment_dtype": "bfloat16"}, of_states=True),
    MemoryOption("states on the host", {"optimizer.offload_states": True}, of_states=True),
)


class LadderStep(NamedTuple):
    """The longest sequence that fits with one memory option and the earlier options taken."""

    option: str
    keys: Keys
    """Configuration keys of the option and of the earlier options that were taken."""
    longest: Longest
    growth: Growth
    """How memory grows near the length `longest`."""
    taken: bool
    """True if the longest sequence that fits is no shorter with the option than without it.

    Later steps of the ladder then include the option."""


def climb(planned: Planned, budget: Budget, *, progress: Show = silent) -> list[LadderStep]:
    """Return the longest sequence that fits with each memory option, tried one after another.

    An option is tried together with the earlier options that did not make the longest sequence
    shorter. Options that this model or layout refuses are left out.
    """
    keys: Keys = WITHOUT
    steps: list[LadderStep] = []
    reached = 0
    options = [MemoryOption("no option", {}), *_ordered(planned, budget)]
    for option in progress(options, "longest sequences with each step of the memory ladder"):
        more = {**keys, **option.keys}
        try:
            there = replace(planned, config=with_keys(planned.config, more))
        except ValueError:
            continue
        longest = there.longest(budget)
        reaches = longest.seq_len or -budget.excess(longest.memory)
        # Where nothing fits at all, compare by how many bytes are missing.
        taken = not steps or reaches >= reached
        growth = there.growth(longest.seq_len or planned.config.data.seq_len)
        steps.append(LadderStep(option.name, more, longest, growth, taken))
        if taken:
            keys, reached = more, reaches
    return steps


def with_keys(config: JobConfig, keys: Keys) -> JobConfig:
    """Return `config` with these keys changed.  Raises ValueError if it does not allow them."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in keys.items():
        section, key = path.split(".")
        sections.setdefault(section, {})[key] = value
    changed = {name: replace(getattr(config, name), **of) for name, of in sections.items()}
    return replace(config, **changed)


def changes(config: JobConfig, keys: Keys) -> list[str]:
    """Return the command-line words that change `config` to these keys."""
    words = []
    for path, value in keys.items():
        section, key = path.split(".")
        if getattr(getattr(config, section), key) != value:
            words.append(f"--{path} {str(value).lower()}")
    return words


def _ordered(planned: Planned, budget: Budget) -> Sequence[MemoryOption]:
    """Return the options from cheap to costly.

    If the states alone (weights, gradients, optimizer) exceed the device, options that save memory
    of states come first.
    """
    states = replace(planned, config=with_keys(planned.config, WITHOUT)).peak(planned.unit).states
    if states < budget.device:
        return OPTIONS
    return sorted(OPTIONS, key=lambda option: not option.of_states)
