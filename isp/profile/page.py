"""The page of a profile: one HTML file that refers to no other, for a window of any width."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from isp.profile import table as tables
from isp.profile.schema import Cause, ModeProfile, Profile, RankProfile
from isp.profile.table import Table
from isp.profile.timeline import LANES, PATTERNS, draw_timeline, lanes_of, legend, ms
from isp.utils.files import write_whole
from isp.utils.text import redacted

__all__ = ["facts", "listing", "page", "profile_page", "section", "table", "write_page"]

# -- the parts of a page; each returns HTML, and escapes the texts that it gets ----------------

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
# Shows one figure of `.choices` at a time, and the text of the bar that was pointed at.
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
    """Return a table in a box that scrolls; one with prose is a list where the window is narrow."""
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
    return "".join(f"<p>{_prose(text)}</p>\n" for text in texts)


def _prose(text: str) -> str:
    """Return `text` with what is between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


# -- the page of a profile ---------------------------------------------------------------------

_MOST_RANKS = 8
"""Ranks whose timelines are shown, at most, for each mode."""
_WHY = {
    Cause.FIRST: "as no computation runs before it",
    Cause.LAST: "as no computation runs after it",
    Cause.AT_ONCE: "before the computation can continue",
    Cause.COULD_HIDE: "by an earlier launch, or more compute beside them",
    Cause.OTHER_RANKS: "because not all come to a transfer at the same time",
}


def profile_page(profile: Profile) -> str:
    """Return the page of `profile`, which begins with isp where it was measured."""
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
    told = [tables.head(profile), *tables.EXPLANATION.replace("\nonce", " once").split("\n")]
    if several:
        told.append(tables.losses(profile))
    title = "The modes side by side" if several else "The mode"
    return section(title, _texts(*told), table(tables.modes(profile)))


def _plan_section(plan: str) -> str:
    text = (
        "Where each weight is gathered, waited for and freed in a step; “ahead” is the number of"
        " uses of weights from the gather to the wait. `isp prefetch CONFIG` prints this for any"
        " configuration."
    )
    return section("The plan of the weights", _texts(text), listing(plan))


def _waits_section(mode: ModeProfile, *, at_most: int) -> str:
    """Return the tensors that were waited for longest in `mode`."""
    title = f"The worst waits in {mode.mode}"
    if not mode.waits:
        return section(title, _texts("Nothing was waited for."))
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
    return section(title, _texts(text), table(Table([titles, *advised], 0, 3)))


def _timeline_section(modes: Sequence[ModeProfile]) -> str:
    """Return the same step in each mode and on each rank, of which one is shown at a time."""
    # The same ranks of every mode, as the menus offer each pair of a mode and a rank.
    chosen = set().union(*map(_chosen_ranks, modes))
    shown = [(mode, rank) for mode in modes for rank in mode.ranks if rank.rank in chosen]
    lanes = {lane for _, rank in shown for lane in lanes_of(rank.timeline)}
    text = (
        "Of one rank, from top to bottom. A black line below a transfer leads from its launch to"
        " the time it could begin, behind others of its lane."
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
    """Return all ranks, or the first ones and those that wait least and most of many."""
    if len(mode.ranks) <= _MOST_RANKS:
        return {rank.rank for rank in mode.ranks}

    def exposed(rank: RankProfile) -> float:
        return sum(c.exposed_ms for c in rank.timeline.collectives)

    ordered = [max(mode.ranks, key=exposed), min(mode.ranks, key=exposed), *mode.ranks]
    return set(list(dict.fromkeys(rank.rank for rank in ordered))[:_MOST_RANKS])
