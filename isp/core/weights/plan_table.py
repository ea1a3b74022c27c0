"""A plan as a table for people: one line for each site, what is alike said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import NamedTuple

from isp.core.mesh.phase import Phase
from isp.core.weights.prefetch_plan import PlanEntry, PrefetchPlan, WeightOp, WeightOpKind
from isp.core.weights.simulate import Occupancy, Simulation, simulate
from isp.core.weights.uses import Action, Block, Chunks, Site, step_spans

__all__ = ["grid"]

_HEADER = (
    *("action", "phase", "block", "use", "wait"),
    *("ahead", "gather", "free", "blocks", "weights"),
)
_NUMERIC = {"ahead", "blocks", "weights"}


def grid(
    plan: PrefetchPlan, chunks: Chunks, actions: tuple[Action, ...], *, compact: bool = True
) -> str:
    """The table of `plan`, and a line with its totals.

    `ahead` is the number of uses from the gather to the wait; `blocks` and `weights` are gathered
    or under way during the use. `compact` shows one of several blocks or actions that are alike.
    Raises AssertionError if the plan does not hold.
    """
    result = simulate(plan, chunks, actions)
    table = _Table(chunks, result)
    steps = zip(plan.entries, result.occupancy, strict=True)
    lines: list[tuple[str, ...]] = [_HEADER, table.start(plan.start)]
    shown: set[object] = set()
    hidden: list[str] = []  # actions in a row that are like one above
    for action, spans in groupby(step_spans(chunks, actions), key=lambda span: span.action):
        blocks = [
            [table.line(action, *step) for step in islice(steps, len(span.sites))] for span in spans
        ]
        does = action.kind, action.chunk, tuple(map(_alike, blocks))
        if compact and does in shown:
            hidden.append(str(action))
            continue
        shown.add(does)
        lines += [*_note(hidden), *(_collapsed(blocks) if compact else _cells(blocks))]
        hidden = []
    return "\n".join([*_aligned([*lines, *_note(hidden)]), "", _totals(result)])


class _Line(NamedTuple):
    cells: tuple[str, ...]
    alike: object
    """Equal for lines that do the same, each seen from its own block."""


class _Table:
    """The line of each step, with names for what the plan knows by number."""

    def __init__(self, chunks: Chunks, result: Simulation) -> None:
        self.chunks = chunks
        self.lookaheads = iter(result.lookaheads)
        self.homes: dict[str, Site] = {}  # where each weight is declared first
        self.sizes: Counter[tuple[int, int]] = Counter()  # how many in each block
        for c, chunk in enumerate(chunks):
            for b, block in enumerate(chunk):
                for v, use in enumerate(block.uses):
                    if use.weight is not None and use.weight not in self.homes:
                        self.homes[use.weight] = Site(Phase.FORWARD, c, b, v)
                        self.sizes[c, b] += 1

    def start(self, acts: Iterable[WeightOp]) -> tuple[str, ...]:
        weights = [act.weight for act in acts]
        blocks = len({self.homes[weight][1:3] for weight in weights})
        names = self.names(weights, None)
        return ("start", *[""] * 5, names, "", str(blocks), str(len(weights)))

    def line(self, action: Action, step: PlanEntry, here: Occupancy) -> _Line:
        _, c, b, v = step.site
        block = self.chunks[c][b]
        acts: dict[WeightOpKind, list[str]] = {kind: [] for kind in WeightOpKind}
        for act in (*step.before, *step.after):
            acts[act.kind].append(act.weight)
        ahead = [next(self.lookaheads).uses for _ in acts[WeightOpKind.WAIT]]
        homes = [(act.kind, self.homes[act.weight]) for act in (*step.before, *step.after)]
        relative = [(kind, home.chunk - c, home.block - b, home.use) for kind, home in homes]
        cells = (
            *(str(action), step.site.phase, block.name, block.uses[v].name),
            self.names(acts[WeightOpKind.WAIT], block),
            " ".join(map(str, ahead)),
            *(self.names(acts[kind], block) for kind in (WeightOpKind.GATHER, WeightOpKind.FREE)),
            *(str(here.blocks), str(here.weights)),
        )
        return _Line(cells, (step.site.phase, block.uses[v].name, *ahead, *relative))

    def names(self, weights: Iterable[str], here: Block | None) -> str:
        """The weights, those of the block `here` by their use alone, whole blocks as such."""
        words = []
        for place, group in groupby((self.homes[w] for w in weights), key=lambda home: home[1:3]):
            homes = list(group)
            block = self.chunks[place[0]][place[1]]
            uses = " ".join(block.uses[home.use].name for home in homes)
            if block is here:
                words.append(uses)
            elif len(homes) < self.sizes[place]:
                words.append(f"{block.name}: {uses}")
            else:
                words.append(block.name if len(homes) == 1 else f"all of {block.name}")
        return ", ".join(words)


def _alike(lines: list[_Line]) -> object:
    return tuple(line.alike for line in lines)


def _cells(blocks: Iterable[list[_Line]]) -> Iterator[tuple[str, ...]]:
    return (line.cells for lines in blocks for line in lines)


def _collapsed(blocks: Iterable[list[_Line]]) -> Iterator[tuple[str, ...]]:
    """The blocks of an action, with one shown of three or more in a row that are alike."""
    for _, group in groupby(blocks, key=_alike):
        first, *alike = group
        yield from _cells([first])
        if len(alike) > 1:
            begin, end = (lines[0].cells[2] for lines in (alike[0], alike[-1]))
            yield from _note([begin, "to", end])
        else:
            yield from _cells(alike)


def _note(names: list[str]) -> Iterator[tuple[str, ...]]:
    """A line that says who is alike; of many, the first eight and the last four."""
    if names:
        yield (f"... {' '.join(names if len(names) <= 16 else [*names[:8], '...', *names[-4:]])}",)


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """The rows in columns; what does not change from the row above is left out."""
    full = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    above: tuple[str, ...] = ()
    for row in rows:
        if len(row) == 1:
            yield f"{'':{widths[0]}}  {row[0]} alike"
            above = ()
            continue
        cells = [
            "" if i < 3 and row[: i + 1] == above[: i + 1] else cell for i, cell in enumerate(row)
        ]
        above = row
        yield "  ".join(
            f"{cell:>{width}}" if name in _NUMERIC else f"{cell:{width}}"
            for cell, width, name in zip(cells, widths, _HEADER, strict=True)
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
