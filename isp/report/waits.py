"""The worst waits of each mode, and the sentence that says what is exposed and why."""

from __future__ import annotations

from collections import defaultdict

from isp.profile import Cost, Edge, ModeProfile, Profile, Wait
from isp.report.page import Column, Section, Table
from isp.report.words import kind_name, mib, ms, share

__all__ = ["lead_mode", "lead_sentence", "waits_section"]

_CAUSES = {
    Edge.FIRST: "at the first gather of the step, which has nothing to hide behind",
    Edge.LAST: "at the last reductions of the step, which have nothing left to hide behind",
    Cost.CHAIN: "for transfers that the next computation needs at once",
    Cost.OUTSIDE: "for transfers outside forward and backward",
    Cost.AHEAD: "for transfers that an earlier launch, or more compute beside them, could hide",
}
_OTHER_RANKS = "because ranks wait for each other"


def lead_mode(profile: Profile) -> ModeProfile:
    """The mode that the report speaks of first: isp where it was measured, else the first."""
    return next((mode for mode in profile.modes if mode.mode == "isp"), profile.modes[0])


def lead_sentence(profile: Profile) -> str:
    """What is exposed and why, what of it is worst, and how the other modes compare."""
    lead = lead_mode(profile)
    s = lead.summary
    if not s.num_transfers:
        return f"In {lead.mode} nothing is exposed, because nothing travels."
    parts = [
        f"In {lead.mode}, {share(s.exposed_ms, s.comm_ms)} of communication is exposed"
        f" ({ms(s.exposed_ms)} of {ms(s.comm_ms)} ms in a step of {ms(s.step_ms)} ms)"
    ]
    causes = _causes(lead)
    if whole := sum(causes.values()):
        cause = max(causes, key=lambda name: causes[name])
        parts.append(f"{share(causes[cause], whole)} of it {cause}")
    if lead.waits:
        worst = lead.waits[0]
        parts.append(
            f"the worst single wait ({ms(worst.exposed_ms)} ms) is for the {kind_name(worst.kind)}"
            f" of {worst.label} in {worst.phase} ({worst.advice})"
        )
    others = [mode for mode in profile.modes if mode is not lead]
    if others:
        listed = ", ".join(f"{mode.mode} {ms(mode.summary.exposed_ms)} ms" for mode in others)
        parts.append(f"exposed in the other modes: {listed}")
    return "; ".join(parts) + "."


def _causes(mode: ModeProfile) -> dict[str, float]:
    """Milliseconds exposed in the timelines of all ranks, by what explains them."""
    causes: defaultdict[str, float] = defaultdict(float)
    for rank in mode.ranks:
        for c in rank.timeline.collectives:
            causes[_CAUSES[c.edge or c.cost]] += c.exposed_ms - c.others_ms
            causes[_OTHER_RANKS] += c.others_ms
    return causes


def waits_section(mode: ModeProfile, command: str | None, *, at_most: int) -> Section:
    """The tensors that were waited for longest in `mode`."""
    title = f"The worst waits in {mode.mode}"
    if not mode.waits:
        return Section(title=title, texts=("Nothing was waited for.",), command=command)
    columns = (
        Column("exposed (ms)", numeric=True),
        Column("of all", numeric=True),
        Column("waiting for"),
        Column("why, and what would help", prose=True),
        Column("moving (ms)", numeric=True),
        Column("sent (MiB)", numeric=True),
        Column("times", numeric=True),
    )
    text = (
        "In a step of one rank, the mean over all measured steps and ranks. “Moving” is the time"
        " from when the transfer could begin on every rank, “times” how often it goes in a step."
    )
    rows = tuple(_row(wait, mode.summary.exposed_ms) for wait in mode.waits[:at_most])
    return Section(title=title, texts=(text,), table=Table(columns, rows), command=command)


def _row(wait: Wait, exposed_ms: float) -> tuple[str, ...]:
    return (
        ms(wait.exposed_ms),
        share(wait.exposed_ms, exposed_ms),
        f"{kind_name(wait.kind)} of {wait.label}, {_where(wait)}",
        f"{wait.reason}: {wait.advice}",
        ms(wait.moving_ms),
        mib(wait.sent_bytes),
        f"{wait.count:g}",
    )


def _where(wait: Wait) -> str:
    """The phase, and the part of the model where the label does not name it."""
    is_named = not wait.block or wait.label.startswith(wait.block)
    return wait.phase if is_named else f"{wait.phase} of {wait.block}"
