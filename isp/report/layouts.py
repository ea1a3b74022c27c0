"""Pages of `isp layouts` and `isp plan`: seconds of a step and bytes of a rank, by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from isp.planner import Candidate, Fabric, Found, as_text
from isp.planner.lengths import Longest
from isp.planner.lengths_report import Said, lengths_as_text
from isp.planner.memory import Memory
from isp.planner.report import (
    COLUMNS,
    LEGEND,
    details_of,
    row_of,
    shown_of,
    size_of,
    time_of,
    verdict_of,
)
from isp.report.page import Column, Page, Section, Table, numbers
from isp.report.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    WIDE,
    Look,
    Picture,
    Size,
    add_bar,
    key,
    new_lanes,
)

__all__ = ["layouts_page", "plan_page"]

_YELLOW = "#F0E442"
_STEP = {
    "compute": Look(SKY),
    "exposed": Look(VERMILLION, "///"),
    "bubble": Look(ORANGE, "xxx"),
}
_MEMORY = {
    "weights": Look(BLUE),
    "gradients": Look(SKY),
    "optimizer": Look(GREEN),
    "pool": Look(_YELLOW),
    "activations": Look(VERMILLION),
    "attention": Look(PURPLE),
    "loss": Look(ORANGE),
    "work": Look(GREY),
}
_LENGTH = {"fits": Look(BLUE)}


class _Stack(NamedTuple):
    """A bar of parts, one behind the other."""

    name: str
    parts: Mapping[str, float]


def layouts_page(
    found: Found,
    own: Candidate | str,
    fabric: Fabric,
    *,
    world_size: int,
    rows: int,
    top: int,
    command: str,
) -> Page:
    """The page of a search for layouts; `own` as in `isp.planner.as_text`."""
    title = f"Layouts for {world_size:,} ranks"
    if not found.fitting:
        text = as_text(found, own, fabric, world_size=world_size, rows=rows, top=top)
        section = Section(title="What was tried", listing=text)
        return Page(
            name="layouts",
            title=title,
            lead="No layout fits.",
            sections=(section,),
            command=command,
        )
    shown = shown_of(found, own, fabric, top)
    mine = own.key if isinstance(own, Candidate) else None
    cells = [row_of(c, "*" if c.key == mine else "", world_size) for c in shown]
    names = [
        f"{place}{mark} {mode} {tensor}" for place, (mark, mode, tensor, *_) in _counted(cells)
    ]
    return Page(
        name="layouts",
        title=title,
        lead=_lead(shown[0]),
        points=(f"Machine: {fabric.title}.", _sentence(verdict_of(own, found, fabric))),
        sections=(
            Section(
                title="The fastest layouts",
                texts=(
                    f"{len(shown)} of the {found.num_fitting:,} layouts that fit, for {rows:,}"
                    f" sequences a step: the fastest, the fastest of each mode, and the"
                    f" configuration itself (*) if it fits.",
                    LEGEND.replace("\n", " "),
                ),
                table=Table(
                    (Column(""), Column("mode"), *numbers(*COLUMNS[2:])),
                    tuple((f"{place}{row[0]}", *row[1:]) for place, row in _counted(cells)),
                ),
                pictures=(
                    _step_picture(names, shown),
                    _memory_picture(
                        "The memory of the rank that takes most, by part, at the moment of its"
                        " maximum. The names are those of the table: place, mode and tensor size.",
                        [_memory_stack(n, c.memory) for n, c in zip(names, shown, strict=True)],
                        room=fabric.device.usable_bytes,
                    ),
                ),
            ),
            Section(title="The fastest in detail", listing=details_of(shown[0])),
        ),
        command=command,
    )


def plan_page(said: Said, *, command: str) -> Page:
    """The page of what `isp plan` found."""
    config, room = said.planned.config, said.budget.device
    own = f"as it is, {config.data.seq_len:,} tokens"
    stacks = [_memory_stack(own, said.memory)]
    longest = [(step.rung.name, step.longest) for step in said.steps]
    fitting = [(name, end) for name, end in longest if isinstance(end, Longest)]
    stacks += [_memory_stack(f"{name}, {end.seq_len:,}", end.memory) for name, end in fitting]
    pictures = [
        _memory_picture(
            "The memory of the rank that takes most, by part: of the configuration, and of the"
            " longest rows that fit with each way to save memory."
            if fitting
            else "The memory of the rank that takes most, by part.",
            stacks,
            room=room,
        )
    ]
    if fitting:
        pictures.append(_length_picture([_Stack(n, {"fits": e.seq_len}) for n, e in fitting]))
    return Page(
        name="plan",
        title=f"Memory of {config.job.name} on {said.planned.world_size:,} ranks",
        points=(f"Machine: {said.fabric.title}.",),
        lead=_plan_lead(said),
        sections=(
            Section(title="Memory by part", pictures=tuple(pictures)),
            Section(title="In numbers", listing=lengths_as_text(said)),
        ),
        command=command,
    )


def _counted(rows: Sequence[tuple[str, ...]]) -> list[tuple[int, tuple[str, ...]]]:
    return list(enumerate(rows, start=1))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _lead(best: Candidate) -> str:
    topology, prediction = best.case.topology, best.prediction
    assert prediction is not None
    return (
        f"Fastest: {topology.mode} with tensor {topology.tensor}, weight {topology.weight} and"
        f" pipeline {topology.pipeline}, {time_of(prediction.step)} a step,"
        f" {prediction.exposed / prediction.step:.0%} of it exposed, in"
        f" {size_of(best.memory.total)} of a rank."
    )


def _plan_lead(said: Said) -> str:
    memory, budget = said.memory, said.budget
    used, room, whose = memory.total, budget.device, "a rank"
    if budget.host is not None and budget.excess(memory) > 0 and budget.on_host(memory):
        used, room, whose = memory.host, budget.host, "of a rank's part of the host"
    verb = "do not fit" if budget.excess(memory) > 0 else "fit"
    length = said.planned.config.data.seq_len
    return f"{length:,} tokens {verb}: {size_of(used)} of {size_of(room)} {whose}."


def _step_picture(names: Sequence[str], shown: Sequence[Candidate]) -> Picture:
    stacks = []
    for name, candidate in zip(names, shown, strict=True):
        times = candidate.prediction
        assert times is not None
        compute = times.step - times.exposed - times.bubble
        parts = {"compute": compute, "exposed": times.exposed, "bubble": times.bubble}
        stacks.append(_Stack(name, parts))
    return _picture(
        "step",
        "A step by part: compute, transfers that compute waits for (exposed), and waits for other"
        " pipeline stages (bubble). Predicted, not measured.",
        "Bars of the seconds of a step, by part, for each layout",
        stacks,
        partial(_draw, stacks, _STEP, "step (s)", time_of, None),
    )


def _memory_stack(name: str, memory: Memory) -> _Stack:
    return _Stack(name, {part: size / 2**20 for part, size in memory.by_owner().items()})


def _memory_picture(caption: str, stacks: Sequence[_Stack], *, room: int) -> Picture:
    largest = max(sum(stack.parts.values()) for stack in stacks)
    limit = room / 2**20 if room / 2**20 < 2 * largest else None  # else bars would be too short
    unit, label = (2**10, "GiB") if largest >= 2**10 else (1, "MiB")
    scaled = [_Stack(s.name, {part: n / unit for part, n in s.parts.items()}) for s in stacks]
    return _picture(
        "memory",
        caption,
        "Bars of the memory of a rank, by part",
        stacks,
        partial(
            _draw,
            scaled,
            _MEMORY,
            f"memory ({label})",
            lambda value: f"{value:,.1f} {label}",
            None if limit is None else limit / unit,
        ),
    )


def _length_picture(stacks: Sequence[_Stack]) -> Picture:
    return _picture(
        "lengths",
        "The longest row that fits, with each way to save memory and all above it that help.",
        "Bars of the longest row that fits",
        stacks,
        partial(_draw, stacks, _LENGTH, "tokens of a row", "{:,.0f}".format, None),
    )


def _picture(
    name: str, caption: str, alt: str, stacks: Sequence[_Stack], draw: Callable[[Size], Figure]
) -> Picture:
    height = 130 + 30 * len(stacks)
    return Picture(
        name=name,
        caption=caption,
        alt=alt,
        draw=draw,
        wide=Size(1080, height, 13),
        phone=Size(360, height + 60, 11),
    )


def _draw(
    stacks: Sequence[_Stack],
    looks: Mapping[str, Look],
    xlabel: str,
    text: Callable[[float], str],
    limit: float | None,
    size: Size,
) -> Figure:
    """Bars of `stacks`, each with its sum behind it; a line at `limit`, in the same unit."""
    is_wide = size.width > WIDE.width / 2
    names = [stack.name if is_wide else stack.name.replace(", ", "\n") for stack in stacks]
    figure, axes = new_lanes(size, names, xlabel=xlabel, top=0.6)
    most = max(limit or 0.0, *(sum(stack.parts.values()) for stack in stacks))
    for lane, stack in enumerate(stacks):
        end = 0.0
        for part, value in stack.parts.items():
            begin, end = end, end + value
            hover = f"{stack.name}: {part} {text(value)}"
            add_bar(axes, begin, end, top=lane - 0.35, height=0.7, look=looks[part], hover=hover)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        at = end + 0.01 * most, lane
        axes.text(*at, text(end), va="center", fontsize="small", bbox=box, zorder=3)
    handles: list[Artist] = [
        key(part, look) for part, look in looks.items() if any(s.parts[part] for s in stacks)
    ]
    if limit is not None:
        handles.append(axes.axvline(limit, color=BLACK, linestyle="--", label="room of a rank"))
    axes.set_xlim(0, most * (1.1 if is_wide else 1.35))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if is_wide else 3))
    axes.xaxis.set_major_formatter("{x:,.10g}")
    if len(looks) > 1:
        figure.legend(handles=handles, loc="outside upper left", ncols=9 if is_wide else 3)
    return figure
