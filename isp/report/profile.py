"""The report of a profile: what communication costs in each mode, and why."""

from __future__ import annotations

from collections.abc import Iterator

from isp.profile import Profile
from isp.report.compare import exposed_section, kinds_section, modes_section
from isp.report.memory import memory_section
from isp.report.page import Page, Section
from isp.report.plan import plan_section
from isp.report.timeline import timeline_section
from isp.report.waits import lead_mode, lead_points, lead_sentence, waits_section

__all__ = ["profile_page"]


def profile_page(profile: Profile) -> Page:
    """The page of `profile`."""
    lead = lead_mode(profile)
    modes = [lead, *(mode for mode in profile.modes if mode is not lead)]
    names = ", ".join(mode.mode for mode in profile.modes)
    return Page(
        name="profile",
        title=f"What communication costs: {names} on {profile.world_size} ranks",
        lead=lead_sentence(profile),
        points=tuple(lead_points(profile)),
        command=profile.command,
        sections=(
            modes_section(profile),
            exposed_section(profile),
            waits_section(lead, at_most=10),
            timeline_section(modes),
            memory_section(profile),
            *(waits_section(mode, at_most=5) for mode in modes[1:]),
            *_plans(profile),
            kinds_section(profile),
            _about(profile),
        ),
    )


def _plans(profile: Profile) -> Iterator[Section]:
    for mode in profile.modes:
        if (section := plan_section(profile, mode)) is not None:
            yield section


def _about(profile: Profile) -> Section:
    facts = (
        ("measured", profile.created),
        ("device", profile.device),
        ("torch", profile.torch),
        *((mode.mode, mode.topology) for mode in profile.modes),
    )
    return Section(title="What was measured", facts=facts, listing=profile.config)
