"""A training step's uses, in order: the model's declaration and the pipeline's actions.

    action   F0 B0 F1 B1 ...          what the pipeline runs, one micro-batch on one chunk
    span     one block in one action  forward; or recompute (if recomputed) and backward, together;
                                      or recompute alone, for the input of a block behind
    use    one place in a span      a linear that reads its weight, or a bare launch point (attn)

Nothing here knows torch; a model says what it is made of, and any model can say it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from enum import StrEnum
from fractions import Fraction
from itertools import groupby
from typing import NamedTuple

from isp.core.mesh.config import LaunchPoint
from isp.core.mesh.phase import Phase

__all__ = [
    "Action",
    "ActionKind",
    "Block",
    "Chunks",
    "Site",
    "Span",
    "Use",
    "inputs_kept",
    "recomputed_blocks",
    "sequential_actions",
    "trace",
]


class ActionKind(StrEnum):
    """A pipeline stage's work on one micro-batch and one chunk."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradient of the input, and, where the backward is not split, of the weights too."""
    WEIGHT_GRADIENT = "W"
    """The other half of a split backward; reads activations only, so it uses no weight."""


class Action(NamedTuple):
    """One entry of a pipeline stage's order of work."""

    kind: ActionKind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Use(NamedTuple):
    """One place of a block's forward, as the model declares it."""

    name: str
    """For people: `wqkv`, `attn`, ..."""
    weight: str | None = None
    """The weight that is read here, by its unique name; None where there is only a launch point.
    The same name may stand at several uses: a module called twice, tied weights."""
    launch_point: LaunchPoint | None = None
    """The configuration's name for this use, where it has one."""
    in_recompute: bool = True
    """False where a recompute does not come by: a launch point whose output was kept, so that what
    lies before and behind it is recomputed separately, or a weight that backward alone reads
    again."""
    weight_in_backward: bool = True
    """False where backward does not read the weight: an embedding, an input without gradient."""
    bias: str | None = None
    """The bias of the layer that reads the weight, by its unique name."""
    passes: int | None = None
    """Work ahead of the layer's product; None where the model does not say, `isp layouts` needs it.
    """
    with_previous: bool = False
    """Whether the weight is read together with that of the last use before that has one: all of
    them are there from the first of these uses to the end of the last."""


class Block(NamedTuple):
    """The uses of one forward through a part of the model, gathered as one unit per layer."""

    name: str
    uses: tuple[Use, ...]
    recomputed: bool = False
    input_kept: bool = True
    """Whether a recompute finds its input; else it computes the blocks before again for it, from
    the last one whose input was kept."""

    @property
    def groups(self) -> tuple[int, ...]:
        """For each use the first of those whose weights are read together."""
        found: list[int] = []
        latest = 0
        for v, use in enumerate(self.uses):
            found.append(latest if use.with_previous else v)
            latest = latest if use.weight is None else found[v]
        return tuple(found)


Chunks = tuple[tuple[Block, ...], ...]
"""The model chunks of this stage, each with its blocks in forward order."""


class Site(NamedTuple):
    """A place in the model and the phase in which it is passed; indices into `Chunks`."""

    phase: Phase
    chunk: int
    block: int
    use: int


class Span(NamedTuple):
    """A block's part of one action. Recompute and backward are one span: gathered once for both."""

    action: Action
    block: int
    sites: tuple[Site, ...]
    reads: tuple[str | None, ...]
    """The weight that each site reads, if any."""
    until: tuple[int, ...]
    """For each site the last one until which its weight is there with others, itself if alone."""

    @property
    def unit(self) -> tuple[int, int]:
        """The block, as (chunk, block): spans with the same unit read the same weights."""
        return self.action.chunk, self.block

    @property
    def computes_again(self) -> bool:
        """Whether the block is computed for what it gives, and does not go backward yet."""
        backward = self.action.kind is ActionKind.BACKWARD
        return backward and all(site.phase is Phase.RECOMPUTE for site in self.sites)


def recomputed_blocks(num_layers: int, fraction: float) -> tuple[bool, ...]:
    """The recomputed layers: the first ceil(fraction * num_layers) of them.

    The first, because their activations live longest, and because the recompute of a last layer
    would come at the moment when all the others' activations are still there. Rounded up, because
    a fraction is asked for to make a run fit: never less than that. The fraction is taken as
    written (0.07 of 100 layers is 7). Raises ValueError if it is not in 0..1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"model.checkpoint={fraction} must be between 0 (none) and 1 (all layers)")
    count = math.ceil(Fraction(str(fraction)) * num_layers)
    return tuple(layer < count for layer in range(num_layers))


def inputs_kept(recomputed: tuple[bool, ...], segment: int) -> tuple[bool, ...]:
    """Whether the input of each block of a chunk is kept; of a segment's blocks, the first one's.

    The recomputed blocks are the first ones. Segments are of `segment` of them, the last one of
    what is left; 0: every block keeps its own.
    """
    return tuple(not (r and segment and b % segment) for b, r in enumerate(recomputed))


def sequential_actions(num_micro_batches: int, *, training: bool = True) -> tuple[Action, ...]:
    """The order of work without a pipeline: F0 B0 F1 B1 ..., or F0 F1 ... for evaluation."""
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD) if training else (ActionKind.FORWARD,)
    return tuple(Action(kind, m) for m in range(num_micro_batches) for kind in kinds)


def trace(chunks: Chunks, actions: tuple[Action, ...]) -> list[Span]:
    """Every span of a step in the order in which it runs."""
    _check_actions(chunks, actions)
    passes = {
        (kind, c): list(_spans(kind, c, chunk))
        for c, chunk in enumerate(chunks)
        for kind in ActionKind
    }
    return [Span(action, *p) for action in actions for p in passes[action.kind, action.chunk]]


_Pass = tuple[Phase, int, str | None]
"""A use that is passed, its phase, and the weight that it reads, if any."""


def _spans(
    kind: ActionKind, chunk: int, blocks: tuple[Block, ...]
) -> Iterator[tuple[int, tuple[Site, ...], tuple[str | None, ...], tuple[int, ...]]]:
    """The blocks that an action of `kind` passes, in order, each with the sites of its span."""

    def span(
        index: int, passes: Iterable[_Pass]
    ) -> tuple[int, tuple[Site, ...], tuple[str | None, ...], tuple[int, ...]]:
        found, groups = list(passes), blocks[index].groups
        keys = [(phase, groups[v]) for phase, v, _ in found]
        last = {key: offset for offset, key in enumerate(keys)}
        sites = tuple(Site(phase, chunk, index, v) for phase, v, _ in found)
        return index, sites, tuple(p[2] for p in found), tuple(last[key] for key in keys)

    if kind is ActionKind.FORWARD:
        for index, block in enumerate(blocks):
            yield span(index, _forward(block, Phase.FORWARD))
    if kind is ActionKind.BACKWARD:
        for index, block in reversed(list(enumerate(blocks))):
            ends = index + 1 == len(blocks) or blocks[index + 1].input_kept
            if ends and not block.input_kept:
                first = max(i for i in range(index) if blocks[i].input_kept)
                for before in range(first, index):
                    yield span(before, _forward(blocks[before], Phase.RECOMPUTE))
            yield span(index, _backward(block))


def _forward(block: Block, phase: Phase) -> Iterator[_Pass]:
    return ((phase, v, use.weight) for v, use in enumerate(block.uses))


def _backward(block: Block) -> Iterator[_Pass]:
    """Backward, and what is recomputed for it.

    In backward a launch point without a weight is no use: only linears are reached there.
    What is recomputed as one part is recomputed before its backward, see `_parts`.
    """
    numbered = list(enumerate(block.uses))
    for part in reversed(_parts(numbered)) if block.recomputed else [numbered]:
        if block.recomputed:
            yield from ((Phase.RECOMPUTE, v, use.weight) for v, use in part if use.in_recompute)
        for v, use in reversed(part):
            if use.weight is not None:
                yield Phase.BACKWARD, v, use.weight if use.weight_in_backward else None


def _parts(numbered: list[tuple[int, Use]]) -> list[list[tuple[int, Use]]]:
    """The uses of a recomputed block, cut into those that are recomputed together.

    Backward recomputes what lies behind a kept output, goes back through it, and only then
    recomputes what lies before. A weight that a recompute does not come by cuts nothing: what its
    use takes is recomputed with what lies before.
    """

    def kept(item: tuple[int, Use]) -> bool:
        return item[1].weight is None and not item[1].in_recompute

    return [list(part) for _, part in groupby(numbered, key=kept)]


def _check_actions(chunks: Chunks, actions: tuple[Action, ...]) -> None:
    """The forward of a backward may be none of these: then it was one of an earlier list."""
    done, every = set[Action](), frozenset(actions)
    for action in actions:
        assert 0 <= action.chunk < len(chunks), f"{action}: there are {len(chunks)} chunks"
        assert action not in done, f"{action} stands twice in the order of work"
        needed = {
            ActionKind.FORWARD: None,
            ActionKind.BACKWARD: action._replace(kind=ActionKind.FORWARD),
            ActionKind.WEIGHT_GRADIENT: action._replace(kind=ActionKind.BACKWARD),
        }[action.kind]
        assert needed not in every - done, f"{action} comes before {needed}"
        done.add(action)
