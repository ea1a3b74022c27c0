"""The prefetch plan of a step: when each block's weights are on their way, and when they are there.

Time is counted in uses, the places of a step where a weight is read or a launch point lies: the
plan knows no milliseconds.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from isp.config import JobConfig, load_config
from isp.models.schedule import RankPlan, rank_plans
from isp.parallel import Mode
from isp.profile import ModeProfile, Profile
from isp.report.page import Section
from isp.report.style import (
    BLUE,
    GREY,
    SKY,
    VERMILLION,
    Look,
    Picture,
    Size,
    add_bar,
    key,
    legend_above,
    new_lanes,
)
from isp.weights.plan import ActKind
from isp.weights.simulate import simulate
from isp.weights.trace import trace

__all__ = ["Stay", "plan_section", "stays"]

_MOST_USES = 400
"""More cannot be told apart in a picture."""
_LAUNCH = 0.4
"""Place in a use for launching gathers: behind the wait for the use's own weight."""
_ON_ITS_WAY, _THERE, _EXPOSED = Look(SKY, "////"), Look(BLUE), Look(VERMILLION)


class Stay(NamedTuple):
    """A weight from its gather to its free, in uses from the beginning of the step."""

    row: int
    """Of the block that declares it first, counted over all chunks."""
    lane: int
    """Its place among the weights of the block."""
    weight: str
    gathered: float
    """Below 0: as soon as the weights of the step are there."""
    waited: float
    freed: float
    ahead: int
    """Uses between the gather and the wait; 0 if nothing can hide it."""


def plan_section(profile: Profile, mode: ModeProfile) -> Section | None:
    """The plan of the first pipeline rank; None where no weights are gathered."""
    if mode.plan_grid is None:
        return None
    config = _config(profile)
    first, *others = rank_plans(
        config.language_model, config.parallel, config.data.num_micro_batches
    )
    where = f" on {first.title}, one of {len(others) + 1} pipeline ranks" if others else ""
    is_cut = len(first.plan.steps) > _MOST_USES
    cut = f" Only the first {_MOST_USES} uses are shown." if is_cut else ""
    rows = len(_row_names(first))
    weight = config.parallel.weight
    once = "" if weight.reshard_after_forward else ", and once a step"
    picture = Picture(
        name="plan",
        caption=f"When the weights of each block are on their way and when they are there{where}."
        f" F and B are the forward and backward of a micro-batch; the frame is the block that"
        f" runs.{cut}",
        alt="Grid of blocks over the uses of a step, with bars from gather to free",
        draw=partial(_draw, first),
        wide=Size(1080, 130 + 30 * rows, 12),
        phone=Size(360, 170 + 24 * rows, 11),
    )
    text = (
        f"What is asked for ahead, so that compute hides it: per {weight.forward_overlap_per},"
        f" launched before {weight.launch_allgather_before}{once}. The table names each"
        " place of the step (“ahead” is the number of uses from the gather to the wait); `isp"
        " prefetch CONFIG` prints it of any configuration."
    )
    return Section(
        title="The plan of the weights in isp",
        texts=(text,),
        pictures=(picture,),
        listing=mode.plan_grid,
    )


def _config(profile: Profile) -> JobConfig:
    """The configuration of the profile in isp mode; the plan does not depend on group sizes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(profile.config, encoding="utf-8")
        config = load_config(path)
    tensor = replace(config.parallel.tensor, mode=Mode.ISP)
    changed = replace(config, parallel=replace(config.parallel, tensor=tensor))
    return changed.for_ranks(profile.world_size)


def stays(own: RankPlan) -> Iterator[Stay]:
    """Every gather of the plan with its wait and its free, in the order of the frees."""
    places = _places(own)
    lookaheads = iter(simulate(own.plan, own.chunks, own.actions).lookaheads)
    gathered = {act.weight: -1.0 for act in own.plan.start}
    waited: dict[str, tuple[float, int]] = {}
    for number, step in enumerate(own.plan.steps):
        for act in (*step.before, *step.after):
            if act.kind is ActKind.GATHER:
                gathered[act.weight] = number + _LAUNCH
            elif act.kind is ActKind.WAIT:
                begin = max(float(number), gathered[act.weight])
                waited[act.weight] = begin, next(lookaheads).uses
            else:
                wait, ahead = waited.pop(act.weight)
                begin = gathered.pop(act.weight)
                yield Stay(*places[act.weight], act.weight, begin, wait, number + 1.0, ahead)


def _places(own: RankPlan) -> dict[str, tuple[int, int]]:
    """The row and the lane of each weight, by the block that declares it first."""
    places: dict[str, tuple[int, int]] = {}
    blocks = [block for chunk in own.chunks for block in chunk]
    for row, block in enumerate(blocks):
        names = dict.fromkeys(v.weight for v in block.uses if v.weight is not None)
        new = [name for name in names if name not in places]
        places |= {name: (row, lane) for lane, name in enumerate(new)}
    return places


def _row_names(own: RankPlan) -> list[str]:
    return [block.name for chunk in own.chunks for block in chunk]


def _draw(own: RankPlan, size: Size) -> Figure:
    names, shown = _row_names(own), min(_MOST_USES, len(own.plan.steps))
    figure, axes = new_lanes(size, names, xlabel="uses since the step began", top=1.2)
    axes.set_xlim(-1.2, shown)
    num_lanes = Counter(row for row, _ in _places(own).values())
    drawn = [stay for stay in stays(own) if stay.gathered < shown]
    for stay in drawn:
        _draw_stay(axes, stay, num_lanes[stay.row])
    _draw_spans(axes, own, size, shown)
    handles = [key("on its way", _ON_ITS_WAY), key("there", _THERE)]
    if not all(stay.ahead for stay in drawn):
        handles.append(key("nothing hides it", _EXPOSED))
    legend_above(axes, columns=3 if size.width > size.height * 2 else 2, handles=handles)
    return figure


def _draw_stay(axes: Axes, stay: Stay, num_lanes: int) -> None:
    height = 0.8 / num_lanes
    top = stay.row - 0.4 + stay.lane * height
    hover = f"{stay.weight}: asked for {stay.ahead} uses ahead, there until use {stay.freed:.0f}"
    on_its_way = max(stay.waited, stay.gathered + _LAUNCH)
    for begin, end, look in (
        (stay.gathered, on_its_way, _ON_ITS_WAY if stay.ahead else _EXPOSED),
        (stay.waited, stay.freed, _THERE),
    ):
        add_bar(axes, begin, end, top=top, height=height, look=look, hover=hover, edge="white")


def _draw_spans(axes: Axes, own: RankPlan, size: Size, shown: int) -> None:
    """A frame around the block that runs, and the name of each action above its uses."""
    rows = {
        (c, b): row
        for row, (c, b) in enumerate(
            (c, b) for c, chunk in enumerate(own.chunks) for b in range(len(chunk))
        )
    }
    begin = 0
    for action, group in groupby(trace(own.chunks, own.actions), key=lambda span: span.action):
        first = begin
        for span in group:
            row, uses = rows[span.unit], len(span.sites)
            if begin >= shown:
                return
            frame = Rectangle(
                (begin, row - 0.46), uses, 0.92, fill=False, edgecolor="black", linewidth=1.4
            )
            axes.add_patch(frame)
            begin += uses
        axes.axvline(begin, color=GREY, linewidth=0.8)
        if first < shown and (begin - first) * size.width / shown > 40:
            axes.text((first + min(begin, shown)) / 2, -0.85, str(action), ha="center", va="center")
