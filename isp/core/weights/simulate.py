"""Replays a prefetch plan without torch, and raises at the first entry that is wrong."""

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
    """Number of weights that are gathered or in flight during a use.

    They are counted as blocks, as groups of weights that are read together, and one by one.
    """

    blocks: int
    """Number of blocks that these weights belong to: a weight belongs to the running block if this
    block reads it, else to the next block that will read it."""
    modules: int
    """Number of weights, but weights that are read together count as one, and a weight that the
    span has read and reads again later does not count at the uses in between."""
    weights: int
    """Number of all weights that are gathered or in flight, counted one by one."""


class Lookahead(NamedTuple):
    """The distance between the gather of a weight and the wait for it."""

    weight: str
    site: Site
    """The place where the weight is waited for."""
    uses: int
    """Number of uses from the gather to the wait; 0: no compute hides the gather."""


class Simulation(NamedTuple):
    """Numbers of weights that a prefetch plan gathers, and that exist at a time.

    The plan has passed all checks of `simulate`.
    """

    peak: Occupancy
    """The largest value of each field of `occupancy`, over all entries of the plan."""
    occupancy: tuple[Occupancy, ...]
    """How many weights are gathered or in flight at each entry of the plan."""
    gathers: Counter[tuple[str, Phase]]
    """Number of gathers, by weight and by the phase of the first read after the gather."""
    lookaheads: tuple[Lookahead, ...]
    """The lookahead of each gather, in the order of waits."""


def simulate(plan: PrefetchPlan, chunks: Chunks, actions: tuple[Action, ...]) -> Simulation:
    """Replay `plan`, compare it with the uses that `actions` pass, and return its counts.

    Raises AssertionError, which names the place, for: an entry that differs from the uses; a read
    of a weight that is not ready; a gather of a weight that is gathered or in flight; a wait
    without a gather or out of order; a free of a weight that is not ready or was never read; a
    weight that is not freed at the end.
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
    """Return, for each weight, the first place (chunk, block, use) of the weights read with it."""
    found: dict[str, tuple[int, int, int]] = {}
    for c, chunk in enumerate(chunks):
        for b, block in enumerate(chunk):
            for use, group in zip(block.uses, block.groups, strict=True):
                if use.weight is not None:
                    found.setdefault(use.weight, (c, b, group))
    return found


class _Replay:
    """A replay of a plan, with the state of each weight: in flight, ready, not read yet."""

    def __init__(
        self, plan: PrefetchPlan, spans: list[Span], groups: dict[str, tuple[int, int, int]]
    ) -> None:
        self.plan, self.spans, self.groups = plan, spans, groups
        self.step = -1
        self.place: str | PlanEntry = "start"
        # Weights whose gather is in flight, in the order of launches.
        self.flying: deque[str] = deque()
        # Weights whose gather was waited for, until they are freed.
        self.ready: set[str] = set()
        # Weights in `ready` that no use has read yet.
        self.unread: set[str] = set()
        # For each weight in flight or ready, the index of the entry that launched its gather.
        self.launched: dict[str, int] = {}
        self.gathers: Counter[tuple[str, Phase]] = Counter()
        self.lookaheads: list[Lookahead] = []
        self.readers: defaultdict[str, list[int]] = defaultdict(list)
        for number, span in enumerate(spans):
            for weight in _extent(span.reads, span.until):
                self.readers[weight].append(number)

    def run(self) -> Simulation:
        """Do the operations of all entries of the plan, and return what was counted."""
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
        """Replay one entry, the use at `offset` of span `number`; return the occupancy there."""
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
        """Replay one operation; `site` is None before the first entry."""
        weight = op.weight
        if op.kind is WeightOpKind.GATHER:
            if weight in self.launched:
                self.fail(f"gathers {weight}, which is there or in flight")
            self.launched[weight] = self.step
            self.flying.append(weight)
        elif op.kind is WeightOpKind.WAIT:
            if site is None or weight not in self.flying:
                self.fail(f"waits for {weight}, which is not in flight")
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
                # Between two reads in the same span, a weight is only kept for the second read. It
                # is not counted, as it is not a module that is gathered ahead.
                if first < offset < last and span.reads[offset] != weight:
                    continue
            else:
                blocks.add(self.next_block(weight, number))
            modules.add(self.groups.get(weight, weight))
        return Occupancy(len(blocks), len(modules), len(self.launched))

    def next_block(self, weight: str, number: int) -> object:
        """Return the next unit after span `number` that reads `weight`.

        If none does, return `weight`, which then counts as a block of its own.
        """
        readers = self.readers[weight]
        following = bisect_right(readers, number)
        return self.spans[readers[following]].unit if following < len(readers) else weight

    def fail(self, message: str) -> NoReturn:
        """Raise AssertionError with the current place and `message`."""
        place = self.place
        if isinstance(place, PlanEntry):
            place = f"entry {self.step} (micro-batch {place.micro_batch}, {place.site})"
        raise AssertionError(f"{place}: {message}")
