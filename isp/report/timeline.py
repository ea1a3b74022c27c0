"""The timeline of one step of one rank: compute, waits, and what was on each channel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from isp.parallel.phase import Phase
from isp.profile import Collective, ModeProfile, RankProfile, StepTimeline
from isp.report.page import Section, kind_name, mib, ms
from isp.report.style import (
    FONT,
    WIDTH,
    Color,
    Look,
    Picture,
    add_bar,
    key,
    legend_above,
    new_lanes,
)

__all__ = ["timeline_section"]

_MOST_RANKS = 8
_LANE = 52
"""Pixels."""
_BAR_WIDTH = 7
"""Pixels that a collective gets on the mean, where there are so many that the page must scroll."""
_WIDEST = 6000


# Without dots and circles: each copy of such a hatch takes 100 kB of a page.
_KINDS = {
    "all_gather": Look(Color.SKY),
    "reduce_scatter": Look(Color.GREEN, "///"),
    "all_to_all": Look(Color.ORANGE, "\\\\\\"),
    "all_reduce": Look(Color.PURPLE, "xxx"),
    "broadcast": Look(Color.BLUE, "|||"),
    "to_host": Look(Color.BLUE, "///"),
    "from_host": Look(Color.BLUE, "\\\\\\"),
}
_WAIT = Look(Color.VERMILLION)
_OTHER_KIND = Look(Color.BLUE, "+++")
_PHASES = {
    Phase.FORWARD: Look("#dcdcdc"),
    Phase.LOSS: Look("#f4f4f4"),
    Phase.BACKWARD: Look("#b4b4b4"),
    Phase.RECOMPUTE: Look("#cccccc", "///"),
    Phase.OPTIMIZER: Look("#ececec"),
}
_OTHER_PHASE = Look("#ffffff")
_WAITS = "waits"
_COMPUTE = "compute"
_LANES = {
    _COMPUTE: "the part of the model that is computed, by the number of its layer",
    _WAITS: "compute waits for a transfer",
    "weight": "ranks that share one copy of the weights",
    "weight_reduce": "the same ranks, for gradients",
    "expert_weight": "those of them that gather the same experts",
    "expert_weight_reduce": "the same ranks, for gradients",
    "expert": "those of them with different experts, which send each other tokens",
    "tensor": "ranks that share one sequence",
    "head": "those of them that exchange tokens for heads",
    "context": "those of them with the same heads",
    "data": "ranks with the same part of other sequences",
    "weight_data": "ranks with the same part of the weights",
    "zero1": "ranks that share the optimizer states of a part of the weights",
    "stage": "all ranks of a pipeline stage",
    "pipeline": "ranks at the same place of each stage",
    "embedding": "the first and the last stage, which share tied embeddings",
    "world": "all ranks",
    "host": "all ranks, in CPU memory",
    "offload": "this rank's copies to host memory and back",
}
"""Content of each lane; those of transfers are groups of ranks."""


def timeline_section(modes: Sequence[ModeProfile]) -> Section:
    """The same step in each mode and on each rank, one shown at a time, the first mode first."""
    seen = {c.channel for mode in modes for rank in mode.ranks for c in rank.timeline.collectives}
    lanes = _COMPUTE, _WAITS, *seen
    text = (
        "Of one rank, from top to bottom. A black line below a transfer leads from its launch to"
        " the time it could begin, behind others of its lane."
    )
    return Section(
        title="Timeline of one step",
        texts=(text,),
        facts=tuple((lane, what) for lane, what in _LANES.items() if lane in lanes),
        choose_by=("mode", "rank"),
        choices=tuple(_choice(mode, rank) for mode in modes for rank in _chosen_ranks(mode)),
    )


def _chosen_ranks(mode: ModeProfile) -> list[RankProfile]:
    """All ranks, or the first ones and those that wait least and most where they are many."""
    if len(mode.ranks) <= _MOST_RANKS:
        return list(mode.ranks)
    by_exposed = sorted(mode.ranks, key=lambda rank: _exposed(rank.timeline))
    ordered = [by_exposed[-1], by_exposed[0], *mode.ranks]
    chosen = list(dict.fromkeys(rank.rank for rank in ordered))[:_MOST_RANKS]
    return [rank for rank in mode.ranks if rank.rank in chosen]


def _exposed(timeline: StepTimeline) -> float:
    return sum(c.exposed_ms for c in timeline.collectives)


def _choice(mode: ModeProfile, rank: RankProfile) -> tuple[tuple[str, ...], Picture]:
    timeline = rank.timeline
    count = len(timeline.collectives)
    length = timeline.end_ms - timeline.begin_ms
    caption = (
        f"{mode.mode}, rank {rank.rank}: a step of {ms(length)} ms with {count} transfers, waited"
        f" for {ms(_exposed(timeline))} ms."
    )
    picture = Picture(
        name=f"timeline-{mode.mode}-rank{rank.rank}",
        caption=caption,
        alt=f"Timeline of one step of rank {rank.rank} in {mode.mode} mode",
        draw=partial(_draw, timeline),
        has_file=rank is mode.ranks[0],
    )
    return (mode.mode, str(rank.rank)), picture


def _draw(timeline: StepTimeline) -> Figure:
    channels = {c.channel for c in timeline.collectives}
    lanes = [_COMPUTE, _WAITS, *sorted(channels, key=lambda name: (name != "weight", name))]
    width = min(_WIDEST, max(WIDTH, _BAR_WIDTH * len(timeline.collectives)))
    height = 110 + _LANE * len(lanes)
    xlabel = "time since the step began (ms)"
    figure, axes = new_lanes(lanes, xlabel=xlabel, top=0.85, width=width, height=height)
    zero, length = timeline.begin_ms, timeline.end_ms - timeline.begin_ms
    axes.set_xlim(0, length)

    def name(text: str, lane: float, begin: float, end: float, **style: Any) -> None:
        """Write a name into its part of the step if there is room for it."""
        if len(text) * FONT * 0.68 < (end - begin) / length * (width - 90):
            place = (begin + end) / 2 - zero, lane
            axes.text(*place, text, ha="center", va="center", clip_on=True, **style)

    for phase, group in groupby(timeline.spans, key=lambda span: _phase_family(span.phase)):
        spans = list(group)
        name(phase, -0.6, spans[0].begin_ms, spans[-1].end_ms, color=Color.GREY)
    for span in timeline.spans:
        what = span.phase if span.block == span.phase else f"{span.phase} of {span.block}"
        hover = f"{what}: {ms(span.end_ms - span.begin_ms)} ms, waits included"
        look = _PHASES.get(span.phase, _OTHER_PHASE)
        _bar(axes, 0, span.begin_ms - zero, span.end_ms - zero, look, hover)
        behind = {"facecolor": look.color, "edgecolor": "none", "pad": 1.5}  # over the hatching
        name(span.block.removeprefix("layers."), 0, span.begin_ms, span.end_ms, bbox=behind)
    for collective in timeline.collectives:
        _draw_transfer(axes, collective, zero, lanes.index(collective.channel))
    kinds = dict.fromkeys(c.kind for c in timeline.collectives)
    handles: list[Artist] = [key("waiting", _WAIT)]
    handles += [key(kind_name(kind), _KINDS.get(kind, _OTHER_KIND)) for kind in kinds]
    handles.append(Line2D([], [], color=Color.BLACK, linewidth=2, label="launched, not begun"))
    legend_above(axes, handles)
    return figure


def _phase_family(phase: Phase) -> Phase:
    return Phase.BACKWARD if phase is Phase.RECOMPUTE else phase


def _draw_transfer(axes: Axes, c: Collective, zero: float, lane: int) -> None:
    """A transfer, what it waited behind others, and what compute waited for it."""
    launch, start, end = (max(0.0, t - zero) for t in (c.launch_ms, c.start_ms, c.end_ms))
    if start > launch:
        at = [lane + 0.42] * 2
        axes.plot([launch, start], at, color=Color.BLACK, linewidth=2, solid_capstyle="butt")
        axes.plot(launch, at[0], color=Color.BLACK, marker="|", markersize=7, markeredgewidth=1.6)
    what = (
        f"{kind_name(c.kind)} of {c.label}, {mib(c.sent_bytes)} MiB over {c.channel}: launched at"
        f" {c.launch_ms - zero:.1f}, on its way {c.start_ms - zero:.1f} to {c.end_ms - zero:.1f}"
        f" ms, waited for {ms(c.exposed_ms)} ms"
    )
    _bar(axes, lane, start, end, _KINDS.get(c.kind, _OTHER_KIND), what)
    if c.exposed_ms > 0:
        begin, hover = c.wait_ms - zero, f"waited {ms(c.exposed_ms)} ms for {what}"
        _bar(axes, 1, begin, begin + c.exposed_ms, _WAIT, hover)


def _bar(axes: Axes, lane: int, begin: float, end: float, look: Look, hover: str) -> None:
    add_bar(axes, begin, end, top=lane - 0.36, height=0.72, look=look, hover=hover)
