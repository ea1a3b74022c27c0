"""The cost of communication in a run: its time, what was waited for, where, and why."""

from isp.profile.schema import (
    Cause,
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
    StepTimeline,
    Totals,
    Wait,
)

__all__ = [
    "Cause",
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
    "StepTimeline",
    "Totals",
    "Wait",
]
