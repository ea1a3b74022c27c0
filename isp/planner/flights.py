"""A rank's weights and gradients that travel: their pools, and what is on its way."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from isp.core.mesh import ParallelConfig
from isp.core.mesh.config import Prefetch
from isp.core.weights.prefetch_plan import WeightOpKind, plan
from isp.core.weights.uses import Action, Block, Chunks
from isp.planner.case import Coordinates, PlanCase
from isp.planner.declared import bare, shape_of
from isp.planner.rank import DryRank, Heard
from isp.planner.rehearsal import records_of

__all__ = ["Flights", "alike_in_weights", "gather_pool", "reductions"]


class _InFlight(NamedTuple):
    """Bytes of full gradients on their way."""

    before: int
    """Amount as a block's backward begins."""
    after: int


Flights = defaultdict[str, _InFlight]
"""By block, in the last backward."""


def reductions(case: PlanCase, place: Coordinates) -> tuple[Flights, int]:
    """The gradients on their way, and bytes of the buffers they are reduced into, which stay."""
    found: dict[str, _InFlight] = {}
    pool_bytes = 0
    receives = case.on_cpu and case.topology.zero1 > 1
    if case.gathers_weights or receives:
        blocks = _blocks(case, place)[::-1]
        records = records_of(case, place, blocks)
        order = tuple((b.name, tuple(records[b.name].gradients(b))) for b in blocks)
        alike = replace(case, micro_num=1)
        if case.gathers_weights:
            few = min(case.micro_num, 4)  # as good as many
            alike = alike_in_weights(case, micro_num=few)
        if not receives:
            alike = replace(alike, topology=replace(alike.topology, zero1=1))
        found, pool_bytes = _reduced(alike, place._replace(tensor=0, zero1=0), order)
    return defaultdict(lambda: _InFlight(0, 0), found), pool_bytes


@lru_cache(maxsize=1024)
def _reduced(
    case: PlanCase, place: Coordinates, order: tuple[tuple[str, tuple[str, ...]], ...]
) -> tuple[dict[str, _InFlight], int]:
    """The bytes that sums of gradients take in the last backward pass, and their pool then.

    `GradientReducer` keeps what it sends, and `MainGradients` what they receive to add up.
    """
    rank, found = DryRank(case, place, Heard()), {}
    uses = Counter(name for _, names in order for name in names)

    def in_flight() -> int:
        return rank.reducer.bytes_in_flight + rank.gradients.received_bytes

    for number in range(case.micro_num):
        last = number == case.micro_num - 1
        if last:
            rank.expect_last(uses)
        for block, names in order:
            before = in_flight()
            for name in names:
                rank.deliver(name, last=last)
            found[block] = _InFlight(before, in_flight())
    return found, rank.pool.reserved_bytes


def gather_pool(case: PlanCase, place: Coordinates) -> int:
    """Bytes of the buffers that weights are gathered into: of two units, or all if these stay."""
    if not case.gathers_weights:
        return 0
    chunks = shape_of(case, place.stage).chunks
    rank = DryRank(case, place, Heard())
    layouts = {name: rank.travels(name).layout for name in rank.parameters}
    uses = (use for block in _blocks(case, place) for use in block.uses)
    names = {name for v in uses for name in (v.weight, v.bias) if name is not None}
    kinds = tuple((name, prod(layouts[name].global_shape)) for name in sorted(names))
    actions = case.order.actions(place.stage, case.few_micro_batches)
    reserved = _reserved(chunks, actions, case.parallel.weight.prefetch, kinds)
    a_name = {kind: name for name, kind in kinds}
    pieces = {kind: layouts[a_name[kind]] for kind in reserved}
    return case.item_bytes * sum(
        reserved[kind] * prod(layout.piece_shape) * layout.parts for kind, layout in pieces.items()
    )


@lru_cache(maxsize=512)
def _reserved(
    chunks: Chunks,
    actions: tuple[Action, ...],
    prefetch: Prefetch,
    kinds: tuple[tuple[str, int], ...],
) -> Counter[int]:
    """The buffers of each kind a pool has made by the end of a step."""
    steps, kind_of = plan(chunks, actions, prefetch), dict(kinds)
    leased: Counter[int] = Counter()
    reserved: Counter[int] = Counter()
    acts = [*steps.start, *(act for step in steps.entries for act in (*step.before, *step.after))]
    for act in acts:
        for kind in (kind_of[name] for name in act.parameters):
            if act.kind is WeightOpKind.GATHER:
                leased[kind] += 1
                reserved[kind] = max(reserved[kind], leased[kind])
            elif act.kind is WeightOpKind.FREE:
                leased[kind] -= 1
    return reserved


def alike_in_weights(case: PlanCase, micro_num: int = 1) -> PlanCase:
    """The case without what decides nothing about weights, so that others share the answer."""
    parallel = case.parallel
    return replace(
        case,
        model=bare(case.model),
        parallel=ParallelConfig(weight=parallel.weight, pipeline=parallel.pipeline),
        topology=replace(case.topology, tensor=1, context=1),
        rows=1,
        tokens=1,
        micro_num=micro_num,
    )


def _blocks(case: PlanCase, place: Coordinates) -> list[Block]:
    """The blocks of all chunks of a rank."""
    return [block for chunk in shape_of(case, place.stage).chunks for block in chunk]
