"""The causes of the exposed time of a mode."""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum

from isp.profile.schema import Collective, Cost, Edge, ModeProfile

__all__ = ["Cause", "exposed_by_cause"]


class Cause(StrEnum):
    """Cause of exposed time, in words that follow `in`."""

    FIRST = f"the {Edge.FIRST}"
    LAST = f"the {Edge.LAST}"
    AT_ONCE = "transfers that are needed at once"
    COULD_HIDE = "transfers that could be hidden"
    OTHER_RANKS = "ranks waiting for each other"


def exposed_by_cause(mode: ModeProfile) -> dict[Cause, float]:
    """Milliseconds exposed in the timelines of all ranks together, the largest cause first."""
    causes: defaultdict[Cause, float] = defaultdict(float)
    for rank in mode.ranks:
        for c in rank.timeline.collectives:
            causes[_cause(c)] += c.exposed_ms - c.others_ms
            causes[Cause.OTHER_RANKS] += c.others_ms
    exposed = ((cause, milliseconds) for cause, milliseconds in causes.items() if milliseconds)
    return dict(sorted(exposed, key=lambda item: item[1], reverse=True))


def _cause(collective: Collective) -> Cause:
    """The cause of its wait once every rank has come."""
    if collective.edge is not None:
        return Cause.FIRST if collective.edge is Edge.FIRST else Cause.LAST
    return Cause.COULD_HIDE if collective.cost is Cost.AHEAD else Cause.AT_ONCE
