"""`Layout`: the layouts that `isp check` and `isp.check` compare, and the names for them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

from isp.config import ConfigError
from isp.core.mesh import Mode, ParallelConfig, PipelineConfig, PipelineSchedule, WeightConfig
from isp.models.roles import ParameterRole
from isp.parity.subjects import Subject

__all__ = ["TOKENS", "Layout", "fault_of", "layouts_of", "most_stages"]

TOKENS = 48
"""Fewest tokens in a row. A small model has short windows of attention; a row has space for several
documents that are longer."""

_SIZES = (1, 2, 4)
"""Sizes of tensor and weight groups in the list `all`."""


@dataclass(frozen=True)
class Layout:
    """Mode and group sizes of a layout; `str` gives the name that `--layouts` takes."""

    tensor: int
    """Size of the tensor group."""
    weight: int
    """Size of the weight group."""
    mode: Mode = Mode.ISP
    context: int = 1
    """Size of the context groups inside a tensor group."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    expert: int = 1
    """Value of `parallel.expert.size`: number of ranks that share the experts of a layer."""

    @property
    def num_ranks(self) -> int:
        """Return the least number of ranks that the layout needs."""
        # A weight group may have several tensor groups, or a tensor group several weight groups.
        return math.lcm(self.tensor, self.weight) * self.pipeline.size

    def __str__(self) -> str:
        stages = self.pipeline
        if stages.size > 1:
            chunks = f"x{stages.num_chunks}" * (stages.num_chunks > 1)
            sizes = replace(self, pipeline=PipelineConfig())
            return f"{sizes} {stages.schedule} {stages.size}{chunks}"
        if self.expert > 1:
            return f"{replace(self, expert=1)} ep{self.expert}"
        if self.context > 1:
            return f"isp {self.tensor // self.context}x{self.context}x{self.weight}"
        if self.mode is Mode.ISP:
            return f"isp {self.tensor}x{self.weight}"
        return f"{self.mode} {self.tensor}"

    def of(self, base: ParallelConfig) -> ParallelConfig:
        """Return `base` with the mode and sizes of this layout."""
        # Keys about gathering weights are refused in modes that do not gather.
        weight = base.weight if self.mode.gathers_weights else WeightConfig()
        return ParallelConfig(
            tensor=replace(base.tensor, size=self.tensor, mode=self.mode),
            weight=replace(weight, size=self.weight),
            sequence_2D=replace(
                base.sequence_2D,
                enable=self.context > 1,
                head_size=None,
                context_size=self.context if self.context > 1 else None,
            ),
            sequence_scan=base.sequence_scan,
            pipeline=self.pipeline,
            expert=replace(base.expert, size=self.expert),
        )


def fault_of(subject: Subject, layout: Layout, parallel: ParallelConfig) -> str:
    """Return the reason why the model cannot be split in `layout`; "" if it can."""
    try:
        subject.language_model(1.0).check_layout(layout.of(parallel), layout.tensor * TOKENS)
    except ValueError as error:
        return str(error)
    return ""


def layouts_of(
    names: str, subject: Subject, parallel: ParallelConfig
) -> tuple[list[Layout], list[str]]:
    """Return the layouts that `names` lists, and sentences about those that "all" leaves out.

    "all" has a list of layouts, without those that the model cannot be split in. Raises ConfigError
    for an unknown name, and if the model cannot be split in any layout of "all".
    """
    if names != "all":
        found = [_layout(name.strip(), names) for name in names.split(",")]
        return list(dict.fromkeys(found)), []
    # "all" lists layouts in isp mode, in isp mode with context groups, and in the other modes. If
    # the model has experts, it adds layouts in which several ranks share the experts of a layer.
    every = [Layout(tensor, weight) for tensor in _SIZES for weight in _SIZES]
    every += [_with_context(*sizes) for sizes in ((1, 2, 1), (2, 2, 4), (1, 4, 2))]
    others = (mode for mode in Mode if not mode.gathers_weights)
    every += [Layout(tensor, 1, mode) for mode in others for tensor in _SIZES[1:]]

    if subject.language_model(1.0).trace.elements(ParameterRole.EXPERT):
        sizes = ((1, 2, 2), (2, 4, 2), (4, 4, 4))
        every += [Layout(tensor, weight, expert=expert) for tensor, weight, expert in sizes]
        every += [replace(x, expert=x.tensor) for x in every if x.mode is not Mode.ISP]
    by_fault: dict[str, list[Layout]] = {}
    for layout in every:
        by_fault.setdefault(fault_of(subject, layout, parallel), []).append(layout)
    found = by_fault.pop("", [])
    if not found:
        raise ConfigError(next(iter(by_fault)))
    return found, [f"without {', '.join(map(str, of))}: {why}" for why, of in by_fault.items()]


def most_stages(names: str) -> int:
    """Return the largest number of pipeline stages of the layouts in `names`, but at least 2."""
    found = [] if names == "all" else [_layout(name.strip(), names) for name in names.split(",")]
    return max([2, *(x.pipeline.size * x.pipeline.num_chunks for x in found)])


def _with_context(head: int, context: int, weight: int) -> Layout:
    """Return the isp layout with head groups of size `head` and context groups of `context`.

    They form tensor groups of `head` x `context` ranks.
    """
    return Layout(head * context, weight, context=context)


def _layout(name: str, text: str) -> Layout:
    """Return the layout called `name`; raise ConfigError for a name that is not a layout's.

    `text` is the whole value of --layouts, for the error. A suffix of the name for the pipeline or
    for experts is cut off first; the function calls itself with the rest of the name.
    """
    if cut := re.fullmatch(r"(.+) (\w+) ([2-9])(?:x([2-9]))?", name):
        schedule = next((s for s in PipelineSchedule if s.lower() == cut[2].lower()), None)
        if schedule is not None:
            try:
                stages = PipelineConfig(
                    size=int(cut[3]), schedule=schedule, num_chunks=int(cut[4] or 1)
                )
            except ValueError as error:
                raise ConfigError(f"--layouts {text}: {name!r}: {error}") from None
            return replace(_layout(cut[1], text), pipeline=stages)
    if cut := re.fullmatch(r"(.+) ep([2-9]|[1-9]\d)", name):
        return replace(_layout(cut[1], text), expert=int(cut[2]))
    if cut := re.fullmatch(r"([1-9]\d?)x([1-9]\d?)x([1-9]\d?)", name):
        return _with_context(*map(int, cut.groups()))
    if sizes := re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", name):
        return Layout(int(sizes[1]), int(sizes[2]))
    modes = "|".join(mode for mode in Mode if mode.splits_features)
    if split := re.fullmatch(rf"({modes}) ?([1-9]\d?)", name):
        return Layout(int(split[2]), 1, Mode(split[1]))
    raise ConfigError(
        f"--layouts {text}: {name!r} is no layout: write all, or sizes of the tensor and weight"
        f" group such as 2x4,4x1, or of head, context and weight group such as 2x2x4, or another"
        f" mode and its size such as mtp2. Each may be followed by parallel.expert.size, such as"
        f" 1x4 ep2, and by a pipeline's schedule and size, such as 2x2 1F1B 2, with chunks per rank"
        f" as in 1x2 Interleaved1F1B 2x2 or 1x1 ZBVZeroBubble 2x2"
    )
