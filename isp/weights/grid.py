"""A plan as a table for people: one row for each site, what is alike said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import sub
from typing import NamedTuple

from isp.parallel.phase import Phase
from isp.weights.plan import Act, ActKind, Plan
from isp.weights.simulate import Simulation, simulate
from isp.weights.trace import Action, Block, Chunks, Site, Span, trace

__all__ = ["grid"]


def grid(plan: Plan, chunks: Chunks, actions: tuple[Action, ...], *, compact: bool = True) -> str:
    """The table of `plan`, and a line with its totals.

    `ahead` is the number of uses from the gather to the wait; `blocks` and `weights` are gathered
    or under way during the use. `compact` shows one of several blocks or actions that are alike.
    Raises AssertionError if the plan does not hold.
    """
    result = simulate(plan, chunks, actions)
    table = _Table(plan, chunks, result)
    rows = [_HEADER, table.start()]
    sections = _sections(table, trace(chunks, actions))
    for section in _collapsed_actions(sections) if compact else sections:
        if isinstance(section, str):
            rows.append(_Row(note=section))
            continue
        for part in _collapsed_parts(section) if compact else section:
            rows += [_Row(note=part)] if isinstance(part, str) else table.rows(part)
    return "\n".join([*_aligned(rows), "", _totals(result)])


class _Row(NamedTuple):
    """The cells of a line; a note takes the place of all of them."""

    action: str = ""
    phase: str = ""
    block: str = ""
    use: str = ""
    wait: str = ""
    ahead: str = ""
    gather: str = ""
    free: str = ""
    blocks: str = ""
    weights: str = ""
    note: str = ""


_HEADER = _Row(*_Row._fields[:-1])


class _Part(NamedTuple):
    """A span and its steps."""

    span: Span
    steps: range
    block: str
    signature: object
    """Equal for spans that do the same, each seen from its own block."""


_Section = list[_Part]
"""All of one action."""


class _Table:
    """The cells of each step, with names for what the plan knows by number."""

    def __init__(self, plan: Plan, chunks: Chunks, result: Simulation) -> None:
        self.plan, self.chunks, self.occupancy = plan, chunks, result.occupancy
        self.homes: dict[str, Site] = {}  # where each weight is declared first
        self.sizes: Counter[tuple[int, int]] = Counter()  # how many in each block
        for c, chunk in enumerate(chunks):
            for b, block in enumerate(chunk):
                for v, use in enumerate(block.uses):
                    if use.weight is not None and use.weight not in self.homes:
                        self.homes[use.weight] = Site(Phase.FORWARD, c, b, v)
                        self.sizes[c, b] += 1
        lookaheads = iter(result.lookaheads)
        self.ahead = [
            [next(lookaheads).uses for act in step.before if act.kind is ActKind.WAIT]
            for step in plan.steps
        ]

    def block(self, at: Site) -> Block:
        return self.chunks[at.chunk][at.block]

    def start(self) -> _Row:
        weights = [act.weight for act in self.plan.start]
        blocks = len({self.homes[weight][1:3] for weight in weights})
        gather = self.names(weights, None)
        return _Row("start", gather=gather, blocks=str(blocks), weights=str(len(weights)))

    def names(self, weights: Iterable[str], here: Block | None) -> str:
        """The weights, those of the block `here` by their use alone, whole blocks as such."""
        words = []
        for place, group in groupby((self.homes[w] for w in weights), key=lambda home: home[1:3]):
            homes = list(group)
            block = self.block(homes[0])
            uses = " ".join(block.uses[home.use].name for home in homes)
            if block is here:
                words.append(uses)
            elif len(homes) < self.sizes[place]:
                words.append(f"{block.name}: {uses}")
            else:
                words.append(block.name if len(homes) == 1 else f"all of {block.name}")
        return ", ".join(words)

    def rows(self, part: _Part) -> Iterator[_Row]:
        for i in part.steps:
            step, here = self.plan.steps[i], self.occupancy[i]
            block = self.block(step.site)
            acts: dict[ActKind, list[str]] = {kind: [] for kind in ActKind}
            for act in (*step.before, *step.after):
                acts[act.kind].append(act.weight)
            yield _Row(
                str(part.span.action),
                step.site.phase,
                block.name,
                block.uses[step.site.use].name,
                self.names(acts[ActKind.WAIT], block),
                " ".join(map(str, self.ahead[i])),
                self.names(acts[ActKind.GATHER], block),
                self.names(acts[ActKind.FREE], block),
                str(here.blocks),
                str(here.weights),
            )

    def part(self, span: Span, steps: range) -> _Part:
        block = self.chunks[span.action.chunk][span.block]
        signature = tuple(
            (
                self.plan.steps[i].site.phase,
                block.uses[self.plan.steps[i].site.use].name,
                tuple(self.relative(act, span) for act in self.plan.steps[i].before),
                tuple(self.relative(act, span) for act in self.plan.steps[i].after),
                tuple(self.ahead[i]),
                # from the span's begin: where weights stay, each block has one more there
                tuple(map(sub, self.occupancy[i], self.occupancy[steps.start])),
            )
            for i in steps
        )
        return _Part(span, steps, block.name, signature)

    def relative(self, act: Act, span: Span) -> tuple[ActKind, int, int, str]:
        """The act and its weight, by the distance of the weight's block from the span's."""
        home = self.homes[act.weight]
        name = self.block(home).uses[home.use].name
        return act.kind, home.chunk - span.action.chunk, home.block - span.block, name


def _sections(table: _Table, spans: Iterable[Span]) -> list[_Section]:
    sections, begin = [], 0
    for _, group in groupby(spans, key=lambda span: span.action):
        section = []
        for span in group:
            steps = range(begin, begin + len(span.sites))
            section.append(table.part(span, steps))
            begin = steps.stop
        sections.append(section)
    return sections


def _collapsed_parts(parts: Iterable[_Part]) -> Iterator[_Part | str]:
    """The parts, with one shown of three or more that are alike."""
    for _, group in groupby(parts, key=lambda part: part.signature):
        first, *alike = group
        yield first
        if len(alike) > 1:
            yield f"... {alike[0].block} to {alike[-1].block} alike"
        else:
            yield from alike


def _collapsed_actions(sections: list[_Section]) -> Iterator[_Section | str]:
    """The sections, with a pattern of actions that repeats shown once."""
    numbers: dict[object, int] = {}  # of what actions do, on which chunk
    keys = []
    for section in sections:
        (kind, _, chunk), does = section[0].span.action, tuple(part.signature for part in section)
        keys.append(numbers.setdefault((kind, chunk, does), len(numbers)))
    at = 0
    while at < len(keys):
        period, repeats = _pattern(keys[at:])
        yield from sections[at : at + period]
        alike = sections[at + period : at + period * repeats]
        if alike:
            names = [str(section[0].span.action) for section in alike]
            if len(names) > 16:
                names[8:-4] = ["..."]
            yield f"... {' '.join(names)} alike"
        at += period * repeats


def _pattern(keys: list[int]) -> tuple[int, int]:
    """The shortest pattern with which `keys` begins more than once, and how often; else (1, 1)."""
    for period in range(1, len(keys) // 2 + 1):
        repeats = 1
        while keys[repeats * period : (repeats + 1) * period] == keys[:period]:
            repeats += 1
        if repeats > 1:
            return period, repeats
    return 1, 1


def _aligned(rows: list[_Row]) -> Iterator[str]:
    """The rows in columns; what does not change from the row above is left out."""
    columns = range(len(_HEADER) - 1)
    widths = [max(len(row[i]) for row in rows) for i in columns]
    numeric = {"ahead", "blocks", "weights"}
    above = _Row()
    for row in rows:
        if row.note:
            yield f"{'':{widths[0]}}  {row.note}"
            above = _Row()
            continue
        cells = ["" if i < 3 and row[: i + 1] == above[: i + 1] else row[i] for i in columns]
        above = row
        yield "  ".join(
            f"{cell:>{width}}" if name in numeric else f"{cell:{width}}"
            for cell, width, name in zip(cells, widths, _HEADER, strict=False)
        ).rstrip()


def _totals(result: Simulation) -> str:
    gathers = dict.fromkeys(Phase, 0)
    for (_, phase), count in result.gathers.items():
        gathers[phase] += count
    parts = ", ".join(f"{count} for {phase}" for phase, count in gathers.items() if count)
    exposed = sum(ahead.uses == 0 for ahead in result.lookaheads)
    return (
        f"{sum(gathers.values())} gathers: {parts or 'none'}; {exposed} at the moment of use\n"
        f"at most {result.peak.blocks} blocks and {result.peak.weights} weights gathered"
    )
