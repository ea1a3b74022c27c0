"""Replays a plan without torch, and proves that it is right or says where it is not."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from functools import lru_cache
from typing import NamedTuple, NoReturn

from isp.core.mesh.phase import Phase
from isp.core.weights.prefetch_plan import PlanEntry, PrefetchPlan, WeightOp, WeightOpKind
from isp.core.weights.uses import Action, Chunks, Site, Span, step_spans

__all__ = ["Lookahead", "Occupancy", "Simulation", "simulate"]


class Occupancy(NamedTuple):
    """Weights gathered or under way during a use."""

    blocks: int
    """A weight counts for the block that runs if that reads it, else for the next that will."""
    modules: int
    """Weights, without those held from one read to another in the same span; those that are read
    together count as one."""
    weights: int


class Lookahead(NamedTuple):
    """The distance of a weight's request ahead of its first read."""

    weight: str
    site: Site
    """Place of the wait."""
    uses: int
    """Uses from the gather to the wait; 0 if nothing can hide it."""


class Simulation(NamedTuple):
    """The result of a correct plan."""

    peak: Occupancy
    """The largest values of all entries."""
    occupancy: tuple[Occupancy, ...]
    """One for each entry."""
    gathers: Counter[tuple[str, Phase]]
    """Gathers of each weight, by the phase of the first read that each serves."""
    lookaheads: tuple[Lookahead, ...]
    """One for each gather."""


def simulate(plan: PrefetchPlan, chunks: Chunks, actions: tuple[Action, ...]) -> Simulation:
    """Replay `plan` against the trace of `actions`.

    Raises AssertionError, naming the place, for an entry that differs from the trace, a read of a
    weight that is not ready, a gather of a weight gathered or in flight, a wait without a gather or
    out of order, a free of a weight not ready or never read, and a weight left at the end.
    """
    return _Replay(plan, step_spans(chunks, actions), _groups(chunks)).run()


@lru_cache(maxsize=1024)
def _extent(reads: tuple[str | None, ...], until: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Return the first and last offset in a span at which each weight is needed."""
    extent: dict[str, tuple[int, int]] = {}
    for offset, weight in enumerate(reads):
        if weight is not None:
            extent[weight] = (extent.get(weight, (offset,))[0], until[offset])
    return extent


def _groups(chunks: Chunks) -> dict[str, tuple[int, int, int]]:
    """Return, for each weight, the first place of the group that is read together with it."""
    found: dict[str, tuple[int, int, int]] = {}
    for c, chunk in enumerate(chunks):
        for b, block in enumerate(chunk):
            for use, group in zip(block.uses, block.groups, strict=True):
                if use.weight is not None:
                    found.setdefault(use.weight, (c, b, group))
    return found


class _Replay:
    """The state of a replay: weights in flight, in order of launch, ready, and unread."""

    def __init__(
        self, plan: PrefetchPlan, spans: list[Span], groups: dict[str, tuple[int, int, int]]
    ) -> None:
        self.plan, self.spans, self.groups = plan, spans, groups
        self.step = -1
        self.place: str | PlanEntry = "start"
        self.flying: deque[str] = deque()
        self.ready: set[str] = set()
        self.unread: set[str] = set()
        self.launched: dict[str, int] = {}
        self.gathers: Counter[tuple[str, Phase]] = Counter()
        self.lookaheads: list[Lookahead] = []
        self.readers: defaultdict[str, list[int]] = defaultdict(list)
        for number, span in enumerate(spans):
            for weight in _extent(span.reads, span.until):
                self.readers[weight].append(number)

    def run(self) -> Simulation:
        for op in self.plan.start:
            self.do(op, None)
        occupancy = [self.occupancy(-1, 0)]
        expected = [(n, offset) for n, s in enumerate(self.spans) for offset in range(len(s.sites))]
        for self.step, (number, offset) in enumerate(expected):
            if self.step >= len(self.plan.entries):
                self.fail(f"the plan has {len(self.plan.entries)} of {len(expected)} entries")
            occupancy.append(self.unshard(self.plan.entries[self.step], number, offset))
        self.place = "end"
        if len(self.plan.entries) > len(expected):
            self.fail(f"the plan has {len(self.plan.entries)} entries, the trace {len(expected)}")
        if self.launched:
            self.fail(f"left behind: {', '.join(self.launched)}")
        peak = Occupancy(*map(max, zip(*occupancy, strict=True)))
        return Simulation(peak, tuple(occupancy[1:]), self.gathers, tuple(self.lookaheads))

    def unshard(self, step: PlanEntry, number: int, offset: int) -> Occupancy:
        span = self.spans[number]
        site, weight = span.sites[offset], span.reads[offset]
        self.place = step
        if (site, span.action.micro_batch) != (step.site, step.micro_batch):
            self.fail(f"the trace has micro-batch {span.action.micro_batch}, {site} here")
        for op in step.before:
            self.do(op, site)
        occupancy = self.occupancy(number, offset)
        for needed, (first, last) in _extent(span.reads, span.until).items():
            if first <= offset <= last and needed not in self.ready:
                self.fail(f"reads {needed}, which is not ready")
        if weight is not None and weight in self.unread:
            self.unread.remove(weight)
            self.gathers[weight, site.phase] += 1
        for op in step.after:
            self.do(op, site)
        return occupancy

    def do(self, op: WeightOp, site: Site | None) -> None:
        weight = op.weight
        if op.kind is WeightOpKind.GATHER:
            if weight in self.launched:
                self.fail(f"gathers {weight}, which is there or under way")
            self.launched[weight] = self.step
            self.flying.append(weight)
        elif op.kind is WeightOpKind.WAIT:
            if site is None or weight not in self.flying:
                self.fail(f"waits for {weight}, which is not under way")
            if self.flying.popleft() != weight:
                self.fail(f"waits for {weight} out of turn")
            self.ready.add(weight)
            self.unread.add(weight)
            self.lookaheads.append(Lookahead(weight, site, self.step - self.launched[weight]))
        else:
            if weight not in self.ready:
                self.fail(f"frees {weight}, which is not ready")
            if weight in self.unread:
                self.fail(f"frees {weight}, which was never read")
            self.ready.remove(weight)
            del self.launched[weight]

    def occupancy(self, number: int, offset: int) -> Occupancy:
        """Return the occupancy at a use, or at the start if `number` is -1."""
        span = self.spans[number] if number >= 0 else None
        extent = {} if span is None else _extent(span.reads, span.until)
        blocks: set[object] = set()
        modules: set[object] = set()
        for weight in self.launched:
            if weight in extent:
                assert span is not None
                blocks.add(span.unit)
                first, last = extent[weight]
                if first < offset < last and span.reads[offset] != weight:
                    continue
            else:
                blocks.add(self.next_block(weight, number))
            modules.add(self.groups.get(weight, weight))
        return Occupancy(len(blocks), len(modules), len(self.launched))

    def next_block(self, weight: str, number: int) -> object:
        """Return the next unit that reads a weight after this span, or the weight if none does."""
        readers = self.readers[weight]
        following = bisect_right(readers, number)
        return self.spans[readers[following]].unit if following < len(readers) else weight

    def fail(self, message: str) -> NoReturn:
        place = self.place
        if isinstance(place, PlanEntry):
            place = f"entry {self.step} (micro-batch {place.micro_batch}, {place.site})"
        raise AssertionError(f"{place}: {message}")
