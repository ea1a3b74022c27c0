"""Pages of `isp layouts` and `isp plan`: seconds of a step and bytes of a rank, by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from isp.planner import Candidate, Fabric, Found, as_text
from isp.planner.lengths_report import MemoryPlan, lengths_as_text
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
from isp.profile.table import Table
from isp.report.page import Page, Section
from isp.report.style import Color, Look, Picture, Stack, draw_stacks

__all__ = ["layouts_page", "plan_page"]

_STEP = {
    "compute": Look(Color.SKY),
    "exposed": Look(Color.VERMILLION, "///"),
    "bubble": Look(Color.ORANGE, "xxx"),
}
_MEMORY = {
    "weights": Look(Color.BLUE),
    "gradients": Look(Color.SKY),
    "optimizer": Look(Color.GREEN),
    "pool": Look(Color.YELLOW),
    "activations": Look(Color.VERMILLION),
    "attention": Look(Color.PURPLE),
    "loss": Look(Color.ORANGE),
    "work": Look(Color.GREY),
}
_LENGTH = {"fits": Look(Color.BLUE)}


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
    numbered = [(f"{place}{row[0]}", *row[1:]) for place, row in enumerate(cells, start=1)]
    names = [" ".join(row[:3]) for row in numbered]
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
                table=Table([COLUMNS, *numbered], text_columns=2),
                pictures=(
                    _step_picture(names, shown),
                    _memory_picture(
                        "The memory of the rank that takes most, by part, at the moment of its"
                        " maximum. The names are those of the table: place, mode and tensor size.",
                        {n: c.memory for n, c in zip(names, shown, strict=True)},
                        room=fabric.device.usable_bytes,
                    ),
                ),
            ),
            Section(title="The fastest in detail", listing=details_of(shown[0])),
        ),
        command=command,
    )


def plan_page(plan: MemoryPlan, *, command: str) -> Page:
    """The page of what `isp plan` found."""
    config, room = plan.planned.config, plan.budget.device
    fitting = {step.option: step.longest.seq_len for step in plan.steps if step.longest.seq_len}
    memories = {f"as it is, {config.data.seq_len:,} tokens": plan.memory}
    for step in plan.steps:
        if step.longest.seq_len:
            memories[f"{step.option}, {step.longest.seq_len:,}"] = step.longest.memory
    caption = "The memory of the rank that takes most, by part"
    if fitting:
        caption += (
            ": of the configuration, and of the longest sequences that fit with each way to save"
            " memory"
        )
    pictures = [_memory_picture(f"{caption}.", memories, room=room)]
    if fitting:
        pictures.append(_length_picture(fitting))
    return Page(
        name="plan",
        title=f"Memory of {config.job.name} on {plan.planned.world_size:,} ranks",
        points=(f"Machine: {plan.fabric.title}.",),
        lead=_plan_lead(plan),
        sections=(
            Section(title="Memory by part", pictures=tuple(pictures)),
            Section(title="In numbers", listing=lengths_as_text(plan)),
        ),
        command=command,
    )


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


def _plan_lead(plan: MemoryPlan) -> str:
    memory, budget = plan.memory, plan.budget
    used, room, whose = memory.total, budget.device, "a rank"
    if budget.host is not None and budget.excess(memory) > 0 and budget.on_host(memory):
        used, room, whose = memory.host, budget.host, "of a rank's part of the host"
    verb = "do not fit" if budget.excess(memory) > 0 else "fit"
    length = plan.planned.config.data.seq_len
    return f"{length:,} tokens {verb}: {size_of(used)} of {size_of(room)} {whose}."


def _step_picture(names: Sequence[str], shown: Sequence[Candidate]) -> Picture:
    stacks = []
    for name, candidate in zip(names, shown, strict=True):
        times = candidate.prediction
        assert times is not None
        compute = times.step - times.exposed - times.bubble
        parts = {"compute": compute, "exposed": times.exposed, "bubble": times.bubble}
        stacks.append(Stack(name, parts, time_of(times.step)))
    return Picture(
        name="step",
        caption="A step by part: compute, transfers that compute waits for (exposed), and waits for"
        " other pipeline stages (bubble). Predicted, not measured.",
        alt="Bars of the seconds of a step, by part, for each layout",
        draw=lambda: draw_stacks(stacks, _STEP, xlabel="step (s)", text=time_of)[0],
    )


def _memory_picture(caption: str, memories: Mapping[str, Memory], *, room: int) -> Picture:
    largest = max(memory.total for memory in memories.values())
    unit, label = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")

    def text(value: float) -> str:
        return f"{value:,.1f} {label}"

    stacks = []
    for name, memory in memories.items():
        parts = {part: size / unit for part, size in memory.by_owner().items()}
        stacks.append(Stack(name, parts, text(sum(parts.values()))))

    def draw() -> Figure:
        limit = room / unit if room < 2 * largest else 0.0  # else bars would be too short
        figure, axes = draw_stacks(
            stacks, _MEMORY, xlabel=f"memory ({label})", text=text, limit=limit
        )
        if limit:
            axes.axvline(limit, color=Color.BLACK, linestyle="--")
            axes.text(limit, -0.5, "room of a rank ", ha="right", va="center")
        return figure

    return Picture("memory", caption, "Bars of the memory of a rank, by part", draw)


def _length_picture(longest: Mapping[str, int]) -> Picture:
    stacks = [Stack(name, {"fits": length}, f"{length:,}") for name, length in longest.items()]
    return Picture(
        name="lengths",
        caption="The longest sequence that fits, with each way to save memory and all above it that"
        " help.",
        alt="Bars of the longest sequence that fits",
        draw=lambda: draw_stacks(
            stacks, _LENGTH, xlabel="tokens of a sequence", text="{:,.0f}".format
        )[0],
    )
