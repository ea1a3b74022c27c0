"""Models and orders of work for tests of the prefetch plan, and a plan as lines of text."""

from __future__ import annotations

from collections.abc import Iterable

from isp.core.mesh.config import LaunchPoint
from isp.core.mesh.phase import Phase
from isp.core.weights.prefetch_plan import PrefetchPlan, WeightOp
from isp.core.weights.uses import (
    Action,
    ActionKind,
    Block,
    Chunks,
    Use,
    inputs_kept,
    recomputed_blocks,
)

VISITS = ("wqkv", "attn", "wo", "w1", "w2")
EMBEDDING = Block("embedding", (Use("embedding", "embedding", weight_in_backward=False),))
HEAD = Block("head", (Use("head", "head"),))
TIED_HEAD = Block("head", (Use("head", "embedding"),))


def block(
    name: str, uses: Iterable[str] = VISITS, *, recomputed: bool = False, input_kept: bool = True
) -> Block:
    """Return a block whose uses each read a weight, except `attn`; names give the launch points."""
    points = {str(point): point for point in LaunchPoint}
    return Block(
        name,
        tuple(Use(v, None if v == "attn" else f"{name}.{v}", points.get(v)) for v in uses),
        recomputed,
        input_kept,
    )


def decoder(num_layers: int, fraction: float = 0.0, segment: int = 0) -> Chunks:
    """Return one chunk: embedding, layers (a fraction is recomputed, in segments), head."""
    recomputed = recomputed_blocks(num_layers, fraction)
    kept = inputs_kept(recomputed, segment)
    layers = (
        block(f"layers.{i}", recomputed=r, input_kept=k)
        for i, (r, k) in enumerate(zip(recomputed, kept, strict=True))
    )
    return ((EMBEDDING, *layers, HEAD),)


def actions(text: str) -> tuple[Action, ...]:
    """Parse an order of work such as `F0 F1.1 B0`: kind, micro-batch, and chunk if it is not 0."""
    return tuple(
        Action(ActionKind(word[0]), *(int(number) for number in word[1:].split(".")))
        for word in text.split()
    )


def interleaved(stage: int, stages: int, chunks: int, rounds: int) -> tuple[Action, ...]:
    """Return interleaved 1F1B of `rounds` times `stages` micro-batches (Narayanan et al. 2021,
    2.2).
    """
    total = stages * chunks * rounds
    order = [
        (r * stages + m, chunk)
        for r in range(rounds)
        for chunk in range(chunks)
        for m in range(stages)
    ]
    forward = [Action(ActionKind.FORWARD, m, chunk) for m, chunk in order]
    backward = [Action(ActionKind.BACKWARD, m, chunks - 1 - chunk) for m, chunk in order]
    warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
    steady = [a for pair in zip(forward[warm_up:], backward, strict=False) for a in pair]
    return (*forward[:warm_up], *steady, *backward[total - warm_up :])


def events(plan: PrefetchPlan, chunks: Chunks) -> list[str]:
    """Return one line for each step, such as `F0 a.wo: wait a.wo; gather b.wqkv b.wo | free
    a.wo`.
    """
    letters = {Phase.FORWARD: "F", Phase.RECOMPUTE: "R", Phase.BACKWARD: "B"}
    lines = [f"start: {_acts(plan.start)}".rstrip()]
    for step in plan.entries:
        block = chunks[step.site.chunk][step.site.block]
        place = f"{letters[step.site.phase]}{step.micro_batch} {block.name}"
        before, after = _acts(step.before), _acts(step.after)
        acts = (f" {before}" if before else "") + (f" | {after}" if after else "")
        lines.append(f"{place}.{block.uses[step.site.use].name}:{acts}")
    return lines


def _acts(acts: Iterable[WeightOp]) -> str:
    words: list[str] = []
    kind = None
    for act in acts:
        if act.kind is not kind:
            words.append(("; " if words else "") + act.kind)
        words.append(f" {act.weight}")
        kind = act.kind
    return "".join(words)
