"""The worst waits of each mode, and what the page begins with: what is exposed, and why."""

from __future__ import annotations

from collections.abc import Iterator

from isp.profile import ModeProfile, Profile, Wait
from isp.profile.causes import Cause, exposed_by_cause
from isp.report.page import Column, Section, Table
from isp.report.words import kind_name, mib, ms, share

__all__ = ["lead_mode", "lead_points", "lead_sentence", "waits_section"]

_WHY = {
    Cause.FIRST: "which has nothing to hide behind",
    Cause.LAST: "which has nothing left to hide behind",
    Cause.AT_ONCE: "before the computation can go on",
    Cause.COULD_HIDE: "by an earlier launch, or more compute beside them",
    Cause.OTHER_RANKS: "because not all come to a transfer at the same time",
}


def lead_mode(profile: Profile) -> ModeProfile:
    """The mode that the report speaks of first: isp where it was measured, else the first."""
    return next((mode for mode in profile.modes if mode.mode == "isp"), profile.modes[0])


def lead_sentence(profile: Profile) -> str:
    """The exposed share."""
    lead = lead_mode(profile)
    s = lead.summary
    if not s.num_transfers:
        return f"In {lead.mode} nothing is exposed, because nothing travels."
    return (
        f"In {lead.mode}, {s.exposed_share:.0%} of the step is exposed: {ms(s.exposed_ms)} of"
        f" {ms(s.step_ms)} ms."
    )


def lead_points(profile: Profile) -> Iterator[str]:
    """Say why it is exposed, what is worst, and how the other modes compare."""
    lead = lead_mode(profile)
    causes = exposed_by_cause(lead)
    if causes:
        cause, exposed = next(iter(causes.items()))
        yield f"{share(exposed, sum(causes.values()))} of it in {cause}, {_WHY[cause]}."
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


def waits_section(mode: ModeProfile, *, at_most: int) -> Section:
    """The tensors that were waited for longest in `mode`."""
    title = f"The worst waits in {mode.mode}"
    if not mode.waits:
        return Section(title=title, texts=("Nothing was waited for.",))
    columns = (
        Column("waiting for"),
        Column("exposed (ms)", numeric=True),
        Column("of all exposed", numeric=True),
        Column("why", prose=True),
        Column("moving (ms)", numeric=True),
        Column("sent (MiB)", numeric=True),
        Column("times", numeric=True),
    )
    text = (
        "In a step of one rank, the mean over all measured steps and ranks. “Moving” is the time"
        " from when the transfer could begin on every rank, “times” how often it goes in a step."
    )
    rows = tuple(_row(wait, mode.summary.exposed_ms) for wait in mode.waits[:at_most])
    return Section(title=title, texts=(text,), table=Table(columns, rows))


def _row(wait: Wait, exposed_ms: float) -> tuple[str, ...]:
    return (
        f"{kind_name(wait.kind)} of {wait.label}, {_where(wait)}",
        ms(wait.exposed_ms),
        share(wait.exposed_ms, exposed_ms),
        f"{wait.reason}: {wait.advice}",
        ms(wait.moving_ms),
        mib(wait.sent_bytes),
        f"{wait.count:g}",
    )


def _where(wait: Wait) -> str:
    """The phase, and the part of the model where the label does not name it."""
    is_named = not wait.block or wait.label.startswith(wait.block)
    return wait.phase if is_named else f"{wait.phase} of {wait.block}"
