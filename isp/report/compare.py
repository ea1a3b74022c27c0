"""The modes side by side: what is equal, and what each one costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from isp.profile import ModeProfile, Profile
from isp.report.page import Column, Section, Table
from isp.report.style import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PHONE,
    PURPLE,
    SKY,
    VERMILLION,
    Picture,
    Size,
    new_axes,
    new_figure,
)
from isp.report.words import kind_name, mib, ms

__all__ = ["exposed_section", "kinds_section", "mode_color", "modes_section", "others_ms"]

_BAR: dict[str, Any] = {"edgecolor": "#333333", "linewidth": 0.6, "height": 0.5}
_COLORS = {"mtp": ORANGE, "msp": GREEN, "fsp": PURPLE, "isp": BLUE}


def mode_color(mode: str) -> str:
    """The colour of a mode in every picture, beside its name."""
    return _COLORS.get(mode, BLACK)


def modes_section(profile: Profile) -> Section:
    """Loss, time, bytes, exposed time and memory of each mode; all but loss as a picture, too."""
    columns = (
        Column("mode"),
        Column("loss", numeric=True),
        Column("step (ms)", numeric=True),
        Column("sent (MiB)", numeric=True),
        Column("transfers (ms)", numeric=True),
        Column("exposed (ms)", numeric=True),
        Column("of the step", numeric=True),
        Column("at least (ms)", numeric=True),
        Column("memory (GiB)", numeric=True),
        Column("tensor (ranks)", numeric=True),
        Column("weight (ranks)", numeric=True),
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


class _Quantity(NamedTuple):
    title: str
    of: Callable[[ModeProfile], float]
    text: Callable[[ModeProfile], str]


_QUANTITIES = (
    _Quantity("step (ms)", lambda m: m.summary.step_ms, lambda m: ms(m.summary.step_ms)),
    _Quantity(
        "sent (MiB)", lambda m: m.summary.sent_bytes / 2**20, lambda m: mib(m.summary.sent_bytes)
    ),
    _Quantity("exposed (ms)", lambda m: m.summary.exposed_ms, lambda m: ms(m.summary.exposed_ms)),
    _Quantity("memory (GiB)", lambda m: m.peak_memory_gib, lambda m: f"{m.peak_memory_gib:.2f}"),
)


def _draw_modes(modes: Sequence[ModeProfile], size: Size) -> Figure:
    figure = new_figure(size)
    rows, columns = (1, len(_QUANTITIES)) if size.width > size.height else (2, 2)
    for place, quantity in enumerate(_QUANTITIES, start=1):
        axes = figure.add_subplot(rows, columns, place)
        _draw_quantity(axes, modes, quantity)
    return figure


def _draw_quantity(axes: Axes, modes: Sequence[ModeProfile], quantity: _Quantity) -> None:
    """Bars from zero, so that their lengths compare, each with its number above it."""
    names, values = [mode.mode for mode in modes], [quantity.of(mode) for mode in modes]
    bars = axes.bar(names, values, color=[mode_color(name) for name in names], width=0.75)
    axes.bar_label(bars, [quantity.text(mode) for mode in modes], padding=2, fontsize="x-small")
    axes.set_title(quantity.title)
    axes.set_ylim(0, max(max(values) * 1.12, 1e-9))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)


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
    numbers = (
        "exposed (ms)",
        "other ranks (ms)",
        "at least (ms)",
        "first gather (ms)",
        "last reduction (ms)",
        "chain (ms)",
        "excess (ms)",
    )
    columns = (Column("mode"), *(Column(title, numeric=True) for title in numbers))
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
        others_ms(mode),
        s.bound_ms,
        s.first_edge_ms,
        s.last_edge_ms,
        s.chain_ms,
        s.excess_ms,
    )
    return mode.mode, *(ms(part) for part in parts)


def others_ms(mode: ModeProfile) -> float:
    """The exposed time another rank was waited for, in the step and mean of the summary."""
    per_rank = [
        sum(collective.others_ms for collective in rank.timeline.collectives) for rank in mode.ranks
    ]
    return min(mode.summary.exposed_ms, sum(per_rank) / len(per_rank))


def _draw_exposed(modes: Sequence[ModeProfile], size: Size) -> Figure:
    figure, axes = new_axes(size, xlabel="time in a step (ms)", ylabel="")
    longest = max(max(m.summary.comm_ms, m.summary.exposed_ms) for m in modes) or 1.0
    for row, mode in enumerate(modes):
        s = mode.summary
        others = others_ms(mode)
        hidden = max(0.0, s.comm_ms - s.exposed_ms)
        axes.barh(row, s.exposed_ms - others, color=VERMILLION, hatch="///", **_BAR)
        axes.barh(row, others, left=s.exposed_ms - others, color=ORANGE, hatch="xxx", **_BAR)
        axes.barh(row, hidden, left=s.exposed_ms, color=SKY, **_BAR)
        axes.plot([s.bound_ms] * 2, [row - 0.25, row + 0.36], color=BLACK, linewidth=3)
        text = f"{ms(s.exposed_ms)} ms exposed, {s.exposed_share:.0%} of the step"
        axes.text(0, row - 0.4, text, ha="left", va="center", fontsize="small")
    axes.set_yticks(range(len(modes)), [mode.mode for mode in modes])
    axes.set_xlim(0, longest * 1.03)
    axes.set_ylim(len(modes) - 0.5, -0.7)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    handles = [
        Patch(facecolor=VERMILLION, edgecolor="#333333", hatch="///", label="exposed, moving"),
        Patch(facecolor=ORANGE, edgecolor="#333333", hatch="xxx", label="exposed, other ranks"),
        Patch(facecolor=SKY, edgecolor="#333333", label="hidden"),
        Patch(facecolor=BLACK, label="at least"),
    ]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4 if size.width > 2 * PHONE.width else 2,
    )
    return figure


def kinds_section(profile: Profile) -> Section:
    """The transfers of each mode by kind."""
    columns = (
        Column("mode"),
        Column("kind"),
        Column("number", numeric=True),
        Column("sent (MiB)", numeric=True),
        Column("under way (ms)", numeric=True),
        Column("exposed (ms)", numeric=True),
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
