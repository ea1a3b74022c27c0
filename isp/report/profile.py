"""The report of a profile: what communication costs in each mode, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure

from isp.profile import Cause, ModeProfile, Profile
from isp.profile import table as tables
from isp.report.page import Page, Section, kind_name, ms
from isp.report.style import Color, Look, Picture, Stack, draw_stacks, legend_above, new_axes
from isp.report.timeline import timeline_section

__all__ = ["profile_page"]

_WHY = {
    Cause.FIRST: "which has nothing to hide behind",
    Cause.LAST: "which has nothing left to hide behind",
    Cause.AT_ONCE: "before the computation can continue",
    Cause.COULD_HIDE: "by an earlier launch, or more compute beside them",
    Cause.OTHER_RANKS: "because not all come to a transfer at the same time",
}
_EXPOSED = {
    "exposed, moving": Look(Color.VERMILLION, "///"),
    "exposed, other ranks": Look(Color.ORANGE, "xxx"),
    "hidden": Look(Color.SKY),
}
_LINES = [
    (Color.ORANGE, "o", "-"),
    (Color.GREEN, "s", "--"),
    (Color.PURPLE, "^", "-."),
    (Color.BLUE, "D", "-"),
]
"""Colour, marker and style of the lines of modes, in their order."""


def profile_page(profile: Profile) -> Page:
    """The page of `profile`, which speaks first of isp where it was measured."""
    lead = next((mode for mode in profile.modes if mode.mode == "isp"), profile.modes[0])
    modes = [lead, *(mode for mode in profile.modes if mode is not lead)]
    names = ", ".join(mode.mode for mode in profile.modes)
    facts = (
        ("measured", profile.created),
        ("device", profile.device),
        ("torch", profile.torch),
        *((mode.mode, mode.topology) for mode in profile.modes),
    )
    return Page(
        name="profile",
        title=f"What communication costs: {names} on {profile.world_size} ranks",
        lead=_lead(lead),
        points=tuple(_points(profile, lead)),
        command=profile.command,
        sections=(
            _modes_section(profile),
            Section(title="Exposed against hidden", pictures=(_exposed_picture(profile.modes),)),
            _waits_section(lead, at_most=10),
            timeline_section(modes),
            Section(title="Memory over one step", pictures=(_memory_picture(profile.modes),)),
            *(_waits_section(mode, at_most=5) for mode in modes[1:]),
            *(_plan_section(mode) for mode in profile.modes if mode.plan_grid is not None),
            Section(title="By kind of transfer", table=tables.kinds(profile)),
            Section(title="What was measured", facts=facts, listing=profile.config),
        ),
    )


def _lead(mode: ModeProfile) -> str:
    s = mode.summary
    if not s.num_transfers:
        return f"In {mode.mode} nothing is exposed, because nothing is transferred."
    return (
        f"In {mode.mode}, {s.exposed_share:.0%} of the step is exposed: {ms(s.exposed_ms)} of"
        f" {ms(s.step_ms)} ms."
    )


def _points(profile: Profile, lead: ModeProfile) -> Iterator[str]:
    """Say why it is exposed, what is worst, and how the other modes compare."""
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


def _modes_section(profile: Profile) -> Section:
    """Loss, time, bytes, exposed time and memory of each mode."""
    several = len(profile.modes) > 1
    texts = tables.head(profile), *tables.EXPLANATION.replace("\nonce", " once").split("\n")
    return Section(
        title="The modes side by side" if several else "The mode",
        texts=(*texts, tables.losses(profile)) if several else texts,
        table=tables.modes(profile),
    )


def _plan_section(mode: ModeProfile) -> Section:
    text = (
        "Where each weight is gathered, waited for and freed in a step; “ahead” is the number of"
        " uses of weights from the gather to the wait. `isp prefetch CONFIG` prints this for any"
        " configuration."
    )
    return Section(title="The plan of the weights", texts=(text,), listing=mode.plan_grid)


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


def _exposed_picture(modes: Sequence[ModeProfile]) -> Picture:
    """The exposed communication of each mode, and how much had to be."""
    return Picture(
        name="exposed",
        caption="Time in which transfers were under way in a step: exposed while they moved,"
        " exposed because another rank had not come to them yet, or hidden behind compute. The"
        " black mark is the bound: what had to be exposed at least.",
        alt="Bars of hidden and exposed communication time for each mode",
        draw=partial(_draw_exposed, modes),
    )


def _draw_exposed(modes: Sequence[ModeProfile]) -> Figure:
    stacks = []
    for mode in modes:
        s = mode.summary
        others = sum(c.others_ms for rank in mode.ranks for c in rank.timeline.collectives)
        others = min(s.exposed_ms, others / len(mode.ranks))
        lengths = s.exposed_ms - others, others, max(0.0, s.comm_ms - s.exposed_ms)
        text = f"{ms(s.exposed_ms)} ms exposed, {s.exposed_share:.0%} of the step"
        stacks.append(Stack(mode.mode, dict(zip(_EXPOSED, lengths, strict=True)), text))
    room = 1.3 * max(max(mode.summary.comm_ms, mode.summary.exposed_ms) for mode in modes)
    figure, axes = draw_stacks(stacks, _EXPOSED, xlabel="time in a step (ms)", text=ms, limit=room)
    for lane, mode in enumerate(modes):
        at = [mode.summary.bound_ms] * 2
        axes.plot(at, [lane - 0.42, lane + 0.42], color=Color.BLACK, linewidth=3)
    return figure


def _memory_picture(modes: Sequence[ModeProfile]) -> Picture:
    """Memory over the time of a step, of the rank that has most in each mode."""
    return Picture(
        name="memory",
        caption="Memory over the step, on the rank that had most: of tensors on CUDA, of the whole"
        " process on CPU. A mark is a place where the phase changes.",
        alt="Memory in GiB over the time of a step, a line for each mode",
        draw=partial(_draw_memory, modes),
    )


def _draw_memory(modes: Sequence[ModeProfile]) -> Figure:
    figure, axes = new_axes(xlabel="time since the step began (ms)", ylabel="memory (GiB)")
    for number, mode in enumerate(modes):
        rank = max(mode.ranks, key=lambda rank: rank.peak_memory_gib)
        times = [sample.at_ms - rank.timeline.begin_ms for sample in rank.timeline.memory]
        sizes = [sample.gib for sample in rank.timeline.memory]
        color, marker, style = _LINES[number % len(_LINES)]
        label = f"{mode.mode} (rank {rank.rank})"
        axes.plot(times, sizes, color=color, marker=marker, linestyle=style, label=label)
    axes.update_datalim([(0, 0)])
    axes.margins(x=0.01, y=0.08)  # for the whole of the marks at the edges
    axes.set_ylim(bottom=0)
    legend_above(axes)
    return figure
