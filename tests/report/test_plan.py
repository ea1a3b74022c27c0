"""The picture of the plan: it shows what the plan does, on any pipeline rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from isp.config import JobConfig, load_config
from isp.models.schedule import RankPlan, rank_plans
from isp.profile import Profile
from isp.report.plan import plan_section, stays
from isp.report.style import SKY, VERMILLION, WIDE
from isp.weights.simulate import simulate
from tests.profile.example import example_profile

MODEL = "model: {preset: tiny, num_layers: %d, checkpoint: %s}\ndata: {source: python-stdlib"
PLAIN = MODEL % (3, 0.0) + "}\n"
CONFIGS = {
    "plain": PLAIN,
    "recomputed, two micro-batches": MODEL % (3, 0.5) + ", micro_num: 2}\n",
    "per module": PLAIN + "parallel: {weight: {forward_overlap_per: module}}\n",
    "no overlap": PLAIN + "parallel: {weight: {overlap: false}}\n",
    "pipeline": MODEL % (4, 0.0) + ", micro_num: 2}\nparallel: {pipeline: {size: 2}}\n",
}


def load(text: str, tmp_path: Path) -> JobConfig:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_config(path)


def _plans(text: str, tmp_path: Path) -> list[RankPlan]:
    config = load(text, tmp_path)
    return rank_plans(config.model, config.parallel, config.data.num_micro_batches)


@pytest.mark.parametrize("name", CONFIGS)
def test_bars_are_what_the_plan_holds(name: str, tmp_path: Path) -> None:
    """Catches a bar that begins or ends at another use than the gather or the free."""
    for own in _plans(CONFIGS[name], tmp_path):
        result = simulate(own.plan, own.chunks, own.actions)
        drawn = list(stays(own))
        held = [
            sum(stay.gathered <= use + 0.5 < stay.freed for stay in drawn)
            for use in range(len(own.plan.steps))
        ]
        assert held == [occupancy.weights for occupancy in result.occupancy]
        ahead = Counter((found.weight, found.uses) for found in result.lookaheads)
        assert Counter((stay.weight, stay.ahead) for stay in drawn) == ahead
        assert all(stay.gathered <= stay.waited < stay.freed for stay in drawn)


def test_rows_and_lanes(tmp_path: Path) -> None:
    """Catches weights of a block that cover each other, or stand in another block's row."""
    (own,) = _plans(PLAIN, tmp_path)
    places = {(stay.row, stay.lane): stay.weight for stay in stays(own)}
    assert len(places) == len({stay.weight for stay in stays(own)})
    assert sorted(row for row, _ in places) == [0, *[1] * 4, *[2] * 4, *[3] * 4, 4]
    assert all(w.startswith("layers.1.") for (row, _), w in places.items() if row == 2)


def test_weight_that_two_blocks_read(tmp_path: Path) -> None:
    """Catches a tied weight that leaves the row in which it is declared."""
    tied = PLAIN.replace("num_layers: 3", "num_layers: 3, tie_embeddings: true")
    (own,) = _plans(tied, tmp_path)
    rows = [stay.row for stay in stays(own) if stay.weight.startswith("embedding")]
    assert len(rows) > 1
    assert set(rows) == {0}


def section_figure(config: str) -> tuple[str, Figure]:
    profile = replace(example_profile(), config=config)
    section = plan_section(profile, profile.modes[1])
    assert section is not None
    (picture,) = section.pictures
    return picture.caption, picture.draw(WIDE)


def test_what_nothing_hides_has_a_colour() -> None:
    """Catches a plan without overlap that looks like one with it."""
    for name, expected in (("plain", False), ("no overlap", True)):
        _, figure = section_figure(CONFIGS[name])
        legend = figure.axes[0].get_legend()
        assert legend is not None
        assert ("nothing hides it" in [text.get_text() for text in legend.texts]) == expected
        colors = {to_hex(bar.get_facecolor()).upper() for bar in figure.axes[0].patches}
        assert (VERMILLION in colors, SKY in colors) == (expected, not expected)


def test_long_step_is_cut() -> None:
    """Catches a picture that grows with the micro-batches, or does not say that it is cut."""
    caption, figure = section_figure(MODEL % (3, 0.0) + ", micro_num: 40}\n")
    assert "Only the first 400 uses are shown" in caption
    assert figure.axes[0].get_xlim()[1] == 400
    last = max(bar.get_x() for bar in figure.axes[0].patches)
    assert last < 400 + 10  # a weight that is on its way at the cut is waited for behind it


def test_plan_of_a_profile_that_was_given_in_another_mode() -> None:
    """Catches a plan that is missing because the file's own mode gathers nothing."""
    mtp = PLAIN + "parallel: {tensor: {mode: mtp, size: 2}}\n"
    assert "the frame is the block that runs" in section_figure(mtp)[0]


def test_modes_without_a_plan() -> None:
    """Catches a plan of weights that are never gathered."""
    profile: Profile = replace(example_profile(), config=PLAIN)
    assert plan_section(profile, profile.modes[0]) is None
