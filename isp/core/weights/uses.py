"""The uses of weights in a training step, in order, from a model's declaration and its actions.

    action   F0 B0 F1 B1 ...          work of the pipeline: one micro-batch on one model chunk
    span     one block in one action  a forward; or a recompute (if any) and backward together; or
                                      a recompute alone, for the input of a later block
    use      one place in a span      a linear that reads its weight, or a bare launch point (attn)

Nothing here needs torch; any model can declare its blocks.
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
    "step_spans",
]


class ActionKind(StrEnum):
    """The kinds of work that a pipeline stage does for one micro-batch and one model chunk."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradient of the input, and, where the backward is not split, of the weights too."""
    WEIGHT_GRADIENT = "W"
    """The second half of a split backward: it reads activations only, no weight."""


class Action(NamedTuple):
    """One entry of a pipeline stage's order of work."""

    kind: ActionKind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Use(NamedTuple):
    """One place in a block's forward, as the model declares it."""

    name: str
    """Name to print: `wqkv`, `attn`, ..."""
    weight: str | None = None
    """Unique name of the weight that is read here; None for a bare launch point. Several uses may
    have the same weight: a module that is called twice, or tied weights."""
    launch_point: LaunchPoint | None = None
    """The configuration's name for this use; None: it has none."""
    in_recompute: bool = True
    """False if a recompute leaves this use out: a launch point whose output was kept, so that the
    parts before and after it are recomputed separately; or a weight that backward reads, but no
    recompute."""
    weight_in_backward: bool = True
    """False if backward does not read the weight: an embedding, or a linear whose input needs no
    gradient."""
    bias: str | None = None
    """Unique name of the bias of the layer that reads the weight; None: the layer has none."""
    passes: int | None = None
    """Number of times that activations are read or written before the layer's matmul, from which
    `isp layouts` estimates time; None: unknown."""
    with_previous: bool = False
    """True if the weight is read together with that of the use before: the weights of all such
    uses are gathered from the first use to the end of the last."""


class Block(NamedTuple):
    """A part of the model: the unit that prefetch per layer gathers together."""

    name: str
    uses: tuple[Use, ...]
    """The block's uses in forward order."""
    recomputed: bool = False
    """True if the block's activations are recomputed in backward."""
    input_kept: bool = True
    """True if the block's input is kept for its recompute. Else, backward first recomputes the
    blocks before it, from the last block whose input was kept."""

    @property
    def groups(self) -> tuple[int, ...]:
        """For each use, the index of the first use whose weight is read together with its own."""
        found: list[int] = []
        latest = 0
        for v, use in enumerate(self.uses):
            found.append(latest if use.with_previous else v)
            latest = latest if use.weight is None else found[v]
        return tuple(found)


Chunks = tuple[tuple[Block, ...], ...]
"""The model chunks of this stage, each with its blocks in forward order."""


class Site(NamedTuple):
    """A use in a phase: the indices of its chunk, of the block in it, and of the use in that."""

    phase: Phase
    chunk: int
    block: int
    use: int


class Span(NamedTuple):
    """The uses of one block in one action. Recompute and backward are one span, with one gather."""

    action: Action
    block: int
    sites: tuple[Site, ...]
    reads: tuple[str | None, ...]
    """For each site, the name of the weight that is read there, or None."""
    until: tuple[int, ...]
    """For each site, the offset of the last site whose weight is read together with its own; its
    weight stays gathered until then."""

    @property
    def unit(self) -> tuple[int, int]:
        """Indices (chunk, block): spans with the same unit read the same weights."""
        return self.action.chunk, self.block

    @property
    def computes_again(self) -> bool:
        """True if the span recomputes the block for a later block's input, without a backward."""
        backward = self.action.kind is ActionKind.BACKWARD
        return backward and all(site.phase is Phase.RECOMPUTE for site in self.sites)


def recomputed_blocks(num_layers: int, fraction: float) -> tuple[bool, ...]:
    """Return True for each block that is recomputed: the first ceil(fraction * num_layers).

    The first ones, because their activations live longest; the last block would be recomputed
    while the activations of all others are still in memory. Rounded up, because the fraction is
    set to make a run fit. The fraction is taken as written: 0.07 of 100 blocks is 7, though the
    float is above 0.07. Raises ValueError if it is not in 0..1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"model.checkpoint={fraction} must be between 0 (none) and 1 (all layers)")
    count = math.ceil(Fraction(str(fraction)) * num_layers)
    return tuple(layer < count for layer in range(num_layers))


def inputs_kept(recomputed: tuple[bool, ...], segment: int) -> tuple[bool, ...]:
    """Return True for each block of a chunk that keeps its input.

    The recomputed blocks, which come first, are divided into segments of `segment` blocks (the
    last may be shorter), and the first block of a segment keeps its input. 0: every block does.
    """
    return tuple(not (r and segment and b % segment) for b, r in enumerate(recomputed))


def sequential_actions(num_micro_batches: int, *, training: bool = True) -> tuple[Action, ...]:
    """Return the actions without a pipeline: F0 B0 F1 B1 ..., or F0 F1 ... for evaluation."""
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD) if training else (ActionKind.FORWARD,)
    return tuple(Action(kind, m) for m in range(num_micro_batches) for kind in kinds)


def step_spans(chunks: Chunks, actions: tuple[Action, ...]) -> list[Span]:
    """Return all spans of a step in the order in which they run."""
    _check_actions(chunks, actions)
    # Spans are computed once for each kind of action and chunk, because they are the same for all
    # micro-batches.
    passes = {
        (kind, c): list(_spans(kind, c, chunk))
        for c, chunk in enumerate(chunks)
        for kind in ActionKind
    }
    return [Span(action, *p) for action in actions for p in passes[action.kind, action.chunk]]


_Pass = tuple[Phase, int, str | None]
"""A use in an action: its phase, its index in the block, and the weight that it reads, if any."""


def _spans(
    kind: ActionKind, chunk: int, blocks: tuple[Block, ...]
) -> Iterator[tuple[int, tuple[Site, ...], tuple[str | None, ...], tuple[int, ...]]]:
    """Yield, for each block that an action of `kind` passes, the fields of its `Span` but `action`.

    A WEIGHT_GRADIENT reads no weights and yields nothing.
    """

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
            # At the last block of a segment, recompute the segment's blocks before it, to get the
            # inputs of all but the first, whose input was kept.
            ends = index + 1 == len(blocks) or blocks[index + 1].input_kept
            if ends and not block.input_kept:
                first = max(i for i in range(index) if blocks[i].input_kept)
                for before in range(first, index):
                    yield span(before, _forward(blocks[before], Phase.RECOMPUTE))
            yield span(index, _backward(block))


def _forward(block: Block, phase: Phase) -> Iterator[_Pass]:
    """Return all uses of a block, in forward order, with `phase`."""
    return ((phase, v, use.weight) for v, use in enumerate(block.uses))


def _backward(block: Block) -> Iterator[_Pass]:
    """Yield the uses of a block's backward, in order, and of the recomputes that it contains.

    Backward passes no bare launch points, only linears. Each part (`_parts`) is recomputed just
    before its own backward.
    """
    numbered = list(enumerate(block.uses))
    for part in reversed(_parts(numbered)) if block.recomputed else [numbered]:
        if block.recomputed:
            yield from ((Phase.RECOMPUTE, v, use.weight) for v, use in part if use.in_recompute)
        for v, use in reversed(part):
            if use.weight is not None:
                yield Phase.BACKWARD, v, use.weight if use.weight_in_backward else None


def _parts(numbered: list[tuple[int, Use]]) -> list[list[tuple[int, Use]]]:
    """Split the uses of a recomputed block at launch points whose outputs were kept.

    Backward recomputes the part after a kept output, runs that part's backward, and then recomputes
    the part before it. A use with a weight that no recompute passes splits nothing: the input of
    that use is recomputed with the part that contains it.
    """

    def kept(item: tuple[int, Use]) -> bool:
        return item[1].weight is None and not item[1].in_recompute

    return [list(part) for _, part in groupby(numbered, key=kept)]


def _check_actions(chunks: Chunks, actions: tuple[Action, ...]) -> None:
    """Assert that no action occurs twice, and that each comes after the action that it needs.

    A backward whose forward is not in `actions` is allowed: it continues an earlier plan.
    """
    done, every = set[Action](), frozenset(actions)
    for action in actions:
        assert 0 <= action.chunk < len(chunks), f"{action}: there are {len(chunks)} chunks"
        assert action not in done, f"{action} occurs twice in the order of work"
        needed = {
            ActionKind.FORWARD: None,
            ActionKind.BACKWARD: action._replace(kind=ActionKind.FORWARD),
            ActionKind.WEIGHT_GRADIENT: action._replace(kind=ActionKind.BACKWARD),
        }[action.kind]
        assert needed not in every - done, f"{action} comes before {needed}"
        done.add(action)
