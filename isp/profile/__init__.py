"""Profiles of a run: how long transfers take, which of them the computation waits for, and why."""

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
