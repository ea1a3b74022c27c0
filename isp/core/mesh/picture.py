"""How a weight is cut over ranks, as text.

O out features, I in features; a weight is [O, I].
"""

from __future__ import annotations

from collections.abc import Sequence

from isp.core.mesh.partition import chunk_range
from isp.core.mesh.topology import Axis, Topology

__all__ = ["describe_cuts"]


def describe_cuts(topology: Topology, shape: tuple[int, int]) -> str:
    """Show how a linear's weight of `shape` (O, I) lies on the first stage's ranks, a part a line.

    Raises ValueError if it cannot be cut so.
    """
    group, size = topology.groups(Axis.WEIGHT)[0], f"{shape[0]}x{shape[1]}"
    holders = [_ranks(topology.group_of(Axis.WEIGHT_DATA, rank)) for rank in group]

    def lines(length: int, place: str) -> list[str]:
        parts = [chunk_range(length, len(group), i) for i in range(len(group))]
        spans = [place.format(f"{p.start}:{p.stop}" if p else "nothing") for p in parts]
        width = max(map(len, spans))
        return [f"  {span:<{width}}  {who}" for span, who in zip(spans, holders, strict=True)]

    by_rows = lines(shape[0], "[{}, :]")
    if topology.mode.gathers_weights:
        title = f"column and row linear, weight {size}: cut by outputs, gathered where it is used"
        return "\n".join([title, *by_rows])
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
            *lines(shape[1], "[:, {}]"),
        ]
    )


def _ranks(holders: Sequence[int]) -> str:
    """Holders of the same part; of many, the first three and the last."""
    if len(holders) == 1:
        return f"rank {holders[0]}"
    shown = [str(rank) for rank in holders]
    return f"ranks {', '.join(shown if len(shown) <= 4 else [*shown[:3], '..', shown[-1]])}"
