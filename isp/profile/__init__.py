"""The cost of communication in a run: its time, what was waited for, where, and why."""

from isp.profile.schema import (
    Collective,
    ComputeSpan,
    Cost,
    Edge,
    KindTotals,
    MemorySample,
    ModeProfile,
    Profile,
    RankProfile,
    Reason,
    Timeline,
    Totals,
    Wait,
)

__all__ = [
    "Collective",
    "ComputeSpan",
    "Cost",
    "Edge",
    "KindTotals",
    "MemorySample",
    "ModeProfile",
    "Profile",
    "RankProfile",
    "Reason",
    "Timeline",
    "Totals",
    "Wait",
]
