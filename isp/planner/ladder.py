"""The memory ladder: keys that save memory, in the order in which they cost, and what each gives.

A rung is a line of `RUNGS`. What rows of a model it makes possible is found with all rungs before
it, by rehearsals, but for those that shorten them; the order is that of cost in time, except where
weights, gradients and states alone are too much: then what takes states off the device comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from isp.config import JobConfig
from isp.planner.lengths import Budget, Growth, Longest, Planned
from isp.planner.memory import Memory
from isp.planner.progress import SearchProgress, silent

__all__ = ["RUNGS", "LadderStep", "Rung", "changes", "climb", "with_keys"]


Keys = Mapping[str, Any]
"""Values of keys, each as `section.key`."""


class Rung(NamedTuple):
    """A step of the ladder."""

    name: str
    choices: Sequence[Keys]
    """The first of them that goes with a model and its layout counts."""
    of_states: bool = False
    """Whether it saves what no row has a part in."""


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
"""The ground that the ladder stands on."""
ALL_AGAIN: Keys = {
    "model.checkpoint": 1.0,
    "model.checkpoint_keeps_attention": False,
    "model.checkpoint_norm_outputs": False,
    "model.checkpoint_mlp_activation": False,
}
RUNGS = (
    Rung("loss in chunks of tokens", [{"model.loss_chunk_tokens": 4096}]),
    Rung(
        "norms and activations again",
        [{"model.checkpoint_norm_outputs": True, "model.checkpoint_mlp_activation": True}],
    ),
    Rung("all but attention again", [{**ALL_AGAIN, "model.checkpoint_keeps_attention": True}]),
    Rung("all again", [ALL_AGAIN]),
    Rung("MLP in tiles of tokens", [{"model.mlp_tile_tokens": 8192}]),
    Rung("inputs of blocks on the host", [{"model.checkpoint_offload": True}]),
    Rung("inputs of every 4th block", [{"model.checkpoint_segment": 4}]),
    Rung("moments in bfloat16", [{"optimizer.moment_dtype": "bfloat16"}], of_states=True),
    Rung("states on the host", [{"optimizer.offload_states": True}], of_states=True),
)


@dataclass(frozen=True)
class LadderStep:
    """A rung, with all before it."""

    rung: Rung
    keys: Keys
    """All keys of the ladder."""
    longest: Longest | Memory
    """Of rows; the memory of the shortest if none fits."""
    growth: Growth
    """At that length."""
    taken: bool
    """Whether rows are as long with it as without, or longer: else later ones go without it."""


def climb(
    planned: Planned, budget: Budget, *, progress: SearchProgress = silent
) -> list[LadderStep]:
    """What each rung gives, with all before it; without those that are not for this model."""
    keys: Keys = WITHOUT
    steps: list[LadderStep] = []
    reached = 0.0
    rungs = [Rung("nothing of it", [{}]), *_ordered(planned, budget)]
    for rung in progress(rungs, "longest rows with each rung of the memory ladder"):
        changed = _first_that_goes(planned.config, keys, rung)
        if changed is None:
            continue
        more, config = changed
        there = replace(planned, config=config)
        longest = there.longest(budget)
        length = longest.seq_len if isinstance(longest, Longest) else planned.config.data.seq_len
        reaches = _reach(longest, budget)
        taken = not steps or reaches >= reached
        steps.append(LadderStep(rung, more, longest, there.growth(length), taken))
        if taken:
            keys, reached = more, reaches
    return steps


def _reach(longest: Longest | Memory, budget: Budget) -> float:
    """Tokens of the longest row; below 0, and by how many bytes there is too little, if none."""
    return longest.seq_len if isinstance(longest, Longest) else -budget.excess(longest)


def _first_that_goes(
    config: JobConfig, keys: Keys, rung: Rung
) -> tuple[dict[str, Any], JobConfig] | None:
    """`keys` with those of a rung, and the configuration with them; None if none of them goes."""
    for choice in rung.choices:
        more = {**keys, **choice}
        try:
            return more, with_keys(config, more)
        except ValueError:
            continue
    return None


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


def _ordered(planned: Planned, budget: Budget) -> Iterable[Rung]:
    states = replace(planned, config=with_keys(planned.config, WITHOUT)).peak(planned.unit).states
    if states < budget.device:
        return RUNGS
    return sorted(RUNGS, key=lambda rung: not rung.of_states)
