"""How much of what ranks waited was for each other, where they share the cores of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from isp.checkpoint.agreement import exchange
from isp.comm import Mesh, Transfer
from isp.profile.collectives import align
from isp.profile.recorder import RankRecord

__all__ = ["describe_waits"]


def describe_waits(mesh: Mesh, transfers: Sequence[Transfer]) -> str | None:
    """A clause about each rank's `transfers` of one step; None if nothing was waited for.

    A collective of ranks on one machine, whose clocks are one.
    """
    told = exchange(mesh.host, (mesh.members, [astuple(transfer) for transfer in transfers]))
    records = [
        RankRecord(
            begins=(0.0,),
            transfers=tuple(Transfer(*row) for row in rows),
            marks=(),
            parts=(),
            peak_memory_gib=0.0,
        )
        for _, rows in told
    ]
    ranks = align(records, [members for members, _ in told], [0.0] * len(records))
    found = [collective for rank in ranks for collective in rank.collectives]
    exposed = sum(collective.exposed_ms for collective in found)
    if not exposed:
        return None
    others = sum(collective.others_ms for collective in found)
    return (
        f"{others / exposed:.0%} of the exposed time of the last step was ranks waiting for each"
        f" other"
    )
