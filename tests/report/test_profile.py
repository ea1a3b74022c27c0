"""The report of a profile: its sentence, its numbers, its pictures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from matplotlib.patches import Rectangle

from isp.cli import main
from isp.profile import ModeProfile, Profile, RankProfile
from isp.report.page import Section
from isp.report.profile import profile_page
from isp.report.style import Picture, to_png
from isp.report.timeline import timeline_section
from tests.profile.example import example_profile
from tests.report.html_page import HtmlPage

pytestmark = pytest.mark.filterwarnings("error")  # a picture that does not fit
COMMAND = "isp profile job.yaml --nproc 2 --modes mtp,isp"
CONFIG = "model: {preset: tiny, num_layers: 2}\ndata: {source: python-stdlib}\n"
MARKUP = "</title><img src=x>&\"'"


class Written(NamedTuple):
    html: str
    page: HtmlPage
    folder: Path


def example() -> Profile:
    """The example with its command, and a label that would change the page if it were not text."""
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
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("profile")
    (folder / "profile.json").write_text(example().to_json())
    assert main(["report", str(folder), "--output", str(folder / "pages")]) == 0
    html = (folder / "pages" / "profile.html").read_text()
    return Written(html, HtmlPage(html), folder / "pages")


def test_page_needs_no_network(written: Written) -> None:
    """Catches a script, style, font or picture that is fetched from somewhere."""
    page = written.page
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert set(page.ids.values()) == {1}
    assert "://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", written.html)
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert page.tags["script"] == 1


def test_hatches_are_there(written: Written) -> None:
    """Catches bars that colour alone tells apart: a pattern lost when pictures are put together."""
    used = set(re.findall(r"url\(#([^)]*)\)", written.html))
    assert used <= set(written.page.ids)
    assert any(name.startswith("h") for name in used)


def test_first_sentence(written: Written) -> None:
    """Catches a page that does not begin with what is exposed, why, and what is worst."""
    # isp exposes 2 ms at its first gather, 3 ms elsewhere and 4 ms at its last reduction.
    assert (
        "In isp, 9% of the step is exposed: 9.00 of 100.0 ms. 44% of it in the last"
        " reduce-scatter, which has nothing left to hide behind. 2 ranks share 1 core, so they"
        " wait more for each other than on GPUs. The worst wait, 4.00 ms, is for the"
        " reduce-scatter of embedding.weight.grad in backward: expected: no compute is left to"
        " overlap with the last gradients."
        " Exposed of the step in the other modes: mtp 16%."
    ) in written.page.text


def test_tables_have_the_numbers(written: Written) -> None:
    """Catches a column of another quantity, a wrong unit, and modes that change places."""
    text = written.page.text
    assert "mtp 2 1 100.0 16.0 16.0 16% 0.0 0.0 16.0 0.0 16.0 1.00 2.00 1.70 5.00000" in text
    assert "isp 2 2 100.0 25.0 9.0 9% 2.0 4.0 0.0 0.0 6.0 1.50 3.00 1.70 5.00000" in text
    assert "agree within 0.0e+00" in text
    assert "isp all_gather 2 2.000 20.0 5.0" in text
    weight = "layers.1.attention.wo.weight"
    late = "launched too late: launched 3.0 ms too late"
    assert f"3.0 11.0 1 all_gather of {weight} forward of layers.1 {late}" in text
    assert "action phase start" in text
    assert CONFIG in written.page.texts  # with its line breaks
    assert text.count(COMMAND) == 1


def test_names_are_escaped(written: Written) -> None:
    """Catches a label that becomes a part of the page, in a table or a drawing."""
    assert MARKUP in written.page.text
    assert any(MARKUP in hover for hover in written.page.hovers)


def test_pictures_are_there(written: Written) -> None:
    """Catches a picture of the page without its file."""
    names = {path.name for path in written.folder.glob("*.png")}
    timelines = {"timeline-isp-rank0.png", "timeline-mtp-rank0.png"}
    assert names == {"exposed.png", "memory.png"} | timelines


def test_each_rank_can_be_chosen(written: Written) -> None:
    """Catches a menu without a picture, and several pictures at a time."""
    found = re.findall(r'<figure data-values="([^"]*)"( hidden)?>', written.html)
    values = [json.loads(value.replace("&#34;", '"')) for value, _ in found]
    assert values == [["isp", "0"], ["isp", "1"], ["mtp", "0"], ["mtp", "1"]]
    assert [bool(hidden) for _, hidden in found] == [False, True, True, True]


def picture(profile: Profile, name: str) -> Picture:
    return next(found for found in profile_page(profile).pictures if found.name == name)


def bars(mode: ModeProfile) -> list[tuple[float, float, float]]:
    """(lane, begin, end) of every bar in the timeline of rank 0."""
    patches = timeline_section([mode]).choices[0][1].draw().axes[0].patches
    found = [patch for patch in patches if isinstance(patch, Rectangle)]
    return [
        (
            round(p.get_y() + p.get_height() / 2),
            round(p.get_x(), 6),
            round(p.get_x() + p.get_width(), 6),
        )
        for p in found
    ]


def test_timeline_shows_when_things_were() -> None:
    """Catches a bar in the wrong lane, from launch to end of wait, or before the step."""
    isp = example_profile().modes[1]
    found = bars(isp)
    assert [bar[1:] for bar in found if bar[0] == 0][:2] == [(0.0, 5.0), (5.0, 10.0)]
    assert [bar[1:] for bar in found if bar[0] == 1] == [(5.0, 7.0), (28.0, 31.0), (90.0, 94.0)]
    assert [bar[1:] for bar in found if bar[0] == 2] == [(0.0, 7.0), (20.0, 31.0), (89.0, 94.0)]
    later = replace(isp.ranks[0].timeline, begin_ms=5.0)
    moved = replace(isp, ranks=(replace(isp.ranks[0], timeline=later),))
    assert next(bar[1:] for bar in bars(moved) if bar[0] == 1) == (0.0, 2.0)


def test_many_ranks() -> None:
    """Catches a page that grows with the ranks, or loses the one that waits most."""
    isp = example_profile().modes[1]
    ranks = [replace(isp.ranks[0], rank=rank) for rank in range(20)]
    timeline = ranks[13].timeline
    slow = replace(timeline.collectives[0], exposed_ms=50.0)
    ranks[13] = replace(ranks[13], timeline=replace(timeline, collectives=(slow,)))
    choices = timeline_section([replace(isp, ranks=tuple(ranks))]).choices
    assert [values[1] for values, _ in choices] == ["0", "1", "2", "3", "4", "5", "6", "13"]


def test_losses_that_differ() -> None:
    """Catches a page that calls losses equal that are not, or fails on one that is not finite."""
    profile = example_profile()
    mtp, isp = profile.modes

    def section(loss: float | None) -> Section:
        return profile_page(replace(profile, modes=(mtp, replace(isp, losses=(loss,))))).sections[0]

    assert "agree within 2.0e-01" in section(4.0).texts[-1]
    lost = section(None)
    assert "not all modes have a finite loss" in lost.texts[-1]
    assert lost.table is not None
    assert lost.table.rows[2][-1] == "not finite"


def test_nothing_travels(tmp_path: Path) -> None:
    """Catches shares of nothing, and pictures that need a transfer: one rank, one mode."""
    mtp = example_profile().modes[0]
    totals = replace(
        mtp.summary, num_transfers=0, comm_ms=0.0, exposed_ms=0.0, chain_ms=0.0, by_kind={}
    )
    rank = mtp.ranks[0]
    quiet = replace(rank, timeline=replace(rank.timeline, collectives=(), memory=()))
    mode = replace(mtp, summary=totals, ranks=(quiet,), waits=(), tensor=1)
    profile = replace(example_profile(), modes=(mode,), world_size=1)
    page = profile_page(profile)
    assert page.lead == "In mtp nothing is exposed, because nothing is transferred."
    assert "Nothing was waited for" in page.to_html()
    for found in page.pictures:
        to_png(found, tmp_path / "picture.png")


def test_waiting_for_other_ranks_is_told_apart() -> None:
    """Catches a part of the exposed time that is a sum over ranks, or of another step."""
    isp = example_profile().modes[1]
    first, *others = isp.ranks[0].timeline.collectives
    late = replace(first, others_ms=1.5)
    slow = replace(
        isp.ranks[0], timeline=replace(isp.ranks[0].timeline, collectives=(late, *others))
    )
    profile = replace(example_profile(), modes=(replace(isp, ranks=(slow, isp.ranks[1])),))
    widths = [bar.get_width() for bar in picture(profile, "exposed").draw().axes[0].patches]
    assert widths == pytest.approx([9.0 - 0.75, 0.75, 16.0])


def test_everything_is_hidden() -> None:
    """Catches a sentence that needs a wait, or shares of no exposed time."""
    isp = example_profile().modes[1]
    rank = isp.ranks[0]
    hidden = tuple(replace(c, exposed_ms=0.0) for c in rank.timeline.collectives)
    ranks = (replace(rank, timeline=replace(rank.timeline, collectives=hidden)),)
    mode = replace(isp, summary=replace(isp.summary, exposed_ms=0.0), ranks=ranks, waits=())
    page = profile_page(replace(example_profile(), modes=(mode,)))
    assert page.lead == "In isp, 0% of the step is exposed: 0.00 of 100.0 ms."


def test_marks_of_memory_are_whole() -> None:
    """Catches the marks of the first and the highest moments cut at the edge of the picture."""
    axes = picture(example_profile(), "memory").draw().axes[0]
    (left, bottom), (right, top) = axes.transAxes.transform([(0, 0), (1, 1)])
    for line in axes.lines:
        marks = axes.transData.transform(line.get_xydata())
        radius = line.get_markersize() / 2
        assert marks[:, 0].min() - radius > left
        assert marks[:, 0].max() + radius < right
        assert marks[:, 1].max() + radius < top
        assert marks[:, 1].min() - radius > bottom


def test_every_lane_is_explained() -> None:
    """Catches a group of ranks whose name the page does not say."""
    isp = example_profile().modes[1]
    timeline = isp.ranks[0].timeline
    lanes = ("weight", "world", "stage")
    collectives = tuple(replace(timeline.collectives[0], channel=lane) for lane in lanes)
    rank = replace(isp.ranks[0], timeline=replace(timeline, collectives=collectives))
    section = timeline_section([replace(isp, ranks=(rank,))])
    assert {name for name, _ in section.facts} == {"compute", "waits", *lanes}
    drawn = section.choices[0][1].draw().axes[0]
    assert {label.get_text() for label in drawn.get_yticklabels()} == {"compute", "waits", *lanes}
