"""The cost of communication in a run: its time, what was waited for, where, and why."""

from isp.profile.schema import (
    Cause,
    Collective,
    ComputeSpan,
    ModeProfile,
    Profile,
    RankProfile,
    StepTimeline,
)

__all__ = [
    "Cause",
    "Collective",
    "ComputeSpan",
    "ModeProfile",
    "Profile",
    "RankProfile",
    "StepTimeline",
]
