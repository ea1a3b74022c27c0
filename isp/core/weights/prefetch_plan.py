"""The prefetch schedule as data: which sharded weights to gather, wait for and free, and where.

`plan` is a pure function of the model's declaration and the order of work; a communicator follows
its result with a `PlanCursor`. `simulate` proves a plan right, `grid` prints it.

[Note: Lifetimes]  A weight is live from a first to a last read: one gather, one wait, one free.
  * Within a span every weight has one lifetime, from its first to its last read. So a weight
    used twice in a block is gathered once for both uses, and a recomputed block keeps its
    weights from recompute through backward.
  * The lifetimes of a weight in two spans are joined where at most one other unit lies between, for
    then the unit that waits and the one that runs are the two that the budget allows. This keeps
    the last block for its backward after the head, and the first block from its backward to the
    next micro-batch's forward after the embedding.
  * Without `reshard_after_forward` a weight has one lifetime in the whole step.
  * A unit is a block per layer, a weight per module. Weights that are read together (see `Use`)
    are there until the last of their uses ends, and per module are one unit.

[Note: Budget]  Where weights are resharded after forward, the gathered ones belong at any time to
the unit that runs and to *one* other, the next in the trace, kept or gathered ahead. No count is
kept to get this: a weight is launched only from the unit before it, and never past a unit that was
kept, because a joined lifetime is not launched anew. Per module this holds but for weights that are
read again in the same span: a recomputed block is then there as a whole, and one weight ahead of
it. Nothing is left after the last action, since the optimizer is about to change every weight.

[Note: Launches]  Gathers are launched after the wait for the site's own weight, so that they do not
share the wire with what is needed now, and in the order in which they are read: the wire is first
in, first out, so a wait for the second gather is a wait for the first as well.
  * START, as soon as the optimizer has published the weights: the first two units.
  * Per layer, going forward or recomputing: the whole next span, before the launch point.
  * Per layer, in a backward without recompute: a rolling window, one weight of the next span at
    each use, so that no more than one block and one weight are there for it.
  * Per module: at each use the next weight, or those that are read together next.
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
    """The kinds of operations on weights."""

    GATHER = "gather"
    WAIT = "wait"
    FREE = "free"


class WeightOp(NamedTuple):
    """One operation on one weight."""

    kind: WeightOpKind
    weight: str
    bias: str | None = None
    """The bias gathered with the weight: of the first layer that reads the weight and has a bias,
    if a forward reads it before the free."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the weight and of its bias, if it has one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class PlanEntry(NamedTuple):
    """One site of one micro-batch, with the operations before and after the use."""

    site: Site
    micro_batch: int
    before: tuple[WeightOp, ...]
    after: tuple[WeightOp, ...]


class PrefetchPlan(NamedTuple):
    """All weight operations of one training step."""

    start: tuple[WeightOp, ...]
    """Operations to run as soon as the optimizer has published the weights."""
    entries: tuple[PlanEntry, ...]


@lru_cache(maxsize=8)
def plan(chunks: Chunks, actions: tuple[Action, ...], prefetch: Prefetch) -> PrefetchPlan:
    """Plan a step in which this pipeline stage runs `actions` on its model `chunks`.

    A block without the launch point launches the next block's gathers before its first use.
    Lifetimes do not depend on overlap, so the number of gathers is the same with and without.
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
    """A position in a plan, moved by the uses that layers report."""

    def __init__(
        self, entries: Sequence[PlanEntry], expected: Sequence[tuple[Hashable, Phase]]
    ) -> None:
        """`expected`: for each entry, the key and the phase with which its use calls `arrive`."""
        self._entries, self._expected = entries, expected
        self.position = 0
        """Index of the next entry that no use has reached."""

    def arrive(self, key: Hashable, phase: Phase) -> int | None:
        """Move past the entry of a use and return its index, or None if it is not planned.

        The entries from the position before up to this index were skipped. Searches the rest of the
        current action and the first block of the next one only. An equal key further ahead belongs
        to a later use of the same layer.
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
    return entry.micro_batch, entry.site.chunk, entry.site.phase is Phase.FORWARD


_START = -1  # the position before the first entry


class _Read(NamedTuple):
    """A read of a weight in the trace."""

    entry: int
    weight: str
    bias: str | None
    """The bias read with it, in a forward of the first layer with a bias that reads the weight."""
    together: int
    """Index of the last read until which the weight stays gathered, as weights read together do."""


class _Unit(NamedTuple):
    """A span that reads weights: `reads[begin:end]`."""

    span: Span
    first_entry: int
    begin: int
    end: int
    extent: dict[str, tuple[int, int]]
    """First and last read for which each weight is gathered, as indices into `reads`, in order of
    first read."""


@dataclass(slots=True)
class _Lifetime:
    """A lifetime [Note: Lifetimes]: entries of its first and last read, and of its launch.

    `launched` None: the gather is launched at `first`, where it is waited for.
    """

    weight: str
    first: int
    last: int
    launched: int | None = None
    bias: str | None = None


def _reads(spans: Iterable[Span], chunks: Chunks) -> tuple[list[_Read], list[_Unit]]:
    """Return all reads of the trace, and the spans that have any."""
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
        counted = list(accumulate((w is not None for w in span.reads), initial=begin))
        for offset, weight in enumerate(span.reads):
            if weight is not None:
                together = counted[span.until[offset] + 1] - 1
                extent[weight] = (extent.get(weight, (len(reads),))[0], together)
                site, bias = span.sites[offset], biases.get(weight)
                use = chunks[site.chunk][site.block].uses[site.use]
                # Backward reads no bias, unless it computes a forward itself.
                forward = site.phase is not Phase.BACKWARD or not use.in_recompute
                bias = bias if forward and use.bias == bias else None
                reads.append(_Read(entry + offset, weight, bias, together))
        if extent:
            units.append(_Unit(span, entry, begin, len(reads), extent))
        entry += len(span.sites)
    return reads, units


def _lifetimes(reads: list[_Read], units: list[_Unit], prefetch: Prefetch) -> dict[int, _Lifetime]:
    """Return the lifetimes by index of first read, in its order [Note: Lifetimes]."""
    per_layer, freed = prefetch.unit is OverlapUnit.LAYER, prefetch.reshard_after_forward
    blocks, modules = (u.span.unit for u in units), (read.weight for read in reads)
    runs = _runs(blocks if per_layer else modules)
    lifetimes: dict[int, _Lifetime] = {}
    latest: dict[str, tuple[_Lifetime, int]] = {}  # with the index in `runs` after its last read
    for number, u in enumerate(units):
        for weight, (first, last) in u.extent.items():
            here, after = (number, number + 1) if per_layer else (first, last + 1)
            lifetime, since = latest.get(weight, (None, 0))
            several = since < here and runs[since] != runs[here - 1]  # units between
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
    """Return, for each key, the number of its run of equal neighbors."""
    return [number for number, (_, run) in enumerate(groupby(keys)) for _ in run]


def _launch_per_layer(
    reads: list[_Read],
    units: list[_Unit],
    lifetimes: dict[int, _Lifetime],
    chunks: Chunks,
    launch: LaunchPoint,
) -> None:
    """Set where each lifetime is launched, per layer [Note: Launches]."""
    fresh = [
        [lifetimes[first] for first, _ in u.extent.values() if first in lifetimes] for u in units
    ]
    for lifetime in chain(*fresh[:2]):
        lifetime.launched = _START
    for u, ahead in zip(units[1:], fresh[2:], strict=False):
        if u.span.sites[0].phase is Phase.BACKWARD:
            entries = [read.entry for read in reads[u.begin : u.end]]
        else:
            entries = [u.first_entry + _launch_offset(u.span, chunks, launch)]
        # More lifetimes than entries: the rest is launched at the last one.
        for lifetime, entry in zip(ahead, chain(entries, repeat(entries[-1])), strict=False):
            lifetime.launched = entry


def _launch_offset(span: Span, chunks: Chunks, launch: LaunchPoint) -> int:
    """Return the offset of the launch point in a forward or recompute, or of its substitute."""
    uses = chunks[span.action.chunk][span.block].uses
    point = next((v for v, use in enumerate(uses) if use.launch_point is launch), 0)
    going_forward = [i for i, site in enumerate(span.sites) if site.phase is not Phase.BACKWARD]
    passed = (i for i in going_forward if span.sites[i].use >= point)
    return next(passed, going_forward[-1])


def _launch_per_module(
    reads: list[_Read], units: list[_Unit], lifetimes: dict[int, _Lifetime]
) -> None:
    """Set where each lifetime is launched, per module [Note: Launches]."""
    for lifetime in islice(lifetimes.values(), 2):
        lifetime.launched = _START
    others = _next_others(reads)
    for u in units:
        first_reads = iter([first for first, _ in u.extent.values()] + [u.end])
        ahead = next(first_reads)
        for r in range(u.begin, u.end):
            while ahead <= r:
                ahead = next(first_reads)
            if r == u.end - 1:
                ahead = others[r]
            elif ahead == u.end < len(reads) and reads[ahead].weight in u.extent:
                continue  # this span may yet read it, or keep it: only its last read knows
            together = range(ahead, reads[ahead].together + 1) if ahead < len(reads) else ()
            for launched in filter(None, map(lifetimes.get, together)):
                if launched.launched is None:
                    launched.launched = reads[r].entry


def _next_others(reads: list[_Read]) -> list[int]:
    """Return, for each read, the index of the next one of another weight, or `len(reads)`."""
    others = [len(reads)] * len(reads)
    for r in reversed(range(len(reads) - 1)):
        others[r] = others[r + 1] if reads[r].weight == reads[r + 1].weight else r + 1
    return others


def _place(spans: Iterable[Span], lifetimes: Iterable[_Lifetime]) -> PrefetchPlan:
    """Make the entries: the operations of each lifetime at its sites, waits before launches."""
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
