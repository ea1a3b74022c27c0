"""The timeline of one step of one rank as an SVG element: compute, waits and transfers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import NamedTuple

from isp.core.mesh.phase import Phase
from isp.profile.schema import Collective, RankProfile, StepTimeline

__all__ = ["LANES", "PATTERNS", "draw_timeline", "lanes_of", "legend", "ms"]

_LANE = 46
"""Pixels of a lane's height, its gap included."""
_TOP = 30
"""Pixels above the first lane, where the phases are named."""
_AXIS = 44
"""Pixels below the last lane."""
_WIDTH = 900
_WIDEST = 6000
_BAR_WIDTH = 7
"""Mean width in pixels of a collective, where many make the timeline wider than `_WIDTH`."""
_LETTER = 7.5
"""Pixels of an average letter of the text in the drawing, which is 12 pixels high."""

_WAITS = "waits"
_COMPUTE = "compute"
LANES = {
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

_HATCHES = {"up": "M0 6L6 0", "down": "M0 0L6 6", "cross": "M0 0L6 6M0 6L6 0", "bars": "M3 0V6"}


class _Look(NamedTuple):
    """Color and hatch of a bar; no two kinds differ by color alone."""

    color: str
    hatch: str = ""

    def rects(self, place: str, inside: str = "") -> str:
        """Return the rectangles of a bar at `place`, its attributes x, y, width and height."""
        bar = f'<rect {place} fill="{self.color}" stroke="#333" stroke-width=".5">{inside}</rect>'
        if not self.hatch:
            return bar
        # The hatch is above the bar: it needs the same text under the mouse.
        return f'{bar}<rect {place} fill="url(#hatch-{self.hatch})">{inside}</rect>'


# Colors: Okabe and Ito 2008, Color Universal Design; phases are gray, as they are the background.
_WAIT = _Look("#d55e00")
_KINDS = {
    "all_gather": _Look("#56b4e9"),
    "reduce_scatter": _Look("#009e73", "up"),
    "all_to_all": _Look("#e69f00", "down"),
    "all_reduce": _Look("#cc79a7", "cross"),
    "broadcast": _Look("#0072b2", "bars"),
    "to_host": _Look("#0072b2", "up"),
    "from_host": _Look("#0072b2", "down"),
}
_OTHER_KIND = _Look("#0072b2", "cross")
_PHASES = {
    Phase.FORWARD: _Look("#dcdcdc"),
    Phase.LOSS: _Look("#f4f4f4"),
    Phase.BACKWARD: _Look("#b4b4b4"),
    Phase.RECOMPUTE: _Look("#cccccc", "up"),
    Phase.OPTIMIZER: _Look("#ececec"),
}
_OTHER_PHASE = _Look("#ffffff")


def _patterns() -> str:
    """Return an invisible SVG element with the hatches that timelines refer to."""
    found = (
        f'<pattern id="hatch-{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path d="{path}" stroke="#222" stroke-width=".8" fill="none"/></pattern>'
        for name, path in _HATCHES.items()
    )
    # Not display: none, with which browsers do not draw the patterns of an SVG element.
    style = 'width="0" height="0" style="position: absolute"'
    return f'<svg {style} aria-hidden="true"><defs>{"".join(found)}</defs></svg>'


PATTERNS = _patterns()


def ms(milliseconds: float) -> str:
    """Return a number such as `12.3`, with three digits where it is below 10."""
    return f"{milliseconds:,.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def lanes_of(timeline: StepTimeline) -> list[str]:
    """Return the lanes from top to bottom: compute, waits, and the channels that are used."""
    channels = {c.channel for c in timeline.collectives}
    return [_COMPUTE, _WAITS, *sorted(channels, key=lambda name: (name != "weight", name))]


def legend(timeline: StepTimeline) -> str:
    """Return the HTML list of what the bars and lines of `timeline` mean."""
    kinds = dict.fromkeys(c.kind for c in timeline.collectives)
    looks = {"waiting": _WAIT}
    looks |= {kind.replace("_", "-"): _KINDS.get(kind, _OTHER_KIND) for kind in kinds}
    place = 'x=".5" y=".5" width="21" height="13"'
    keys = [
        f'<li><svg width="22" height="14" aria-hidden="true">{look.rects(place)}</svg>'
        f" {escape(name)}</li>"
        for name, look in looks.items()
    ]
    line = '<path d="M1 4V11M1 7.5H21" stroke="#000" stroke-width="2"/>'
    line = f'<svg width="22" height="14" aria-hidden="true">{line}</svg>'
    return f'<ul class="legend">{"".join(keys)}<li>{line} launched, not begun</li></ul>'


def draw_timeline(rank: RankProfile, mode: str) -> str:
    """Return an SVG element of a fixed width, and the names of its lanes at its left.

    The names stay in sight where the drawing is wider than the window.
    """
    timeline, lanes = rank.timeline, lanes_of(rank.timeline)
    zero, length = timeline.begin_ms, (timeline.end_ms - timeline.begin_ms) or 1.0
    width = min(_WIDEST, max(_WIDTH, _BAR_WIDTH * len(timeline.collectives)))
    height = _TOP + _LANE * len(lanes) + _AXIS
    drawing = _Drawing(zero, width / length)
    parts = [*drawing.axis(length, height - _AXIS), *drawing.phases(timeline)]
    for span in timeline.spans:
        what = span.phase if span.block == span.phase else f"{span.phase} of {span.block}"
        hover = f"{what}: {ms(span.end_ms - span.begin_ms)} ms, waits included"
        look = _PHASES.get(span.phase, _OTHER_PHASE)
        parts.append(drawing.bar(0, span.begin_ms, span.end_ms, look, hover))
        name, middle = span.block.rpartition("layers.")[2], _TOP + 0.4 * _LANE + 4
        parts.append(drawing.name(name, span.begin_ms, span.end_ms, middle))
    for collective in timeline.collectives:
        parts += drawing.transfer(collective, lanes.index(collective.channel))
    names = "".join(f'<div style="height: {_LANE}px">{escape(lane)}</div>' for lane in lanes)
    label = escape(f"Timeline of one step of rank {rank.rank} in {mode} mode")
    return (
        f'<div class="lanes" style="padding-top: {_TOP}px">{names}</div>'
        f'<svg width="{width + 20}" height="{height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


class _Drawing:
    """Places the times of a step in pixels; `zero` in milliseconds is the left edge."""

    def __init__(self, zero: float, scale: float) -> None:
        self._zero, self._scale = zero, scale

    def axis(self, length: float, bottom: float) -> Iterator[str]:
        """Yield a line and a number about every 100 pixels, and the name of the axis."""
        least = 100 / self._scale
        power = 10.0 ** math.floor(math.log10(least))
        step = next(times * power for times in (1, 2, 5, 10) if times * power >= least)
        for number in range(math.floor(length / step) + 1):
            x = number * step * self._scale
            yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#ddd"/>'
            anchor = "middle" if number else "start"
            text = f"{number * step:,.10g}"
            yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{text}</text>'
        yield f'<text x="0" y="{bottom + 36}">time since the step began (ms)</text>'

    def phases(self, timeline: StepTimeline) -> Iterator[str]:
        """Yield the names of the phases above their spans; recomputing is a part of backward."""
        for phase, group in groupby(timeline.spans, key=lambda span: _phase_family(span.phase)):
            spans = list(group)
            yield self.name(phase, spans[0].begin_ms, spans[-1].end_ms, _TOP - 10)

    def name(self, text: str, begin: float, end: float, y: float) -> str:
        """Return `text` in the middle of a span, or nothing where it has no room."""
        if len(text) * _LETTER > (end - begin) * self._scale:
            return ""
        x = self._x((begin + end) / 2)
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'

    def transfer(self, c: Collective, lane: int) -> Iterator[str]:
        """Yield the bars of a transfer and of the wait for it, and a line to where it began."""
        if c.start_ms > c.launch_ms:
            y = _TOP + (lane + 0.86) * _LANE
            begin, end = self._x(c.launch_ms), self._x(c.start_ms)
            path = f"M{begin:.1f} {y - 4:.1f}v8M{begin:.1f} {y:.1f}H{end:.1f}"
            yield f'<path d="{path}" stroke="#000" stroke-width="2"/>'
        launch, start, end = (t - self._zero for t in (c.launch_ms, c.start_ms, c.end_ms))
        what = (
            f"{c.kind.replace('_', '-')} of {c.label}, {c.sent_bytes / 2**20:,.2f} MiB over"
            f" {c.channel}: launched at {launch:.1f}, on its way {start:.1f} to {end:.1f} ms,"
            f" waited for {ms(c.exposed_ms)} ms"
        )
        yield self.bar(lane, c.start_ms, c.end_ms, _KINDS.get(c.kind, _OTHER_KIND), what)
        if c.exposed_ms > 0:
            hover = f"waited {ms(c.exposed_ms)} ms for {what}"
            yield self.bar(1, c.wait_ms, c.wait_ms + c.exposed_ms, _WAIT, hover)

    def bar(self, lane: int, begin: float, end: float, look: _Look, hover: str) -> str:
        """Return a bar in `lane`, whose text is seen under the mouse or after a tap."""
        x, y = self._x(begin), _TOP + lane * _LANE
        width = max(0.0, self._x(end) - x)
        place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{0.76 * _LANE:.0f}"'
        return look.rects(place, f"<title>{escape(hover)}</title>")

    def _x(self, at: float) -> float:
        """Return the pixel of a time; what began before the step begins at its edge."""
        return max(0.0, at - self._zero) * self._scale


def _phase_family(phase: Phase) -> Phase:
    return Phase.BACKWARD if phase is Phase.RECOMPUTE else phase
