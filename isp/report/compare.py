"""The modes side by side: what is equal, and what each one costs in time, bytes and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from isp.profile import ModeProfile, Profile
from isp.report.page import Column, Section, Table, kind_name, mib, ms, numbers
from isp.report.style import (
    BLACK,
    BLUE,
    EDGE,
    GREEN,
    ORANGE,
    PHONE,
    PURPLE,
    SKY,
    VERMILLION,
    Look,
    Picture,
    Size,
    key,
    legend_above,
    new_axes,
    new_figure,
    new_lanes,
)

__all__ = ["exposed_section", "kinds_section", "memory_section", "modes_section"]

_BAR: dict[str, Any] = {"edgecolor": EDGE, "linewidth": 0.6, "height": 0.5}
_MOVING, _OTHERS, _HIDDEN = Look(VERMILLION, "///"), Look(ORANGE, "xxx"), Look(SKY)


class _Line(NamedTuple):
    """A mode in every picture, beside its name."""

    color: str
    marker: str
    linestyle: str


_LINES = {
    "mtp": _Line(ORANGE, "o", "-"),
    "msp": _Line(GREEN, "s", "--"),
    "fsp": _Line(PURPLE, "^", "-."),
    "isp": _Line(BLUE, "D", "-"),
}
_OTHER_LINE = _Line(BLACK, "o", "-")


def modes_section(profile: Profile) -> Section:
    """Loss, time, bytes, exposed time and memory of each mode; all but loss as a picture, too."""
    columns = (
        Column("mode"),
        *numbers("loss", "step (ms)", "sent (MiB)", "transfers (ms)", "exposed (ms)"),
        *numbers("of the step", "at least (ms)", "memory (GiB)", "tensor (ranks)"),
        *numbers("weight (ranks)"),
    )
    texts = [
        f"The step of median length, of {profile.num_steps} after {profile.warmup_steps} to warm"
        f" up, and the mean over {profile.world_size} ranks. “Transfers” is the"
        f" time in which at least one was under way, “exposed” what compute waited of it, “at"
        f" least” what no order of the transfers could have hidden. Memory is that of the rank"
        f" that has most.",
        _agreement(profile),
    ]
    picture = Picture(
        name="modes",
        caption="The same steps in each mode.",
        alt="Bars of step time, bytes sent, exposed time and memory for each mode",
        draw=partial(_draw_modes, profile.modes),
        phone=Size(360, 430, 12),
    )
    return Section(
        title="The modes side by side" if len(profile.modes) > 1 else "The mode",
        texts=tuple(text for text in texts if text),
        table=Table(columns, tuple(_mode_row(mode) for mode in profile.modes)),
        pictures=(picture,),
    )


def _agreement(profile: Profile) -> str:
    if len(profile.modes) == 1:
        return ""
    difference = profile.largest_loss_difference
    if not math.isfinite(difference):
        return "The losses differ: not all modes have a finite one in every step."
    if difference == 0:
        return "The losses of all modes are equal to the last bit in every step."
    return f"The losses of all modes agree within {difference:.1e} of their size in every step."


def _mode_row(mode: ModeProfile) -> tuple[str, ...]:
    s = mode.summary
    return (
        mode.mode,
        _loss(mode),
        ms(s.step_ms),
        mib(s.sent_bytes),
        ms(s.comm_ms),
        ms(s.exposed_ms),
        f"{s.exposed_share:.0%}",
        ms(s.bound_ms),
        f"{mode.peak_memory_gib:.2f}",
        str(mode.tensor),
        str(mode.weight),
    )


def _loss(mode: ModeProfile) -> str:
    last = mode.losses[-1]
    return "not finite" if last is None else f"{last:.4f}"


_QUANTITIES: tuple[tuple[str, Callable[[ModeProfile], float], Callable[[float], str]], ...] = (
    ("step (ms)", lambda mode: mode.summary.step_ms, ms),
    ("sent (MiB)", lambda mode: mode.summary.sent_bytes / 2**20, "{:,.2f}".format),
    ("exposed (ms)", lambda mode: mode.summary.exposed_ms, ms),
    ("memory (GiB)", lambda mode: mode.peak_memory_gib, "{:.2f}".format),
)
"""What the modes are compared by: its name, the number, and the number as text."""


def _draw_modes(modes: Sequence[ModeProfile], size: Size) -> Figure:
    """Bars from zero, so that their lengths compare, each with its number above it."""
    figure = new_figure(size)
    rows, columns = (1, len(_QUANTITIES)) if size.width > size.height else (2, 2)
    names = [mode.mode for mode in modes]
    colors = [_LINES.get(name, _OTHER_LINE).color for name in names]
    for place, (title, number, text) in enumerate(_QUANTITIES, start=1):
        axes = figure.add_subplot(rows, columns, place)
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
        " black mark is what had to be exposed at least.",
        alt="Bars of hidden and exposed communication time for each mode",
        draw=partial(_draw_exposed, profile.modes),
        wide=Size(1080, 110 + 58 * len(profile.modes), 13),
        phone=Size(360, 130 + 58 * len(profile.modes), 12),
    )
    columns = (
        Column("mode"),
        *numbers("exposed (ms)", "other ranks (ms)", "at least (ms)"),
        *numbers("first gather (ms)", "last reduction (ms)", "chain (ms)", "excess (ms)"),
    )
    rows = tuple(_bound_row(mode) for mode in profile.modes)
    text = (
        "“Other ranks” is the part of what is exposed in which another rank had not come to the"
        " transfer yet. “At least” is what no order of the transfers could hide: the first gather"
        " of a step and its last reduction, the chain of transfers that the next computation needs"
        " at once, and the excess by which all others are longer than the compute beside them."
    )
    return Section(
        title="Exposed against hidden",
        texts=(text,),
        table=Table(columns, rows),
        pictures=(picture,),
    )


def _bound_row(mode: ModeProfile) -> tuple[str, ...]:
    s = mode.summary
    parts = (
        s.exposed_ms,
        _others_ms(mode),
        s.bound_ms,
        s.first_edge_ms,
        s.last_edge_ms,
        s.chain_ms,
        s.excess_ms,
    )
    return mode.mode, *(ms(part) for part in parts)


def _others_ms(mode: ModeProfile) -> float:
    """The exposed time another rank was waited for, in the step and mean of the summary."""
    per_rank = [
        sum(collective.others_ms for collective in rank.timeline.collectives) for rank in mode.ranks
    ]
    return min(mode.summary.exposed_ms, sum(per_rank) / len(per_rank))


def _draw_exposed(modes: Sequence[ModeProfile], size: Size) -> Figure:
    names = [mode.mode for mode in modes]
    figure, axes = new_lanes(size, names, xlabel="time in a step (ms)", top=0.7)
    longest = max(max(m.summary.comm_ms, m.summary.exposed_ms) for m in modes) or 1.0
    for row, mode in enumerate(modes):
        s = mode.summary
        others = _others_ms(mode)
        hidden = max(0.0, s.comm_ms - s.exposed_ms)
        begin = 0.0
        lengths = s.exposed_ms - others, others, hidden
        for length, look in zip(lengths, (_MOVING, _OTHERS, _HIDDEN), strict=True):
            axes.barh(row, length, left=begin, color=look.color, hatch=look.hatch, **_BAR)
            begin += length
        axes.plot([s.bound_ms] * 2, [row - 0.25, row + 0.36], color=BLACK, linewidth=3)
        text = f"{ms(s.exposed_ms)} ms exposed, {s.exposed_share:.0%} of the step"
        axes.text(0, row - 0.4, text, ha="left", va="center", fontsize="small")
    axes.set_xlim(0, longest * 1.03)
    handles = [
        key("exposed, moving", _MOVING),
        key("exposed, other ranks", _OTHERS),
        key("hidden", _HIDDEN),
        Patch(facecolor=BLACK, label="at least"),
    ]
    legend_above(axes, columns=4 if size.width > 2 * PHONE.width else 2, handles=handles)
    return figure


def kinds_section(profile: Profile) -> Section:
    """The transfers of each mode by kind."""
    columns = (
        Column("mode"),
        Column("kind"),
        *numbers("number", "sent (MiB)", "under way (ms)", "exposed (ms)"),
    )
    rows = tuple(
        (
            mode.mode,
            kind_name(kind),
            f"{t.num_transfers:,g}",
            mib(t.sent_bytes),
            ms(t.comm_ms),
            ms(t.exposed_ms),
        )
        for mode in profile.modes
        for kind, t in mode.summary.by_kind.items()
    )
    return Section(title="By kind of transfer", table=Table(columns, rows))


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


def _draw_memory(modes: Sequence[ModeProfile], size: Size) -> Figure:
    figure, axes = new_axes(size, xlabel="time since the step began (ms)", ylabel="memory (GiB)")
    for mode in modes:
        rank = max(mode.ranks, key=lambda rank: rank.peak_memory_gib)
        samples = rank.timeline.memory
        line = _LINES.get(mode.mode, _OTHER_LINE)
        axes.plot(
            [sample.at_ms - rank.timeline.begin_ms for sample in samples],
            [sample.gib for sample in samples],
            **line._asdict(),
            markersize=5,
            linewidth=1.8,
            label=f"{mode.mode} (rank {rank.rank})",
        )
    axes.update_datalim([(0, 0)])
    axes.margins(x=0.01, y=0.08)  # for the whole of the marks at the edges
    axes.set_ylim(bottom=0)
    legend_above(axes, columns=4 if size.width > size.height * 2 else 2)
    return figure
