"""The HTML page of a profile: a single file without references, for windows of any width."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from isp.core.mesh.phase import Phase
from isp.profile import table as tables
from isp.profile.schema import Cause, Collective, ModeProfile, Profile, RankProfile, StepTimeline
from isp.profile.table import Table
from isp.utils.files import write_whole
from isp.utils.text import redacted

__all__ = [
    "LANES",
    "PATTERNS",
    "draw_timeline",
    "facts",
    "lanes_of",
    "legend",
    "listing",
    "ms",
    "page",
    "profile_page",
    "section",
    "table",
    "write_page",
]

# -- parts of a page; each function returns HTML and escapes its texts -------------------------

# The body never scrolls sideways: words break, and what is wider has class `scroll`. No text has
# less than 12 pixels; those of drawings are not scaled.
_STYLE = """
  :root { color-scheme: light; --line: #d9d9d9; --soft: #f4f4f2; --quiet: #555; }
  * { box-sizing: border-box; }
  body { margin: 0 auto; padding: 24px 20px 64px; max-width: 1120px; background: #fff;
    color: #111; font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
  h1 { font-size: 26px; line-height: 1.25; margin: 0 0 12px; }
  h2 { font-size: 20px; margin: 40px 0 8px; }
  .lead { font-size: 18px; border-left: 5px solid #d55e00; padding: 2px 0 2px 14px;
    margin: 0 0 20px; }
  p, ul { max-width: 75ch; }
  p { margin: 8px 0; }
  figure { margin: 12px 0; }
  .scroll { overflow-x: auto; overflow-wrap: normal; scrollbar-width: thin; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 15px; }
  th, td { padding: 5px 11px; text-align: left; vertical-align: top;
    border-bottom: 1px solid var(--line); }
  thead th { border-bottom: 2px solid #777; vertical-align: bottom; }
  th:first-child, td:first-child { position: sticky; left: 0; background: #fff; }
  th.number, td.number { text-align: right; white-space: nowrap; }
  td.prose { min-width: 240px; overflow-wrap: anywhere; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 8px 0; }
  dt { color: var(--quiet); }
  dd { margin: 0; white-space: pre-line; }
  pre { background: var(--soft); padding: 10px 13px; max-height: 480px; overflow: auto;
    font: 13px/1.4 ui-monospace, "DejaVu Sans Mono", monospace; }
  code { background: var(--soft); padding: 2px 5px;
    font: 14px ui-monospace, "DejaVu Sans Mono", monospace; }
  .timeline { display: flex; width: max-content; max-width: 100%; }
  .timeline svg { flex: none; display: block; font-size: 12px; }
  .timeline text { pointer-events: none; paint-order: stroke; stroke: #fff; stroke-width: 2px; }
  .lanes { position: sticky; left: 0; background: #fff; padding-right: 8px; font-size: 12px;
    line-height: 35px; }
  .legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0;
    max-width: none; font-size: 14px; }
  .menus { display: flex; flex-wrap: wrap; gap: 16px; margin: 12px 0; }
  [hidden] { display: none !important; }
  select { font: inherit; padding: 5px 8px; min-height: 38px; }
  .detail { min-height: 48px; padding: 8px 13px; background: var(--soft); max-width: none; }
  .command { color: var(--quiet); font-size: 14px; max-width: none; margin-top: 40px; }
  @media (max-width: 720px) {
    body { padding: 16px 15px 48px; }
    h1 { font-size: 22px; }
    dl { grid-template-columns: 1fr; gap: 0; }
    dd { margin-bottom: 7px; }
    .stacked, .stacked tbody { display: block; }
    .stacked thead { display: none; }
    .stacked tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
    .stacked td, .stacked td.number { display: grid; grid-template-columns: 100px 1fr;
      padding: 1px 0; border: 0; text-align: left; white-space: normal; min-width: 0;
      position: static; }
    .stacked td::before { content: attr(data-title); color: var(--quiet); }
  }
"""
# Shows one figure of `.choices` at a time, and the text of the bar under the mouse.
_SCRIPT = """
for (const box of document.querySelectorAll(".choices")) {
  const figures = [...box.querySelectorAll("figure")], menus = [...box.querySelectorAll("select")];
  const show = () => {
    const chosen = JSON.stringify(menus.map((menu) => menu.value));
    for (const figure of figures)
      figure.hidden = JSON.stringify(JSON.parse(figure.dataset.values)) !== chosen;
  };
  JSON.parse(figures[0].dataset.values).forEach((value, i) => { menus[i].value = value; });
  menus.forEach((menu) => menu.addEventListener("change", show));
  box.querySelector(".menus").hidden = false;
  const show_detail = (event) => {
    const title = event.target.querySelector(":scope > title");
    if (title) box.querySelector(".detail").textContent = title.textContent;
  };
  box.addEventListener("click", show_detail);
  box.addEventListener("mouseover", show_detail);
}
"""


def page(*, title: str, lead: str, points: Iterable[str] = (), body: str, command: str = "") -> str:
    """Return the text of a page, which begins with the sentence `lead`, then `points`."""
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    )
    items = "".join(f"<li>{_prose(point)}</li>\n" for point in points)
    listed = f"<ul>\n{items}</ul>\n" if items else ""
    end = f'<p class="command">Command: <code>{escape(command)}</code></p>\n' if command else ""
    script = f"<script>{_SCRIPT}</script>\n" if 'class="choices"' in body else ""
    return (
        f'{head}<h1>{escape(title)}</h1>\n<p class="lead">{_prose(lead)}</p>\n'
        f"{listed}{body}{end}{script}</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return a heading and `parts`, which are HTML."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def facts(named: Iterable[tuple[str, str]]) -> str:
    """Return a list of names with their values."""
    items = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>\n" for name, value in named)
    return f"<dl>\n{''.join(items)}</dl>\n"


def listing(text: str) -> str:
    """Return text in columns, in a box that scrolls."""
    return f'<pre class="scroll" tabindex="0">{escape(text)}</pre>\n'


def table(rows: Table) -> str:
    """Return a table in a box that scrolls; in narrow windows a table with prose becomes a list."""
    titles, *cells = rows.rows
    prose_from = len(titles) if rows.text_from is None else rows.text_from

    def kind(at: int) -> str:
        if at >= prose_from:
            return ' class="prose"'
        return ' class="number"' if at >= rows.text_columns else ""

    def row(texts: Sequence[str]) -> str:
        return "".join(
            f'<td{kind(at)} data-title="{escape(titles[at])}">{escape(text)}</td>'
            for at, text in enumerate(texts)
        )

    head = "".join(f"<th{kind(at)}>{escape(title)}</th>" for at, title in enumerate(titles))
    lines = "".join(f"<tr>{row(texts)}</tr>\n" for texts in cells)
    stacked = ' class="stacked"' if prose_from < len(titles) else ""
    return (
        f'<div class="scroll" tabindex="0"><table{stacked}>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{lines}</tbody>\n</table></div>\n"
    )


def write_page(text: str, file: Path) -> Path:
    """Write the page `text` to `file`, without credentials. Raises OSError if that fails."""
    write_whole(file, redacted(text))
    return file


def _texts(*texts: str) -> str:
    """Return paragraphs of prose."""
    return "".join(f"<p>{_prose(text)}</p>\n" for text in texts)


def _prose(text: str) -> str:
    """Return `text` escaped, with parts in backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


# -- the page of a profile ---------------------------------------------------------------------

_MOST_RANKS = 8
"""Most ranks whose timelines are shown for a mode."""
_WHY = {
    Cause.FIRST: "as no computation runs before it",
    Cause.LAST: "as no computation runs after it",
    Cause.AT_ONCE: "before the computation can continue",
    Cause.COULD_HIDE: "by an earlier launch, or more compute that overlaps with them",
    Cause.OTHER_RANKS: "because not all come to a transfer at the same time",
}


def profile_page(profile: Profile) -> str:
    """Return the page of `profile`; isp mode comes first if it was measured."""
    lead = next((mode for mode in profile.modes if mode.mode == "isp"), profile.modes[0])
    modes = [lead, *(mode for mode in profile.modes if mode is not lead)]
    names = ", ".join(mode.mode for mode in profile.modes)
    measured = (
        ("measured", profile.created),
        ("device", profile.device),
        ("torch", profile.torch),
        *((mode.mode, mode.topology) for mode in profile.modes),
    )
    sections = [
        _modes_section(profile),
        _waits_section(lead, at_most=10),
        _timeline_section(modes),
        *(_waits_section(mode, at_most=5) for mode in modes[1:]),
        *(_plan_section(mode.plan_grid) for mode in profile.modes if mode.plan_grid is not None),
        section("By kind of transfer", table(tables.kinds(profile))),
        section("What was measured", facts(measured), listing(profile.config)),
    ]
    return page(
        title=f"What communication costs: {names} on {profile.world_size} ranks",
        lead=_lead(lead),
        points=_points(profile, lead),
        body="".join(sections),
        command=profile.command,
    )


def _lead(mode: ModeProfile) -> str:
    """Return the first sentence of the page."""
    s = mode.summary
    if not s.num_transfers:
        return f"In {mode.mode} nothing is exposed, because nothing is transferred."
    return (
        f"In {mode.mode}, {s.exposed_share:.0%} of the step is exposed: {ms(s.exposed_ms)} of"
        f" {ms(s.step_ms)} ms."
    )


def _points(profile: Profile, lead: ModeProfile) -> Iterator[str]:
    """Yield sentences on the main cause, the worst wait, and the other modes."""
    causes = lead.exposed_by_cause
    if causes:
        cause, exposed = next(iter(causes.items()))
        yield f"{exposed / sum(causes.values()):.0%} of it in {cause}, {_WHY[cause]}."
    if profile.shared_cores:
        yield f"{profile.shared_cores}, so they wait more for each other than on GPUs."
    if lead.waits:
        worst = lead.waits[0]
        yield (
            f"The worst wait, {ms(worst.exposed_ms)} ms, is for the"
            f" {worst.kind.replace('_', '-')} of {worst.label} in {worst.phase}: {worst.advice}."
        )
    others = [mode for mode in profile.modes if mode is not lead]
    if others:
        shares = (f"{m.mode} {m.summary.exposed_share:.0%}" for m in others)
        yield f"Exposed of the step in the other modes: {', '.join(shares)}."


def _modes_section(profile: Profile) -> str:
    """Return loss, time, bytes, exposed time and memory of each mode."""
    several = len(profile.modes) > 1
    texts = [tables.head(profile), *tables.EXPLANATION.replace("\nonce", " once").split("\n")]
    if several:
        texts.append(tables.losses(profile))
    title = "The modes side by side" if several else "The mode"
    return section(title, _texts(*texts), table(tables.modes(profile)))


def _plan_section(plan: str) -> str:
    """Return the section with the prefetch plan."""
    text = (
        "Where each weight is gathered, waited for and freed in a step. `isp prefetch CONFIG`"
        " prints this for any configuration."
    )
    return section("The plan of the weights", _texts(text), listing(plan))


def _waits_section(mode: ModeProfile, *, at_most: int) -> str:
    """Return the section with the tensors that `mode` waits for longest."""
    title = f"The worst waits in {mode.mode}"
    if not mode.waits:
        return section(title, _texts("Nothing was waited for."))
    text = (
        "In a step of one rank, the mean over all measured steps and ranks, times in milliseconds."
        " “Moving” is the time from when the transfer could begin on every rank, “times” how often"
        " it is sent in a step."
    )
    titles, *rows = tables.waits(mode, at_most).rows
    said = set[str]()
    new = (tables.unsaid(wait.advice, said) for wait in mode.waits)
    advised = (
        [*row[:-1], f"{row[-1]}: {text}" if text else row[-1]]
        for row, text in zip(rows, new, strict=False)
    )
    return section(title, _texts(text), table(Table([titles, *advised], 0, 3)))


def _timeline_section(modes: Sequence[ModeProfile]) -> str:
    """Return the section with one step in each mode and on each rank, one shown at a time."""
    # The same ranks of every mode, since the menus offer all pairs of mode and rank.
    chosen = set().union(*map(_chosen_ranks, modes))
    shown = [(mode, rank) for mode in modes for rank in mode.ranks if rank.rank in chosen]
    lanes = {lane for _, rank in shown for lane in lanes_of(rank.timeline)}
    text = (
        "Of one rank, from top to bottom. A black line below a transfer leads from its launch to"
        " the time it could begin, after others of its lane."
    )
    ranks = map(str, sorted(chosen))
    menus = (
        f"<label>{name} <select>{''.join(f'<option>{escape(value)}</option>' for value in values)}"
        f"</select></label>"
        for name, values in (("mode", [mode.mode for mode in modes]), ("rank", ranks))
    )
    figures = (
        _figure(mode, rank, hidden=bool(number)) for number, (mode, rank) in enumerate(shown)
    )
    return section(
        "Timeline of one step",
        _texts(text),
        facts((lane, what) for lane, what in LANES.items() if lane in lanes),
        f'{PATTERNS}\n<div class="choices">\n',
        f'<div class="menus" hidden>{"".join(menus)}</div>\n{"".join(figures)}',
        '<p class="detail" aria-live="polite">Point at a bar, or tap it, to read what it is.</p>\n',
        "</div>\n",
    )


def _figure(mode: ModeProfile, rank: RankProfile, *, hidden: bool) -> str:
    """Return the drawing of one rank with its caption and legend."""
    timeline = rank.timeline
    exposed = sum(c.exposed_ms for c in timeline.collectives)
    caption = (
        f"{mode.mode}, rank {rank.rank}: a step of {ms(timeline.end_ms - timeline.begin_ms)} ms"
        f" with {len(timeline.collectives)} transfers, waited for {ms(exposed)} ms."
    )
    values = escape(json.dumps([mode.mode, str(rank.rank)]))
    return (
        f'<figure data-values="{values}"{" hidden" if hidden else ""}>\n'
        f"<figcaption>{escape(caption)}</figcaption>\n{legend(timeline)}\n"
        f'<div class="timeline scroll" tabindex="0">{draw_timeline(rank, mode.mode)}</div>\n'
        f"</figure>\n"
    )


def _chosen_ranks(mode: ModeProfile) -> set[int]:
    """Return all ranks, or of many the first ones and those that wait least and most."""
    if len(mode.ranks) <= _MOST_RANKS:
        return {rank.rank for rank in mode.ranks}

    def exposed(rank: RankProfile) -> float:
        return sum(c.exposed_ms for c in rank.timeline.collectives)

    ordered = [max(mode.ranks, key=exposed), min(mode.ranks, key=exposed), *mode.ranks]
    return set(list(dict.fromkeys(rank.rank for rank in ordered))[:_MOST_RANKS])


# -- the timeline of one step of one rank, as an SVG element -----------------------------------


_LANE = 46
"""Pixels of a lane's height, its gap included."""
_TOP = 30
"""Pixels above the first lane, where the phases are named."""
_AXIS = 44
"""Pixels below the last lane."""
_WIDTH = 900
"""Least width of the drawing, in pixels."""
_WIDEST = 6000
"""Largest width of the drawing, in pixels."""
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
"""Description of each lane; lanes of transfers are groups of ranks."""

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
        # The smallest of 1, 2, 5, 10 times a power of ten that is at least 100 pixels wide.
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
        """Yield the names of the phases above their spans; recomputation counts as backward."""
        for phase, group in groupby(timeline.spans, key=lambda span: _phase_family(span.phase)):
            spans = list(group)
            yield self.name(phase, spans[0].begin_ms, spans[-1].end_ms, _TOP - 10)

    def name(self, text: str, begin: float, end: float, y: float) -> str:
        """Return `text` in the middle of a span, or nothing if it does not fit."""
        if len(text) * _LETTER > (end - begin) * self._scale:
            return ""
        x = self._x((begin + end) / 2)
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'

    def transfer(self, c: Collective, lane: int) -> Iterator[str]:
        """Yield the bars of a transfer and of the wait for it, as SVG.

        If the transfer was launched before it was on its way, a line shows the time between.
        """
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
        """Return a bar in `lane`; `hover` is shown under the mouse or after a tap."""
        x, y = self._x(begin), _TOP + lane * _LANE
        width = max(0.0, self._x(end) - x)
        place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{0.76 * _LANE:.0f}"'
        return look.rects(place, f"<title>{escape(hover)}</title>")

    def _x(self, at: float) -> float:
        """Return the horizontal position of a time; times before the step are at the left edge."""
        return max(0.0, at - self._zero) * self._scale


def _phase_family(phase: Phase) -> Phase:
    """Return the phase under which a span's name is shown: recomputation counts as backward."""
    return Phase.BACKWARD if phase is Phase.RECOMPUTE else phase
