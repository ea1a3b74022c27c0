"""Prints a prefetch plan as a table: a line for each entry, repeated blocks shown once."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import NamedTuple

from isp.core.mesh.phase import Phase
from isp.core.weights.prefetch_plan import PlanEntry, PrefetchPlan, WeightOp, WeightOpKind
from isp.core.weights.simulate import Occupancy, Simulation, simulate
from isp.core.weights.uses import Action, Block, Chunks, Site, step_spans

__all__ = ["grid"]

_HEADER = ("action", "phase", "block", "use", "ahead", "gather", "free", "held")
_NUMERIC = {"ahead", "held"}
_GATHER = _HEADER.index("gather")
_WIDTH = 100
"""Columns of the table; the names of weights to gather are wrapped to fit."""
_LEGEND = """\
ahead   number of uses from a weight's all-gather to the wait for it; empty: no wait
gather  all-gathers that are launched at this use, for a later one
free    buffers that are freed at this use; own: those of its own weights
held    blocks and weights that are gathered or in flight during the use"""


def grid(
    plan: PrefetchPlan, chunks: Chunks, actions: tuple[Action, ...], *, compact: bool = True
) -> str:
    """Return the table of the prefetch plan, with a legend, and sums of what the plan does.

    `compact` shows only the first of several blocks or actions that do the same. Names of blocks
    and uses are shortened where they stay distinct. Raises AssertionError if the plan is wrong.
    """
    result = simulate(plan, chunks, actions)
    table = _Table(chunks, result)
    steps = zip(plan.entries, result.occupancy, strict=True)
    lines: list[tuple[str, ...]] = [_HEADER]
    shown: set[object] = set()
    # The actions that are left out after the row written last, because an action with the same
    # operations was shown before. `_note` makes one row of their names.
    hidden: list[str] = []
    for action, spans in groupby(step_spans(chunks, actions), key=lambda span: span.action):
        blocks = [
            [table.line(action, *step) for step in islice(steps, len(span.sites))] for span in spans
        ]
        does = action.kind, action.chunk, tuple(map(_done_by, blocks))
        if compact and does in shown:
            hidden.append(str(action))
            continue
        shown.add(does)
        lines += [*_note(hidden), *(_collapsed(blocks) if compact else _cells(blocks))]
        hidden = []
    rows = [*_aligned([*lines, *_note(hidden)])]
    start = f"start: gathers {table.started(plan.start)}"
    return "\n".join([start, *rows, "", _LEGEND, "", _totals(result)])


class _Line(NamedTuple):
    """A line of the table: one use of a block, and the operations on weights there."""

    cells: tuple[str, ...]
    does: object
    """Key to compare rows of different blocks by their operations. Blocks in it are counted from
    the row's own block, so two rows that do the same, each in its block, have equal keys."""


class _Table:
    """Makes the row of each entry, with the names of blocks and uses."""

    def __init__(self, chunks: Chunks, result: Simulation) -> None:
        self.chunks = chunks
        self.lookaheads = iter(result.lookaheads)
        # For each weight, the first use that reads it.
        self.homes: dict[str, Site] = {}
        # For each (chunk, block), the number of weights whose first use is in it.
        self.sizes: Counter[tuple[int, int]] = Counter()
        for c, chunk in enumerate(chunks):
            for b, block in enumerate(chunk):
                for v, use in enumerate(block.uses):
                    if use.weight is not None and use.weight not in self.homes:
                        self.homes[use.weight] = Site(Phase.FORWARD, c, b, v)
                        self.sizes[c, b] += 1
        every = [block for chunk in chunks for block in chunk]
        self.blocks = _short([block.name for block in every], _without_root)
        self.uses = {
            block.name: _short(
                [use.name for use in block.uses], lambda name: name.rsplit(".", 1)[-1]
            )
            for block in every
        }

    def started(self, acts: Iterable[WeightOp]) -> str:
        """Return the names of the weights that are gathered before the first use."""
        return self.names([act.weight for act in acts], None) or "nothing"

    def line(self, action: Action, step: PlanEntry, here: Occupancy) -> _Line:
        """Return the row of an entry; `here`: what is gathered during its use."""
        _, c, b, v = step.site
        block = self.chunks[c][b]
        acts: dict[WeightOpKind, list[str]] = {kind: [] for kind in WeightOpKind}
        for act in (*step.before, *step.after):
            acts[act.kind].append(act.weight)
        ahead = [next(self.lookaheads).uses for _ in acts[WeightOpKind.WAIT]]
        homes = [(act.kind, self.homes[act.weight]) for act in (*step.before, *step.after)]
        relative = [(kind, home.chunk - c, home.block - b, home.use) for kind, home in homes]
        use = self.uses[block.name][block.uses[v].name]
        waited, gathered, freed = (
            self.names(acts[kind], block)
            for kind in (WeightOpKind.WAIT, WeightOpKind.GATHER, WeightOpKind.FREE)
        )
        numbers = " ".join(map(str, ahead))
        cells = (
            *(str(action), step.site.phase, self.blocks[block.name], use),
            numbers if waited in ("", use) else f"{numbers} ({waited})",
            gathered,
            "own" if freed == use else freed,
            f"{here.blocks}, {here.weights}",
        )
        return _Line(cells, (step.site.phase, block.uses[v].name, *ahead, *relative))

    def names(self, weights: Iterable[str], here: Block | None) -> str:
        """Return text that names `weights`, for a cell of the table.

        A weight is named by its use; if it is not in the block `here`, after the name of its block.
        If all weights of another block are meant, only the block is named.
        """
        words = []
        for place, group in groupby((self.homes[w] for w in weights), key=lambda home: home[1:3]):
            homes = list(group)
            block = self.chunks[place[0]][place[1]]
            short = self.uses[block.name]
            uses = " ".join(short[block.uses[home.use].name] for home in homes)
            name = self.blocks[block.name]
            if block is here:
                words.append(uses)
            elif len(homes) < self.sizes[place]:
                words.append(f"{name}: {uses}")
            else:
                words.append(name if len(homes) == 1 else f"all of {name}")
        return ", ".join(words)


def _without_root(name: str) -> str:
    """Return a block's name without the module that all blocks are in: `layers.3`."""
    rest = name.split(".", 1)[-1]
    return name if rest.isdecimal() else rest


def _short(names: Iterable[str], shorten: Callable[[str], str]) -> dict[str, str]:
    """Return each of `names` with its short form, or with itself if two forms would be equal."""
    found = {name: shorten(name) for name in names}
    return found if len({*found.values()}) == len(found) else {name: name for name in found}


def _done_by(lines: list[_Line]) -> object:
    """Return a key of the operations of a block's rows."""
    return tuple(line.does for line in lines)


def _cells(blocks: Iterable[list[_Line]]) -> Iterator[tuple[str, ...]]:
    """Return the cells of all rows of the blocks."""
    return (line.cells for lines in blocks for line in lines)


def _collapsed(blocks: Iterable[list[_Line]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of an action's blocks, but of three or more equal neighbors only the first."""
    for _, group in groupby(blocks, key=_done_by):
        first, *same = group
        yield from _cells([first])
        if len(same) > 1:
            begin, end = (lines[0].cells[2] for lines in (same[0], same[-1]))
            yield from _note([begin, "to", end])
        else:
            yield from _cells(same)


def _note(names: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield a row that names the actions with the same operations as the row above.

    Of more than 16 `names`, only the first 8 and the last 4 are shown.
    """
    if names:
        yield (f"... {' '.join(names if len(names) <= 16 else [*names[:8], '...', *names[-4:]])}",)


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows in columns; cells that repeat the row above are empty."""
    full = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    others = sum(widths) - widths[_GATHER] + 2 * (len(widths) - 1)
    widths[_GATHER] = min(widths[_GATHER], max(_WIDTH - others, len("all of a block")))
    above: tuple[str, ...] = ()
    for row in rows:
        if len(row) == 1:
            yield f"{'':{widths[0]}}  {row[0]}: the same"
            above = ()
            continue
        cells = [
            "" if i < 3 and row[: i + 1] == above[: i + 1] else cell for i, cell in enumerate(row)
        ]
        above = row
        cells[_GATHER], *more = textwrap.wrap(cells[_GATHER], widths[_GATHER]) or [""]
        yield "  ".join(
            f"{cell:>{width}}" if name in _NUMERIC else f"{cell:{width}}"
            for cell, width, name in zip(cells, widths, _HEADER, strict=True)
        ).rstrip()
        before = sum(widths[:_GATHER]) + 2 * _GATHER
        yield from (f"{'':{before}}{line}" for line in more)


def _totals(result: Simulation) -> str:
    """Return two lines: the number of gathers by phase, and the most gathered at a time."""
    gathers = dict.fromkeys(Phase, 0)
    for (_, phase), count in result.gathers.items():
        gathers[phase] += count
    parts = ", ".join(f"{count} for {phase}" for phase, count in gathers.items() if count)
    exposed = sum(ahead.uses == 0 for ahead in result.lookaheads)
    return (
        f"{sum(gathers.values())} gathers: {parts or 'none'}; {exposed} at the moment of use\n"
        f"at most {result.peak.blocks} blocks and {result.peak.weights} weights gathered"
    )
