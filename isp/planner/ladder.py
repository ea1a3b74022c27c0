"""The memory ladder: options that save memory, in the order of their cost, and what each gives.

The longest sequences of each step are found by rehearsals, with the options of all steps before
it but those that shorten them. Where weights, gradients and states alone are too much, the options
that take states off the device come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from isp.config import JobConfig
from isp.planner.lengths import Budget, Growth, Longest, Planned, Show, silent

__all__ = ["OPTIONS", "LadderStep", "MemoryOption", "changes", "climb", "with_keys"]


Keys = Mapping[str, Any]
"""Values of keys, each as `section.key`."""


class MemoryOption(NamedTuple):
    """Keys that save memory."""

    name: str
    keys: Keys
    of_states: bool = False
    """Whether it saves what does not grow with sequences."""


WITHOUT: Keys = {
    "model.checkpoint": 0.0,
    "model.checkpoint_keeps_attention": False,
    "model.checkpoint_distribute_activations": False,
    "model.checkpoint_norm_outputs": False,
    "model.checkpoint_mlp_activation": False,
    "model.loss_chunk_tokens": 0,
    "model.mlp_tile_tokens": 0,
    "model.checkpoint_offload": False,
    "model.checkpoint_segment": 0,
    "optimizer.offload_states": False,
    "optimizer.moment_dtype": "float32",
}
"""The first step: no option is taken."""
RECOMPUTE: Keys = {
    "model.checkpoint": 1.0,
    "model.checkpoint_keeps_attention": False,
    "model.checkpoint_norm_outputs": False,
    "model.checkpoint_mlp_activation": False,
}
OPTIONS = (
    MemoryOption("loss in chunks of tokens", {"model.loss_chunk_tokens": 4096}),
    MemoryOption(
        "recompute norms and activations",
        {"model.checkpoint_norm_outputs": True, "model.checkpoint_mlp_activation": True},
    ),
    MemoryOption(
        "recompute all but attention", {**RECOMPUTE, "model.checkpoint_keeps_attention": True}
    ),
    MemoryOption("recompute all", RECOMPUTE),
    MemoryOption("MLP in tiles of tokens", {"model.mlp_tile_tokens": 8192}),
    MemoryOption("inputs of blocks on the host", {"model.checkpoint_offload": True}),
    MemoryOption("inputs of every 4th block", {"model.checkpoint_segment": 4}),
    MemoryOption("moments in bfloat16", {"optimizer.moment_dtype": "bfloat16"}, of_states=True),
    MemoryOption("states on the host", {"optimizer.offload_states": True}, of_states=True),
)


class LadderStep(NamedTuple):
    """An option, with all before it that help."""

    option: str
    keys: Keys
    """All keys of the ladder."""
    longest: Longest
    growth: Growth
    """At that length."""
    taken: bool
    """Whether sequences are as long with it as without: else later ones go without it."""


def climb(planned: Planned, budget: Budget, *, progress: Show = silent) -> list[LadderStep]:
    """What each option gives; without those that this model or layout refuses."""
    keys: Keys = WITHOUT
    steps: list[LadderStep] = []
    reached = 0
    options = [MemoryOption("no option", {}), *_ordered(planned, budget)]
    for option in progress(options, "longest sequences with each step of the memory ladder"):
        more = {**keys, **option.keys}
        try:
            there = replace(planned, config=with_keys(planned.config, more))
        except ValueError:
            continue
        longest = there.longest(budget)
        reaches = longest.seq_len or -budget.excess(longest.memory)
        taken = not steps or reaches >= reached
        growth = there.growth(longest.seq_len or planned.config.data.seq_len)
        steps.append(LadderStep(option.name, more, longest, growth, taken))
        if taken:
            keys, reached = more, reaches
    return steps


def with_keys(config: JobConfig, keys: Keys) -> JobConfig:
    """`config` with other values of `section.key`.  Raises ValueError if they do not go with it."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in keys.items():
        section, key = path.split(".")
        sections.setdefault(section, {})[key] = value
    changed = {name: replace(getattr(config, name), **of) for name, of in sections.items()}
    return replace(config, **changed)


def changes(config: JobConfig, keys: Keys) -> list[str]:
    """The words of a command line that make `config` one with these keys."""
    words = []
    for path, value in keys.items():
        section, key = path.split(".")
        if getattr(getattr(config, section), key) != value:
            words.append(f"--{path} {str(value).lower()}")
    return words


def _ordered(planned: Planned, budget: Budget) -> Sequence[MemoryOption]:
    states = replace(planned, config=with_keys(planned.config, WITHOUT)).peak(planned.unit).states
    if states < budget.device:
        return OPTIONS
    return sorted(OPTIONS, key=lambda option: not option.of_states)
