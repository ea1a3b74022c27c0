"""The report of a profile: what communication costs in each mode, and why."""

from __future__ import annotations

from collections.abc import Iterator

from isp.profile import Cause, ModeProfile, Profile
from isp.profile import table as tables
from isp.report.compare import exposed_section, memory_section, modes_section
from isp.report.page import Page, Section, kind_name, ms
from isp.report.timeline import timeline_section

__all__ = ["lead_sentence", "profile_page"]

_WHY = {
    Cause.FIRST: "which has nothing to hide behind",
    Cause.LAST: "which has nothing left to hide behind",
    Cause.AT_ONCE: "before the computation can continue",
    Cause.COULD_HIDE: "by an earlier launch, or more compute beside them",
    Cause.OTHER_RANKS: "because not all come to a transfer at the same time",
}


def profile_page(profile: Profile) -> Page:
    """The page of `profile`."""
    lead = _lead_mode(profile)
    modes = [lead, *(mode for mode in profile.modes if mode is not lead)]
    names = ", ".join(mode.mode for mode in profile.modes)
    return Page(
        name="profile",
        title=f"What communication costs: {names} on {profile.world_size} ranks",
        lead=lead_sentence(profile),
        points=tuple(_lead_points(profile)),
        command=profile.command,
        sections=(
            modes_section(profile),
            exposed_section(profile),
            _waits_section(lead, at_most=10),
            timeline_section(modes),
            memory_section(profile),
            *(_waits_section(mode, at_most=5) for mode in modes[1:]),
            *(_plan_section(mode) for mode in profile.modes if mode.plan_grid is not None),
            Section(title="By kind of transfer", table=tables.kinds(profile)),
            _about(profile),
        ),
    )


def _plan_section(mode: ModeProfile) -> Section:
    text = (
        "Where each weight is gathered, waited for and freed in a step; “ahead” is the number of"
        " uses of weights from the gather to the wait. `isp prefetch CONFIG` prints this for any"
        " configuration."
    )
    return Section(title="The plan of the weights", texts=(text,), listing=mode.plan_grid)


def _about(profile: Profile) -> Section:
    facts = (
        ("measured", profile.created),
        ("device", profile.device),
        ("torch", profile.torch),
        *((mode.mode, mode.topology) for mode in profile.modes),
    )
    return Section(title="What was measured", facts=facts, listing=profile.config)


def _lead_mode(profile: Profile) -> ModeProfile:
    """The mode that the report speaks of first: isp where it was measured, else the first."""
    return next((mode for mode in profile.modes if mode.mode == "isp"), profile.modes[0])


def lead_sentence(profile: Profile) -> str:
    """The exposed share."""
    lead = _lead_mode(profile)
    s = lead.summary
    if not s.num_transfers:
        return f"In {lead.mode} nothing is exposed, because nothing is transferred."
    return (
        f"In {lead.mode}, {s.exposed_share:.0%} of the step is exposed: {ms(s.exposed_ms)} of"
        f" {ms(s.step_ms)} ms."
    )


def _lead_points(profile: Profile) -> Iterator[str]:
    """Say why it is exposed, what is worst, and how the other modes compare."""
    lead = _lead_mode(profile)
    causes = lead.exposed_by_cause
    if causes:
        cause, exposed = next(iter(causes.items()))
        yield f"{exposed / sum(causes.values()):.0%} of it in {cause}, {_WHY[cause]}."
    if profile.shared_cores:
        yield f"{profile.shared_cores}, so they wait more for each other than on GPUs."
    if lead.waits:
        worst = lead.waits[0]
        yield (
            f"The worst wait, {ms(worst.exposed_ms)} ms, is for the {kind_name(worst.kind)} of"
            f" {worst.label} in {worst.phase}: {worst.advice}."
        )
    others = [mode for mode in profile.modes if mode is not lead]
    if others:
        shares = (f"{m.mode} {m.summary.exposed_share:.0%}" for m in others)
        yield f"Exposed of the step in the other modes: {', '.join(shares)}."


def _waits_section(mode: ModeProfile, *, at_most: int) -> Section:
    """The tensors that were waited for longest in `mode`."""
    title = f"The worst waits in {mode.mode}"
    if not mode.waits:
        return Section(title=title, texts=("Nothing was waited for.",))
    text = (
        "In a step of one rank, the mean over all measured steps and ranks, times in milliseconds."
        " “Moving” is the time from when the transfer could begin on every rank, “times” how often"
        " it goes in a step."
    )
    titles, *rows = tables.waits(mode, at_most).rows
    advised = (
        [*row[:-1], f"{row[-1]}: {wait.advice}"]
        for row, wait in zip(rows, mode.waits, strict=False)
    )
    table = tables.Table([titles, *advised], text_columns=0, text_from=3)
    return Section(title=title, texts=(text,), table=table)
