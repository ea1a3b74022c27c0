"""The HTML page of a profile: its summary, numbers, timelines, and windows of any width."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from isp.profile import ModeProfile, Profile, RankProfile
from isp.profile.page import draw_timeline, page, profile_page, section, table
from isp.profile.table import Table
from tests.profile.example import example_profile
from tests.profile.html_page import HtmlPage
from tests.ranks import run_isp

COMMAND = "isp profile job.yaml --nproc 2 --modes mtp,isp"
CONFIG = "model: {preset: tiny, num_layers: 2}\ndata: {source: python-stdlib}\n"
MARKUP = "</title><img src=x>&\"'"
JOB = """
job: {{name: small, dump_folder: {folder}}}
model: {{preset: tiny, hidden_size: 16, num_heads: 2, num_kv_heads: 2, num_layers: 2}}
data: {{source: {folder}/text.txt, seq_len: 16}}
"""


def example() -> Profile:
    """Return the example with its command, and with a label that would be markup if not escaped."""
    profile = replace(
        example_profile(), command=COMMAND, config=CONFIG, shared_cores="2 ranks share 1 core"
    )
    mtp, isp = profile.modes
    wait = replace(mtp.waits[0], label=MARKUP)
    ranks = tuple(_with_label(rank) for rank in mtp.ranks)
    return replace(profile, modes=(replace(mtp, waits=(wait,), ranks=ranks), isp))


def _with_label(rank: RankProfile) -> RankProfile:
    first, *others = rank.timeline.collectives
    named = (replace(first, label=MARKUP), *others)
    return replace(rank, timeline=replace(rank.timeline, collectives=named))


@pytest.fixture(scope="module")
def html() -> str:
    return profile_page(example())


@pytest.fixture(scope="module")
def read(html: str) -> HtmlPage:
    return HtmlPage(html)


def test_profile_html_writes_a_page_of_the_profile(tmp_path: Path) -> None:
    """Catches --html that writes no page, or a page of other numbers than the profile."""
    (tmp_path / "text.txt").write_text("a text that is long enough for a few steps. " * 40)
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(folder=tmp_path))
    options = ["--modes", "isp", "--warmup", "0", "--steps", "1", "--no-torch", "--html"]
    (done,) = run_isp(1, "profile", str(job), *options)
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "small" / "profile").iterdir()
    assert str(folder / "profile.html") in done.out
    text = HtmlPage((folder / "profile.html").read_text()).text
    (mode,) = Profile.load(folder / "profile.json").modes
    assert mode.losses[0] is not None
    assert f" {mode.losses[0]:.5f} " in text
    assert f"isp profile {job} --modes isp" in text


def test_the_page_needs_no_network(html: str, read: HtmlPage) -> None:
    """Catches a script, style, font or picture that is fetched."""
    assert not read.references
    assert set(read.ids.values()) == {1}
    assert "://" not in html
    assert not {"link", "img", "iframe", "object", "embed"} & set(read.tags)
    assert read.tags["script"] == 1


def test_every_bar_refers_to_an_existing_hatch(html: str, read: HtmlPage) -> None:
    """Catches bars distinguished by color only: a bar that refers to a missing pattern."""
    used = set(re.findall(r"url\(#([^)]*)\)", html))
    assert used
    assert used <= set(read.ids)


def test_a_narrow_window_shows_everything(html: str, read: HtmlPage) -> None:
    """Catches a page that scrolls sideways as a whole at 400 pixels, and text that is too small."""
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in html
    assert ".scroll { overflow-x: auto;" in read.styles
    assert {"table", "pre", "svg"} <= set(read.tags)
    assert not read.unboxed
    assert HtmlPage("<svg width='900'></svg>").unboxed  # shows that the check above works
    sizes = re.findall(r"font(?:-size)?: ([\d.]+)(\w+)", read.styles)
    assert len(sizes) > 5
    assert {unit for _, unit in sizes} == {"px"}
    assert min(float(size) for size, _ in sizes) >= 12
    widths = re.findall(r"(?<![\w-])(?:min-)?width: ([\d.]+)px", read.styles)
    assert all(float(width) < 360 for width in widths)


def test_the_first_sentence_summarizes_the_profile(read: HtmlPage) -> None:
    """Catches a page that does not begin with the exposed time, its cause, and the worst wait."""
    # isp exposes 2 ms at its first gather, 3 ms elsewhere and 4 ms at its last reduction.
    assert (
        "In isp, 9% of the step is exposed: 9.00 of 100.0 ms. 44% of it in the last"
        " reduce-scatter, as no computation runs after it. 2 ranks share 1 core, so they"
        " wait more for each other than on GPUs. The worst wait, 4.00 ms, is for the"
        " reduce-scatter of embedding.weight.grad in backward: expected: no compute is left to"
        " overlap with the last gradients."
        " Exposed of the step in the other modes: mtp 16%."
    ) in read.text


def test_tables_have_the_numbers_of_the_profile(read: HtmlPage) -> None:
    """Catches a column of another quantity, a wrong unit, and swapped modes."""
    text = read.text
    assert "mtp 2 1 100.0 16.0 16.0 16% 0.0 0.0 16.0 0.0 16.0 1.00 2.00 1.70 5.00000" in text
    assert "isp 2 2 100.0 25.0 9.0 9% 2.0 4.0 0.0 0.0 6.0 1.50 3.00 1.70 5.00000" in text
    assert "agree within 0.0e+00" in text
    assert "isp all_gather 2 2.000 20.0 5.0" in text
    weight = "layers.1.attention.wo.weight"
    late = "launched too late: launched 3.0 ms too late"
    assert f"3.0 11.0 1 all_gather of {weight} forward of layers.1 {late}" in text
    assert "action phase start" in text
    assert CONFIG in read.texts  # with its line breaks
    assert text.count(COMMAND) == 1


def test_names_are_escaped(read: HtmlPage) -> None:
    """Catches a label that becomes markup of the page, in a table or a drawing."""
    assert MARKUP in read.text
    assert any(MARKUP in hover for hover in read.hovers)
    plain = page(title=MARKUP, lead=MARKUP, points=[MARKUP], body=section(MARKUP), command=MARKUP)
    assert HtmlPage(plain).text.count(MARKUP) == 6


def test_words_between_backticks_are_code() -> None:
    """Catches commands that look like prose, and markup in them."""
    lead = page(title="", lead="use `isp <x>` now", body="").partition('class="lead">')[2]
    assert lead.startswith("use <code>isp &lt;x&gt;</code> now</p>")


@pytest.mark.parametrize("text_from", [None, 0, 2])
def test_a_table_shown_as_a_list_keeps_its_headings(text_from: int | None) -> None:
    """Catches a table that a narrow window shows as a list with the headings of other columns."""
    made = table(Table([("a", "b&", "c"), ("1", "2", "3")], 1, text_from))
    assert re.findall(r'data-title="(.*?)">(\d)', made) == [("a", "1"), ("b&amp;", "2"), ("c", "3")]
    assert ('class="stacked"' in made) == (text_from is not None)
    kinds = re.findall(r'<td(?: class="(\w+)")?', made)
    assert kinds == {
        None: ["", "number", "number"],
        0: ["prose", "prose", "prose"],
        2: ["", "number", "prose"],
    }.get(text_from)


def figures(html: str) -> list[tuple[list[str], bool]]:
    """Return the mode and rank of each timeline of a page, and whether it is initially visible."""
    found = re.findall(r'<figure data-values="([^"]*)"( hidden)?>', html)
    return [(json.loads(unescape(values)), not hidden) for values, hidden in found]


def test_each_rank_can_be_selected(html: str, read: HtmlPage) -> None:
    """Catches a menu entry without a picture, and several pictures at a time."""
    assert figures(html) == [
        (["isp", "0"], True),
        (["isp", "1"], False),
        (["mtp", "0"], False),
        (["mtp", "1"], False),
    ]
    assert "mode isp mtp rank 0 1" in read.text


def bars(mode: ModeProfile) -> list[tuple[int, float, float]]:
    """Return (lane, begin, end) of every bar in the timeline of rank 0; 100 ms are 900 pixels.

    Hatches are left out: they have the position of a bar.
    """
    found = re.findall(
        r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" height="\d+" fill="#',
        draw_timeline(mode.ranks[0], mode.mode),
    )
    length = mode.ranks[0].timeline.end_ms - mode.ranks[0].timeline.begin_ms
    scale = length / 900
    return [
        ((int(y) - 30) // 46, round(float(x) * scale, 2), round((float(x) + float(w)) * scale, 2))
        for x, y, w in found
    ]


def test_bars_are_drawn_at_their_times() -> None:
    """Catches a bar in the wrong lane, drawn from launch to end of wait, or before the step."""
    isp = example_profile().modes[1]
    found = bars(isp)
    assert [bar[1:] for bar in found if bar[0] == 0][:2] == [(0.0, 5.0), (5.0, 10.0)]
    assert [bar[1:] for bar in found if bar[0] == 1] == [(5.0, 7.0), (28.0, 31.0), (90.0, 94.0)]
    assert [bar[1:] for bar in found if bar[0] == 2] == [(0.0, 7.0), (20.0, 31.0), (89.0, 94.0)]
    later = replace(isp.ranks[0].timeline, begin_ms=5.0)
    moved = replace(isp, ranks=(replace(isp.ranks[0], timeline=later),))
    assert next(bar[1:] for bar in bars(moved) if bar[0] == 1) == (0.0, 2.0)


def test_the_timeline_shows_when_a_transfer_was_launched() -> None:
    """Catches a transfer queued after another one that looks as if it had just been launched."""
    isp = example_profile().modes[1]
    rank = isp.ranks[0]
    assert 'stroke="#000"' not in draw_timeline(rank, "isp")
    first, *others = rank.timeline.collectives
    queued = (replace(first, launch_ms=10.0, start_ms=20.0, end_ms=25.0), *others)
    drawn = draw_timeline(replace(rank, timeline=replace(rank.timeline, collectives=queued)), "isp")
    assert re.search(r'd="M90\.0 [\d.]+v8M90\.0 [\d.]+H180\.0" stroke="#000"', drawn)


def test_the_axis_has_the_scale_of_the_bars() -> None:
    """Catches an axis of another scale than the bars, and numbers that touch."""
    rank = example_profile().modes[1].ranks[0]
    numbers = re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="\w+">([\d,.]+)<', _axis(rank))
    assert [(float(x), text) for x, text in numbers] == [(180.0 * i, str(20 * i)) for i in range(6)]


def _axis(rank: RankProfile) -> str:
    """Return a timeline without layers, with the same axis."""
    return draw_timeline(replace(rank, timeline=replace(rank.timeline, spans=())), "isp")


def test_a_page_of_many_ranks_stays_small() -> None:
    """Catches a page that grows with the ranks, or loses the rank that waits most."""
    isp = example_profile().modes[1]
    ranks = [replace(isp.ranks[0], rank=rank) for rank in range(20)]
    timeline = ranks[13].timeline
    slow = replace(timeline.collectives[0], exposed_ms=50.0)
    ranks[13] = replace(ranks[13], timeline=replace(timeline, collectives=(slow,)))
    slow_11 = [*ranks[:11], replace(ranks[13], rank=11), *ranks[12:13], replace(ranks[0], rank=13)]
    mtp = replace(isp, mode="mtp", ranks=(*slow_11, *ranks[14:]))
    modes = (replace(isp, ranks=tuple(ranks)), mtp)
    shown = figures(profile_page(replace(example_profile(), modes=modes)))
    chosen = ["0", "1", "2", "3", "4", "5", "6", "11", "13"]
    assert [values for values, _ in shown] == [[m.mode, r] for m in modes for r in chosen]


def test_different_losses_are_reported() -> None:
    """Catches different losses reported as equal, and a failure for one that is not finite."""
    profile = example_profile()
    mtp, isp = profile.modes

    def text(loss: float | None) -> str:
        return profile_page(replace(profile, modes=(mtp, replace(isp, losses=(loss,)))))

    assert "agree within 2.0e-01" in text(4.0)
    assert "not all modes have a finite loss" in text(None)
    assert ">not finite</td>" in text(None)


def test_a_profile_without_transfers_has_a_page() -> None:
    """Catches shares of nothing, and drawings that need a transfer: one rank, one mode."""
    mtp = example_profile().modes[0]
    totals = replace(
        mtp.summary, num_transfers=0, comm_ms=0.0, exposed_ms=0.0, chain_ms=0.0, by_kind={}
    )
    rank = mtp.ranks[0]
    quiet = replace(rank, timeline=replace(rank.timeline, collectives=(), memory=()))
    mode = replace(mtp, summary=totals, ranks=(quiet,), waits=(), tensor=1)
    text = HtmlPage(profile_page(replace(example_profile(), modes=(mode,), world_size=1))).text
    assert "In mtp nothing is exposed, because nothing is transferred." in text
    assert "Nothing was waited for" in text


def test_a_profile_without_exposed_time_has_a_page() -> None:
    """Catches a summary that needs a wait, and shares of zero exposed time."""
    isp = example_profile().modes[1]
    rank = isp.ranks[0]
    hidden = tuple(replace(c, exposed_ms=0.0) for c in rank.timeline.collectives)
    ranks = (replace(rank, timeline=replace(rank.timeline, collectives=hidden)),)
    mode = replace(isp, summary=replace(isp.summary, exposed_ms=0.0), ranks=ranks, waits=())
    text = HtmlPage(profile_page(replace(example_profile(), modes=(mode,)))).text
    assert "In isp, 0% of the step is exposed: 0.00 of 100.0 ms." in text


def test_every_lane_is_explained() -> None:
    """Catches a group of ranks whose name the page does not explain."""
    isp = example_profile().modes[1]
    timeline = isp.ranks[0].timeline
    lanes = ("weight", "world", "stage")
    collectives = tuple(replace(timeline.collectives[0], channel=lane) for lane in lanes)
    rank = replace(isp.ranks[0], timeline=replace(timeline, collectives=collectives))
    text = profile_page(replace(example_profile(), modes=(replace(isp, ranks=(rank,)),)))
    explained = re.findall(r"<dt>(\w+)</dt>", text.partition("Timeline of one step")[2])[:5]
    drawn = re.findall(r'<div style="height: 46px">(\w+)</div>', text)
    assert set(explained) == set(drawn) == {"compute", "waits", *lanes}
