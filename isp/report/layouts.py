"""Pages of `isp layouts` and `isp plan`: seconds of a step and bytes of a rank, by part."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from isp.planner import Candidate, Found, as_text
from isp.planner.lengths_report import MemoryPlan, lengths_as_text
from isp.planner.memory import Memory
from isp.planner.report import (
    details_of,
    legend_of,
    shown_of,
    size_of,
    table_of,
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


def layouts_page(found: Found, top: int, *, command: str) -> Page:
    """The page of a search for layouts."""
    shown, title = shown_of(found, top), f"Layouts for {found.world_size:,} ranks"
    if not shown:
        section = Section(title="What was tried", listing=as_text(found, top))
        lead = "No layout fits."
        return Page(name="layouts", title=title, lead=lead, sections=(section,), command=command)
    own = found.own if isinstance(found.own, str) else found.own.overrides
    marks = (f"{n}{'*' if c.overrides == own else ''}" for n, c in enumerate(shown, start=1))
    table = table_of(shown, marks, found.world_size)
    named = {" ".join(row[:3]): c for row, c in zip(table[1:], shown, strict=True)}
    best, verdict = shown[0], verdict_of(found)
    t, prediction = best.case.topology, best.prediction
    assert prediction is not None
    return Page(
        name="layouts",
        title=title,
        lead=f"Fastest: {t.mode} with tensor {t.tensor}, weight {t.weight} and pipeline"
        f" {t.pipeline}, {time_of(prediction.step)} a step,"
        f" {prediction.exposed / prediction.step:.0%} of it exposed, in"
        f" {size_of(best.memory.total)} of a rank.",
        points=(f"Machine: {found.fabric.title}.", f"{verdict[0].upper()}{verdict[1:]}."),
        sections=(
            Section(
                title="The fastest layouts",
                texts=(
                    f"{len(shown)} of the {found.num_fitting:,} layouts that fit, for"
                    f" {found.rows:,} sequences a step: the fastest, the fastest of each mode, and"
                    f" the configuration itself (*) if it fits.",
                    legend_of(table).replace("\n", " "),
                ),
                table=Table(table, text_columns=2),
                pictures=(
                    _step_picture(named),
                    _memory_picture(
                        "The memory of the rank that takes most, by part, at the moment of its"
                        " maximum. The names are those of the table: place, mode and tensor size.",
                        {name: c.memory for name, c in named.items()},
                        room=found.fabric.device.usable_bytes,
                    ),
                ),
            ),
            Section(title="The fastest in detail", listing=details_of(best)),
        ),
        command=command,
    )


def plan_page(plan: MemoryPlan, *, command: str) -> Page:
    """The page of what `isp plan` found."""
    config, room = plan.planned.config, plan.budget.device
    fitting = {step.option: step.longest for step in plan.steps if step.longest.seq_len}
    memories = {f"as it is, {config.data.seq_len:,} tokens": plan.memory}
    memories |= {f"{name}, {of.seq_len:,}": of.memory for name, of in fitting.items()}
    caption = "The memory of the rank that takes most, by part"
    if fitting:
        caption += (
            ": of the configuration, and of the longest sequences that fit with each way to save"
            " memory, cumulative"
        )
    return Page(
        name="plan",
        title=f"Memory of {config.job.name} on {plan.planned.world_size:,} ranks",
        points=(f"Machine: {plan.fabric.title}.",),
        lead=_plan_lead(plan),
        sections=(
            Section(
                title="Memory by part",
                pictures=(_memory_picture(f"{caption}.", memories, room=room),),
            ),
            Section(title="In numbers", listing=lengths_as_text(plan)),
        ),
        command=command,
    )


def _plan_lead(plan: MemoryPlan) -> str:
    memory, budget = plan.memory, plan.budget
    used, room, whose = memory.total, budget.device, "a rank"
    if budget.host is not None and not budget.fits(memory) and budget.on_host(memory):
        used, room, whose = memory.host, budget.host, "of a rank's part of the host"
    verb = "fit" if budget.fits(memory) else "do not fit"
    length = plan.planned.config.data.seq_len
    return f"{length:,} tokens {verb}: {size_of(used)} of {size_of(room)} {whose}."


def _step_picture(shown: Mapping[str, Candidate]) -> Picture:
    stacks = []
    for name, candidate in shown.items():
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
