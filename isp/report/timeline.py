"""The timeline of one step of one rank: compute, waits, and what was on each channel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from isp.parallel.phase import Phase
from isp.profile import Collective, ComputeSpan, ModeProfile, RankProfile, StepTimeline
from isp.report.page import Section, kind_name, mib, moment, ms
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
    choices = [_choice(mode, rank) for mode in modes for rank in _chosen_ranks(mode)]
    texts = (
        "Of one rank, from top to bottom. A black line below a transfer leads from its launch to"
        " the time it could begin, behind others of its lane.",
    )
    return Section(
        title="Timeline of one step",
        texts=texts,
        facts=_lanes_of(modes),
        choose_by=("mode", "rank"),
        choices=tuple(choices),
    )


def _lanes_of(modes: Sequence[ModeProfile]) -> tuple[tuple[str, str], ...]:
    """The lanes of any timeline, with what they are."""
    timelines = [rank.timeline for mode in modes for rank in mode.ranks]
    seen = {channel for timeline in timelines for channel in _channels(timeline)}
    return tuple((n, text) for n, text in _LANES.items() if n in {_COMPUTE, _WAITS, *seen})


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


def _channels(timeline: StepTimeline) -> list[str]:
    return list(dict.fromkeys(c.channel for c in sorted(timeline.collectives, key=_by_size)))


def _by_size(collective: Collective) -> tuple[bool, str]:
    return collective.channel != "weight", collective.channel


def _draw(timeline: StepTimeline) -> Figure:
    lanes = [_COMPUTE, _WAITS, *_channels(timeline)]
    width = min(_WIDEST, max(WIDTH, _BAR_WIDTH * len(timeline.collectives)))
    figure, axes = new_lanes(
        lanes,
        xlabel="time since the step began (ms)",
        top=0.85,
        width=width,
        height=110 + _LANE * len(lanes),
    )
    rows = {lane: row for row, lane in enumerate(lanes)}
    axes.set_xlim(0, timeline.end_ms - timeline.begin_ms)
    _phase_names(axes, timeline, width)
    for span in timeline.spans:
        _compute_bar(axes, span, timeline, width)
    for collective in timeline.collectives:
        _transfer_bar(axes, collective, timeline, rows[collective.channel])
        if collective.exposed_ms > 0:
            _wait_bar(axes, collective, timeline)
    _legend(axes, timeline)
    return figure


def _bar(axes: Axes, *, row: int, begin: float, end: float, look: Look, hover: str) -> None:
    add_bar(axes, begin, end, top=row - 0.36, height=0.72, look=look, hover=hover)


def _compute_bar(axes: Axes, span: ComputeSpan, timeline: StepTimeline, width: float) -> None:
    begin, end = span.begin_ms - timeline.begin_ms, span.end_ms - timeline.begin_ms
    what = span.phase if span.block == span.phase else f"{span.phase} of {span.block}"
    hover = f"{what}: {ms(end - begin)} ms, waits included"
    look = _PHASES.get(span.phase, _OTHER_PHASE)
    _bar(axes, row=0, begin=begin, end=end, look=look, hover=hover)
    name = span.block.removeprefix("layers.")
    if _fits(name, end - begin, timeline, width):
        behind = {"facecolor": look.color, "edgecolor": "none", "pad": 1.5}  # over the hatching
        middle = (begin + end) / 2
        axes.text(middle, 0, name, ha="center", va="center", clip_on=True, bbox=behind)


def _fits(text: str, length_ms: float, timeline: StepTimeline, width: float) -> bool:
    pixels = length_ms / (timeline.end_ms - timeline.begin_ms) * (width - 90)
    return len(text) * FONT * 0.68 < pixels


def _phase_names(axes: Axes, timeline: StepTimeline, width: float) -> None:
    """The name of each phase above its part of the step, where there is room for it."""
    for phase, group in groupby(timeline.spans, key=lambda span: _phase_family(span.phase)):
        spans = list(group)
        begin, end = spans[0].begin_ms - timeline.begin_ms, spans[-1].end_ms - timeline.begin_ms
        if _fits(phase, end - begin, timeline, width):
            axes.text((begin + end) / 2, -0.6, phase, ha="center", va="center", color=Color.GREY)


def _phase_family(phase: Phase) -> Phase:
    return Phase.BACKWARD if phase is Phase.RECOMPUTE else phase


def _transfer_bar(axes: Axes, collective: Collective, timeline: StepTimeline, row: int) -> None:
    zero = timeline.begin_ms
    launch, start, end = (
        max(0.0, t - zero) for t in (collective.launch_ms, collective.start_ms, collective.end_ms)
    )
    if start > launch:
        at = [row + 0.42] * 2
        axes.plot([launch, start], at, color=Color.BLACK, linewidth=2, solid_capstyle="butt")
        axes.plot(launch, at[0], color=Color.BLACK, marker="|", markersize=7, markeredgewidth=1.6)
    look = _KINDS.get(collective.kind, _OTHER_KIND)
    _bar(axes, row=row, begin=start, end=end, look=look, hover=_describe(collective, zero))


def _wait_bar(axes: Axes, collective: Collective, timeline: StepTimeline) -> None:
    begin = collective.wait_ms - timeline.begin_ms
    hover = f"waited {ms(collective.exposed_ms)} ms for {_describe(collective, timeline.begin_ms)}"
    _bar(axes, row=1, begin=begin, end=begin + collective.exposed_ms, look=_WAIT, hover=hover)


def _describe(c: Collective, zero: float) -> str:
    return (
        f"{kind_name(c.kind)} of {c.label}, {mib(c.sent_bytes)} MiB over {c.channel}: launched at"
        f" {moment(c.launch_ms - zero)}, on its way {moment(c.start_ms - zero)} to"
        f" {moment(c.end_ms - zero)} ms, waited for {ms(c.exposed_ms)} ms"
    )


def _legend(axes: Axes, timeline: StepTimeline) -> None:
    kinds = dict.fromkeys(c.kind for c in timeline.collectives)
    handles: list[Artist] = [key("waiting", _WAIT)]
    handles += [key(kind_name(kind), _KINDS.get(kind, _OTHER_KIND)) for kind in kinds]
    handles.append(Line2D([], [], color=Color.BLACK, linewidth=2, label="launched, not begun"))
    legend_above(axes, handles)
