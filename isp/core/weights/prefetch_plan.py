"""The prefetch plan as data: which sharded weights to gather, wait for and free at each use.

`plan` is a pure function of the model's declaration and the order of work; a communicator follows
its result with a `PlanCursor`. `simulate` checks a plan, `grid` prints it.

A weight is gathered once for all its reads in a span; gathered weights belong to at most two
blocks (or modules) at a time; gathers start in the order of reads. See [Note: Lifetimes],
[Note: Budget] and [Note: Launches] in docs/design/notes/weights.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, chain, groupby, islice, repeat
from typing import NamedTuple

from isp.core.mesh.config import LaunchPoint, OverlapUnit, Prefetch
from isp.core.mesh.phase import Phase
from isp.core.weights.uses import Action, Chunks, Site, Span, step_spans

__all__ = ["PlanCursor", "PlanEntry", "PrefetchPlan", "WeightOp", "WeightOpKind", "plan"]


class WeightOpKind(StrEnum):
    """Operation of a prefetch plan on a weight: gather it, wait for it, or free it."""

    GATHER = "gather"
    WAIT = "wait"
    FREE = "free"


class WeightOp(NamedTuple):
    """A gather, wait or free of one weight in a prefetch plan."""

    kind: WeightOpKind
    weight: str
    bias: str | None = None
    """Name of the bias that is gathered with the weight: the bias of the first layer that has one
    and reads the weight. None if no forward reads a bias before the free."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the weight and of its bias, if it has one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class PlanEntry(NamedTuple):
    """A use in one phase of one micro-batch, with the operations before and after it."""

    site: Site
    micro_batch: int
    before: tuple[WeightOp, ...]
    """A gather and wait for the use's own weight, then gathers for later uses."""
    after: tuple[WeightOp, ...]
    """Frees of weights that were gathered for this use or earlier ones."""


class PrefetchPlan(NamedTuple):
    """All weight operations of one training step."""

    start: tuple[WeightOp, ...]
    """Gathers to launch as soon as the optimizer has published the weights."""
    entries: tuple[PlanEntry, ...]
    """All uses of the step, in the order in which they run."""


@lru_cache(maxsize=8)
def plan(chunks: Chunks, actions: tuple[Action, ...], prefetch: Prefetch) -> PrefetchPlan:
    """Return the plan of a step in which this pipeline stage runs `actions` on its model `chunks`.

    A block without the launch point of `prefetch` launches the next block's gathers before its
    first use. With and without overlap, each weight is gathered equally often.
    """
    spans = step_spans(chunks, actions)
    reads, units = _reads(spans, chunks)
    lifetimes = _lifetimes(reads, units, prefetch)
    if prefetch.overlap and prefetch.unit is OverlapUnit.LAYER:
        _launch_per_layer(reads, units, lifetimes, chunks, prefetch.launch)
    elif prefetch.overlap:
        _launch_per_module(reads, units, lifetimes)
    return _place(spans, lifetimes.values())


class PlanCursor:
    """A position in a prefetch plan; it moves forward with each use that a layer reports."""

    def __init__(
        self, entries: Sequence[PlanEntry], expected: Sequence[tuple[Hashable, Phase]]
    ) -> None:
        """Start at the first entry; `expected` are the arguments of `arrive` for each entry."""
        self._entries, self._expected = entries, expected
        self.position = 0
        """Index of the next entry; uses have reached or skipped all entries before it."""

    def arrive(self, key: Hashable, phase: Phase) -> int | None:
        """Move past the entry of a use and return its index; None if no entry is found for it.

        Entries between the old position and this index are skipped. Only the rest of the current
        action and the first block of the next action are searched: further ahead, an entry with
        this key belongs to a later use of the same layer, and the reported use is not planned.
        """
        entries, expected, start = self._entries, self._expected, self.position
        wanted = key, phase
        # The usual case, on every use of every layer: nothing was skipped.
        if start < len(expected) and expected[start] == wanted:
            self.position = start + 1
            return start
        current = _action(entries[start - 1]) if start else None
        action_ahead: tuple[int, int, bool] | None = None
        for index in range(start, len(entries)):
            entry = entries[index]
            if _action(entry) != current:
                if action_ahead is None:
                    action_ahead, first_block = _action(entry), entry.site.block
                if _action(entry) != action_ahead or entry.site.block != first_block:
                    return None
            if expected[index] == wanted:
                self.position = index + 1
                return index
        return None


def _action(entry: PlanEntry) -> tuple[int, int, bool]:
    """Return a key of the entry's action: micro-batch, chunk, and True for a forward."""
    return entry.micro_batch, entry.site.chunk, entry.site.phase is Phase.FORWARD


_START = -1  # the position before the first entry


class _Read(NamedTuple):
    """A read of a weight in the trace."""

    entry: int
    weight: str
    bias: str | None
    """The bias that is read with the weight; see `WeightOp.bias`."""
    together: int
    """Index of the read up to which the weight stays gathered, because it is read together with
    the weights of the reads in between."""


class _Unit(NamedTuple):
    """A span that reads weights: the reads with indices `begin` to `end`, without `end`."""

    span: Span
    first_entry: int
    begin: int
    end: int
    extent: dict[str, tuple[int, int]]
    """For each weight, the indices of the first and last read in the span for which it is gathered;
    in the order of first reads."""


@dataclass(slots=True)
class _Lifetime:
    """The time from a gather of a weight to its free, as indices of entries.

    See [Note: Lifetimes] in docs/design/notes/weights.md.
    """

    weight: str
    first: int
    """Entry of the first read, where the weight is waited for."""
    last: int
    """Entry of the last read, after which the weight is freed."""
    launched: int | None = None
    """Entry at which the gather is launched; None: at `first`, without overlap."""
    bias: str | None = None
    """The bias gathered with the weight; None: no forward of this time reads one."""


def _reads(spans: Iterable[Span], chunks: Chunks) -> tuple[list[_Read], list[_Unit]]:
    """Return all reads of weights in a step, and the spans that have any."""
    biases: dict[str, str] = {}
    for use in (use for chunk in chunks for block in chunk for use in block.uses):
        if use.weight is not None and use.bias is not None:
            biases.setdefault(use.weight, use.bias)
    reads: list[_Read] = []
    units: list[_Unit] = []
    entry = 0
    for span in spans:
        begin = len(reads)
        extent: dict[str, tuple[int, int]] = {}
        # `counted[i]` is the index in `reads` of the first read at offset i of the span or later.
        counted = list(accumulate((w is not None for w in span.reads), initial=begin))
        for offset, weight in enumerate(span.reads):
            if weight is not None:
                together = counted[span.until[offset] + 1] - 1
                extent[weight] = (extent.get(weight, (len(reads),))[0], together)
                site, bias = span.sites[offset], biases.get(weight)
                use = chunks[site.chunk][site.block].uses[site.use]
                # Forwards and recomputes read a bias, backward does not. Exception: if a recompute
                # leaves the use out, backward computes its forward and reads the bias.
                forward = site.phase is not Phase.BACKWARD or not use.in_recompute
                bias = bias if forward and use.bias == bias else None
                reads.append(_Read(entry + offset, weight, bias, together))
        if extent:
            units.append(_Unit(span, entry, begin, len(reads), extent))
        entry += len(span.sites)
    return reads, units


def _lifetimes(reads: list[_Read], units: list[_Unit], prefetch: Prefetch) -> dict[int, _Lifetime]:
    """Return all lifetimes in the order of their first reads, as {index of first read: lifetime}.

    See [Note: Lifetimes] in docs/design/notes/weights.md.
    """
    per_layer, freed = prefetch.unit is OverlapUnit.LAYER, prefetch.reshard_after_forward
    blocks, modules = (u.span.unit for u in units), (read.weight for read in reads)
    runs = _runs(blocks if per_layer else modules)
    lifetimes: dict[int, _Lifetime] = {}
    # For each weight: its latest lifetime, and the index in `runs` after the last read.
    latest: dict[str, tuple[_Lifetime, int]] = {}
    for number, u in enumerate(units):
        for weight, (first, last) in u.extent.items():
            # Indices into `runs`, which has an entry for each unit if weights are prefetched per
            # layer, and for each read if they are prefetched per module.
            here, after = (number, number + 1) if per_layer else (first, last + 1)
            lifetime, since = latest.get(weight, (None, 0))
            # If one other block (or module) at most runs between two reads of a weight, the weight
            # stays gathered. If several run, it is freed and gathered again.
            several = since < here and runs[since] != runs[here - 1]
            if lifetime is None or (freed and several):
                lifetime = lifetimes[first] = _Lifetime(
                    weight, reads[first].entry, reads[last].entry
                )
            lifetime.last = reads[last].entry
            own = (read.bias for read in reads[first : last + 1] if read.weight == weight)
            lifetime.bias = next(filter(None, own), lifetime.bias)
            latest[weight] = lifetime, after
    return lifetimes


def _runs(keys: Iterable[object]) -> list[int]:
    """Return, for each key, the index of its group of equal neighbors: a a b a -> 0 0 1 2."""
    return [number for number, (_, run) in enumerate(groupby(keys)) for _ in run]


def _launch_per_layer(
    reads: list[_Read],
    units: list[_Unit],
    lifetimes: dict[int, _Lifetime],
    chunks: Chunks,
    launch: LaunchPoint,
) -> None:
    """Set the entry at which each gather is launched, for prefetch per layer [Note: Launches]."""
    # For each unit, the lifetimes that begin in it.
    fresh = [
        [lifetimes[first] for first, _ in u.extent.values() if first in lifetimes] for u in units
    ]
    for lifetime in chain(*fresh[:2]):
        lifetime.launched = _START
    # The gathers of the first two units are launched at the start. Each unit from the second on
    # launches the gathers of the unit after it.
    for u, ahead in zip(units[1:], fresh[2:], strict=False):
        if u.span.sites[0].phase is Phase.BACKWARD:
            entries = [read.entry for read in reads[u.begin : u.end]]
        else:
            entries = [u.first_entry + _launch_offset(u.span, chunks, launch)]
        # More lifetimes than entries: the remaining gathers are launched at the last entry.
        for lifetime, entry in zip(ahead, chain(entries, repeat(entries[-1])), strict=False):
            lifetime.launched = entry


def _launch_offset(span: Span, chunks: Chunks, launch: LaunchPoint) -> int:
    """Return the offset in `span` at which the gathers of the next span are launched.

    It is that of the launch point, in the forward or recompute of the span. If the span leaves the
    launch point out, it is that of the next use in forward order.
    """
    uses = chunks[span.action.chunk][span.block].uses
    point = next((v for v, use in enumerate(uses) if use.launch_point is launch), 0)
    going_forward = [i for i, site in enumerate(span.sites) if site.phase is not Phase.BACKWARD]
    passed = (i for i in going_forward if span.sites[i].use >= point)
    return next(passed, going_forward[-1])


def _launch_per_module(
    reads: list[_Read], units: list[_Unit], lifetimes: dict[int, _Lifetime]
) -> None:
    """Set the entry at which each gather is launched, for prefetch per module [Note: Launches]."""
    for lifetime in islice(lifetimes.values(), 2):
        lifetime.launched = _START
    others = _next_others(reads)
    for u in units:
        first_reads = iter([first for first, _ in u.extent.values()] + [u.end])
        ahead = next(first_reads)
        for r in range(u.begin, u.end):
            # Find the next read, after r, of a weight that this span has not read before.
            while ahead <= r:
                ahead = next(first_reads)
            if r == u.end - 1:
                ahead = others[r]
            elif ahead == u.end < len(reads) and reads[ahead].weight in u.extent:
                # The weight that the next span reads first is gathered now, and may stay so. The
                # last read of this span decides about it.
                continue
            together = range(ahead, reads[ahead].together + 1) if ahead < len(reads) else ()
            for launched in filter(None, map(lifetimes.get, together)):
                if launched.launched is None:
                    launched.launched = reads[r].entry


def _next_others(reads: list[_Read]) -> list[int]:
    """Return, for each read, the index of the next read of another weight, or `len(reads)`."""
    others = [len(reads)] * len(reads)
    for r in reversed(range(len(reads) - 1)):
        others[r] = others[r + 1] if reads[r].weight == reads[r + 1].weight else r + 1
    return others


def _place(spans: Iterable[Span], lifetimes: Iterable[_Lifetime]) -> PrefetchPlan:
    """Return the plan with the operations of each lifetime at its entries.

    At each entry, the wait for its own weight comes before the launches of later gathers.
    """
    before: defaultdict[int, list[WeightOp]] = defaultdict(list)
    after: defaultdict[int, list[WeightOp]] = defaultdict(list)
    for life in lifetimes:
        if life.launched is None:
            before[life.first].append(WeightOp(WeightOpKind.GATHER, life.weight, life.bias))
        before[life.first].append(WeightOp(WeightOpKind.WAIT, life.weight, life.bias))
        after[life.last].append(WeightOp(WeightOpKind.FREE, life.weight, life.bias))
    for life in lifetimes:
        if life.launched is not None:
            before[life.launched].append(WeightOp(WeightOpKind.GATHER, life.weight, life.bias))
    sites = ((site, span.action.micro_batch) for span in spans for site in span.sites)
    entries = (
        PlanEntry(site, micro_batch, tuple(before.get(i, ())), tuple(after.get(i, ())))
        for i, (site, micro_batch) in enumerate(sites)
    )
    return PrefetchPlan(tuple(before.get(_START, ())), tuple(entries))
