"""The modes side by side: what is equal, and what each one costs in time, bytes and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.figure import Figure

from isp.profile import ModeProfile, Profile
from isp.profile import table as tables
from isp.report.page import Section, ms
from isp.report.style import (
    Color,
    Look,
    Picture,
    Stack,
    draw_stacks,
    legend_above,
    new_axes,
    new_figure,
)

__all__ = ["exposed_section", "memory_section", "modes_section"]

_EXPOSED = {
    "exposed, moving": Look(Color.VERMILLION, "///"),
    "exposed, other ranks": Look(Color.ORANGE, "xxx"),
    "hidden": Look(Color.SKY),
}
_LINES = {
    "mtp": {"color": Color.ORANGE, "marker": "o", "linestyle": "-"},
    "msp": {"color": Color.GREEN, "marker": "s", "linestyle": "--"},
    "fsp": {"color": Color.PURPLE, "marker": "^", "linestyle": "-."},
    "isp": {"color": Color.BLUE, "marker": "D", "linestyle": "-"},
}
"""A mode in every picture."""
_OTHER_LINE = {"color": Color.BLACK, "marker": "o", "linestyle": "-"}


def modes_section(profile: Profile) -> Section:
    """Loss, time, bytes, exposed time and memory of each mode; all but loss as a picture, too."""
    several = len(profile.modes) > 1
    picture = Picture(
        name="modes",
        caption="The same steps in each mode.",
        alt="Bars of step time, bytes sent, exposed time and memory for each mode",
        draw=partial(_draw_modes, profile.modes),
    )
    texts = tables.head(profile), *tables.EXPLANATION.replace("\nonce", " once").split("\n")
    return Section(
        title="The modes side by side" if several else "The mode",
        texts=(*texts, tables.losses(profile)) if several else texts,
        table=tables.modes(profile),
        pictures=(picture,),
    )


_QUANTITIES: tuple[tuple[str, Callable[[ModeProfile], float], Callable[[float], str]], ...] = (
    ("step (ms)", lambda mode: mode.summary.step_ms, ms),
    ("sent (MiB)", lambda mode: mode.summary.sent_bytes / 2**20, "{:,.2f}".format),
    ("exposed (ms)", lambda mode: mode.summary.exposed_ms, ms),
    ("memory (GiB)", lambda mode: mode.peak_memory_gib, "{:.2f}".format),
)
"""What the modes are compared by: its name, the number, and the number as text."""


def _draw_modes(modes: Sequence[ModeProfile]) -> Figure:
    """Bars from zero, so that their lengths compare, each with its number above it."""
    figure = new_figure()
    names = [mode.mode for mode in modes]
    colors = [_LINES.get(name, _OTHER_LINE)["color"] for name in names]
    for place, (title, number, text) in enumerate(_QUANTITIES, start=1):
        axes = figure.add_subplot(1, len(_QUANTITIES), place)
        values = [number(mode) for mode in modes]
        bars = axes.bar(names, values, color=colors, width=0.75)
        axes.bar_label(bars, [text(value) for value in values], padding=2, fontsize="x-small")
        axes.set_title(title)
        axes.set_ylim(0, max(max(values) * 1.12, 1e-9))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
    return figure


def exposed_section(profile: Profile) -> Section:
    """The exposed communication of each mode, and how much had to be."""
    picture = Picture(
        name="exposed",
        caption="Time in which transfers were under way in a step: exposed while they moved,"
        " exposed because another rank had not come to them yet, or hidden behind compute. The"
        " black mark is the bound: what had to be exposed at least.",
        alt="Bars of hidden and exposed communication time for each mode",
        draw=partial(_draw_exposed, profile.modes),
    )
    return Section(title="Exposed against hidden", pictures=(picture,))


def _others_ms(mode: ModeProfile) -> float:
    """The exposed time another rank was waited for, in the step and mean of the summary."""
    per_rank = [
        sum(collective.others_ms for collective in rank.timeline.collectives) for rank in mode.ranks
    ]
    return min(mode.summary.exposed_ms, sum(per_rank) / len(per_rank))


def _draw_exposed(modes: Sequence[ModeProfile]) -> Figure:
    stacks = []
    for mode in modes:
        s, others = mode.summary, _others_ms(mode)
        lengths = s.exposed_ms - others, others, max(0.0, s.comm_ms - s.exposed_ms)
        text = f"{ms(s.exposed_ms)} ms exposed, {s.exposed_share:.0%} of the step"
        stacks.append(Stack(mode.mode, dict(zip(_EXPOSED, lengths, strict=True)), text))
    room = 1.3 * max(max(mode.summary.comm_ms, mode.summary.exposed_ms) for mode in modes)
    figure, axes = draw_stacks(stacks, _EXPOSED, xlabel="time in a step (ms)", text=ms, limit=room)
    for lane, mode in enumerate(modes):
        at = [mode.summary.bound_ms] * 2
        axes.plot(at, [lane - 0.42, lane + 0.42], color=Color.BLACK, linewidth=3)
    return figure


def memory_section(profile: Profile) -> Section:
    """Memory over the time of a step, of the rank that has most in each mode."""
    picture = Picture(
        name="memory",
        caption="Memory over the step, on the rank that had most: of tensors on CUDA, of the whole"
        " process on CPU. A mark is a place where the phase changes.",
        alt="Memory in GiB over the time of a step, a line for each mode",
        draw=partial(_draw_memory, profile.modes),
    )
    return Section(title="Memory over one step", pictures=(picture,))


def _draw_memory(modes: Sequence[ModeProfile]) -> Figure:
    figure, axes = new_axes(xlabel="time since the step began (ms)", ylabel="memory (GiB)")
    for mode in modes:
        rank = max(mode.ranks, key=lambda rank: rank.peak_memory_gib)
        times = [sample.at_ms - rank.timeline.begin_ms for sample in rank.timeline.memory]
        sizes = [sample.gib for sample in rank.timeline.memory]
        line = _LINES.get(mode.mode, _OTHER_LINE)
        label = f"{mode.mode} (rank {rank.rank})"
        axes.plot(times, sizes, markersize=5, linewidth=1.8, label=label, **line)  # type: ignore[arg-type]
    axes.update_datalim([(0, 0)])
    axes.margins(x=0.01, y=0.08)  # for the whole of the marks at the edges
    axes.set_ylim(bottom=0)
    legend_above(axes)
    return figure
