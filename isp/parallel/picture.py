"""A picture, in characters, of how a weight is cut over ranks.

O out features, I in features; a weight is [O, I].
"""

from __future__ import annotations

from collections.abc import Sequence

from isp.parallel.partition import chunk_range
from isp.parallel.topology import Axis, Topology

__all__ = ["describe_cuts"]

_BOXES_A_LINE = 8


def describe_cuts(topology: Topology, shape: tuple[int, int]) -> str:
    """Picture how a linear's weight of `shape` (O, I) lies on the first stage's ranks, as text.

    Raises ValueError if it cannot be cut so.
    """
    group = topology.groups(Axis.WEIGHT)[0]
    holders = [topology.group_of(Axis.WEIGHT_DATA, rank) for rank in group]
    size = f"{shape[0]}x{shape[1]}"
    by_rows = _stacked([chunk_range(shape[0], len(group), i) for i in range(len(group))], holders)
    if topology.mode.facts.gathers_weights:
        title = f"column and row linear, weight {size}: cut by outputs, gathered where it is used"
        return "\n".join([title, *by_rows])
    by_columns = _side_by_side(
        [chunk_range(shape[1], len(group), i) for i in range(len(group))], holders
    )
    for length, what, role in ((shape[0], "outputs", "column"), (shape[1], "inputs", "row")):
        if length % len(group):
            raise ValueError(
                f"the {length} {what} of a weight of {size} do not divide by the {len(group)}"
                f" tensor ranks, over which {topology.mode} cuts a {role} linear: use a multiple"
                f" of {len(group)}"
            )
    return "\n".join(
        [
            f"column linear, weight {size}: cut by outputs, each rank computes its share of them",
            *by_rows,
            f"row linear, weight {size}: cut by inputs, the ranks' products are summed",
            *by_columns,
        ]
    )


def _ranks(holders: Sequence[int]) -> str:
    """Holders of the same part; of many, the first three and the last."""
    if len(holders) == 1:
        return f"rank {holders[0]}"
    shown = [str(rank) for rank in holders]
    return f"ranks {', '.join(shown if len(shown) <= 4 else [*shown[:3], '..', shown[-1]])}"


def _span(part: range) -> str:
    return f"{part.start}:{part.stop}" if part else "nothing"


def _stacked(parts: Sequence[range], holders: Sequence[Sequence[int]]) -> list[str]:
    """Boxes one above the other, for a weight cut by rows."""
    spans = [f"[{_span(part)}, :]" for part in parts]
    column = max(len(span) for span in spans)
    texts = [f"{span:<{column}}  {_ranks(r)}" for span, r in zip(spans, holders, strict=True)]
    width = max(len(text) for text in texts)
    edge = f"+{'-' * (width + 2)}+"
    lines = [edge]
    for text in texts:
        lines += [f"| {text:<{width}} |", edge]
    return lines


def _side_by_side(parts: Sequence[range], holders: Sequence[Sequence[int]]) -> list[str]:
    """Boxes beside each other, for a weight cut by columns; some on a line of text."""
    lines: list[str] = []
    for begin in range(0, len(parts), _BOXES_A_LINE):
        shown = slice(begin, begin + _BOXES_A_LINE)
        rows = ([f"[:, {_span(p)}]" for p in parts[shown]], [_ranks(r) for r in holders[shown]])
        widths = [max(len(a), len(b)) for a, b in zip(*rows, strict=True)]
        edge = "".join(f"+{'-' * (width + 2)}" for width in widths) + "+"
        boxes = (
            "".join(f"| {text:<{width}} " for text, width in zip(row, widths, strict=True)) + "|"
            for row in rows
        )
        lines += [edge, *boxes, edge]
    return lines
