"""Plans of thousands of sizes, simulated, and their gathers counted in the simplest way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from isp.core.mesh import PipelineConfig, PipelineSchedule
from isp.core.mesh.config import LaunchPoint, OverlapUnit, Prefetch
from isp.core.mesh.phase import Phase
from isp.core.pipeline.order import PipelineOrder, one_forward_one_backward
from isp.core.weights.prefetch_plan import plan
from isp.core.weights.simulate import Simulation, simulate
from isp.core.weights.uses import (
    Action,
    ActionKind,
    Block,
    Chunks,
    Use,
    inputs_kept,
    sequential_actions,
    step_spans,
)
from tests.core.weights.schedules import EMBEDDING, HEAD, TIED_HEAD, block, interleaved


class Reading(NamedTuple):
    """One unit of overlap in use: a span of a layer, or one read of a module."""

    unit: object
    span: int
    reads: dict[str, Phase]
    """The phase of the first read of each weight."""


def uses(chunks: Chunks, order: tuple[Action, ...], unit: OverlapUnit) -> list[Reading]:
    found = []
    for number, span in enumerate(step_spans(chunks, order)):
        reads = [
            (weight, site.phase)
            for site, weight in zip(span.sites, span.reads, strict=True)
            if weight is not None
        ]
        if unit is OverlapUnit.MODULE:
            found += [Reading(weight, number, {weight: phase}) for weight, phase in reads]
        elif reads:
            found.append(Reading(span.unit, number, dict(reversed(reads))))
    return found


def counted_gathers(
    chunks: Chunks, order: tuple[Action, ...], unit: OverlapUnit
) -> Counter[tuple[str, Phase]]:
    """Return the gathers that the budget requires, by a look at all that happens between two
    uses.
    """
    gathers: Counter[tuple[str, Phase]] = Counter()
    last: dict[str, int] = {}
    everything = uses(chunks, order, unit)
    for i, use in enumerate(everything):
        for weight, phase in use.reads.items():
            since = last.get(weight)
            last[weight] = i
            if since is not None:
                between = {other.unit for other in everything[since + 1 : i]}
                if len(between) <= 1 or everything[since].span == use.span:
                    continue
            gathers[weight, phase] += 1
    return gathers


def check(
    chunks: Chunks, order: tuple[Action, ...], unit: OverlapUnit, launch: LaunchPoint
) -> Simulation:
    """Simulate the plan, and compare the result with the budget and the count."""
    made = plan.__wrapped__(chunks, order, Prefetch(unit=unit, launch=launch))
    result = simulate(made, chunks, order)
    assert result.gathers == counted_gathers(chunks, order, unit)
    assert all(ahead.uses > 0 for ahead in result.lookaheads), "gathered at the moment of use"
    assert (result.peak.blocks if unit is OverlapUnit.LAYER else result.peak.modules) <= 2
    return result


def check_without_overlap(chunks: Chunks, order: tuple[Action, ...], unit: OverlapUnit) -> None:
    """Check that a plan without overlap has the same gathers, each at the time of use."""
    made = plan.__wrapped__(chunks, order, Prefetch(unit=unit, overlap=False))
    result = simulate(made, chunks, order)
    assert result.gathers == counted_gathers(chunks, order, unit)
    assert all(ahead.uses == 0 for ahead in result.lookaheads)


def check_weights_that_stay(chunks: Chunks, order: tuple[Action, ...], unit: OverlapUnit) -> None:
    """Check that weights which stay are gathered once, before the first use, and freed after the
    last.
    """
    made = plan.__wrapped__(chunks, order, Prefetch(unit=unit, reshard_after_forward=False))
    result = simulate(made, chunks, order)
    first: dict[str, Phase] = {}
    for use in uses(chunks, order, unit):
        first = use.reads | first
    assert result.gathers == Counter(first.items())
    assert all(ahead.uses > 0 for ahead in result.lookaheads)
    reads = [weight for span in step_spans(chunks, order) for weight in span.reads]
    last = {weight: i for i, weight in enumerate(reads) if weight is not None}
    assert last == {act.weight: i for i, step in enumerate(made.entries) for act in step.after}


def every_size() -> Iterator[tuple[Chunks, tuple[Action, ...]]]:
    """Yield blocks 1 to 7 x weights 1 to 6 x every number of recomputed blocks; other options
    rotate.
    """
    orders = [
        sequential_actions(1),
        sequential_actions(2, training=False),
        sequential_actions(2),
        *(one_forward_one_backward(stage, 3, 3) for stage in range(3)),
    ]
    names = ("wqkv", "wo", "w1", "w2", "w3", "w4")
    cases = [(n, w, r) for n in range(1, 8) for w in range(1, 7) for r in range(n + 1)]
    for i, (num_blocks, num_weights, num_recomputed) in enumerate(cases):
        uses = names[:1] + ("attn",) * (num_weights > 1) + names[1:num_weights]
        recomputed = tuple(b < num_recomputed for b in range(num_blocks))
        kept = inputs_kept(recomputed, segment=(0, 2, 0, 3, 5)[i % 5])
        blocks = [
            block(f"layers.{b}", uses, recomputed=recomputed[b], input_kept=kept[b])
            for b in range(num_blocks)
        ]
        first = [EMBEDDING] * (i % 2)
        last = [(), (HEAD,), (TIED_HEAD,)][i % 3]
        yield ((*first, *blocks, *last),), orders[i % len(orders)]


def test_plans_of_every_size_are_valid() -> None:
    """Catches a size, a launch point or an order of work at which a rule breaks."""
    for i, (chunks, order) in enumerate(every_size()):
        check(chunks, order, OverlapUnit.MODULE, LaunchPoint.WO)
        for launch in list(LaunchPoint)[i % 2 :: 2]:
            check(chunks, order, OverlapUnit.LAYER, launch)
        for unit in OverlapUnit:
            check_without_overlap(chunks, order, unit)


def any_block(rng: random.Random, name: str, weights: list[str]) -> Block:
    """Return a block of 1 to 6 uses; some without a weight, some of a weight used earlier
    anywhere.
    """
    uses = []
    for v, point in enumerate(rng.sample([*LaunchPoint, None, None], rng.randint(1, 6))):
        weights.append(f"{name}.{v}")
        weight = rng.choices([weights[-1], rng.choice(weights), None], [8, 1, 1])[0]
        flags = {"in_recompute": rng.random() < 0.9, "weight_in_backward": rng.random() < 0.9}
        uses.append(Use(str(v), weight, point, **flags))
    return Block(name, tuple(uses), rng.random() < 0.5)


def any_order(rng: random.Random, num_chunks: int) -> tuple[Action, ...]:
    """Return a real schedule's order of work, or a random one with each F before its B."""
    stages = rng.randint(1, 3)
    stage = rng.randrange(stages)
    kind = rng.choice(["interleaved", "1F1B", "zero bubble", "V", "evaluation", "any"])
    if kind == "interleaved":
        return interleaved(stage, stages, num_chunks, rounds=1)
    if kind == "zero bubble" or (kind == "V" and num_chunks == 2):
        schedule = PipelineSchedule.ZBV if kind == "V" else PipelineSchedule.INTERLEAVED_ZERO_BUBBLE
        pipeline = PipelineConfig(size=stages + 1, schedule=schedule, num_chunks=num_chunks)
        return PipelineOrder(pipeline).actions(stage, stages + 1)
    if kind == "1F1B" and num_chunks == 1:
        return one_forward_one_backward(stage, stages, rng.randint(1, 4))
    cells = [(m, c) for m in range(rng.randint(1, 4)) for c in range(num_chunks)]
    waiting = [Action(ActionKind.FORWARD, m, c) for m, c in cells]
    order = []
    while waiting:
        action = waiting.pop(rng.randrange(len(waiting)))
        order.append(action)
        if action.kind is ActionKind.FORWARD and kind != "evaluation":
            waiting.append(action._replace(kind=ActionKind.BACKWARD))
    return tuple(order)


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_random_models_and_orders_are_valid(seed: int) -> None:
    """Catches weights shared across blocks and chunks, and unforeseen orders of work."""
    rng = random.Random(seed)
    for _ in range(60):
        weights: list[str] = []
        chunks = tuple(
            tuple(any_block(rng, f"{c}.{b}", weights) for b in range(rng.randint(1, 5)))
            for c in range(rng.randint(1, 3))
        )
        order = any_order(rng, len(chunks))
        for unit in OverlapUnit:
            check(chunks, order, unit, rng.choice(list(LaunchPoint)))
            check_without_overlap(chunks, order, unit)
            check_weights_that_stay(chunks, order, unit)
