"""Calls and bytes of every collective in a step, exactly as a run counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeVar

from isp.parallel import Axis
from isp.parallel.config import WeightConfig
from isp.planner.case import Case
from isp.planner.declared import (
    actions_of,
    bias_of,
    buckets,
    few_micro_batches,
    has_bias,
    order_of,
    stage_chunks,
    weight_layout,
    weights_plan,
)
from isp.planner.trips import Trip, Trips
from isp.weights.phase import Phase
from isp.weights.plan import ActKind
from isp.weights.trace import Action, Block, Chunks, Visit

K = TypeVar("K")

__all__ = [
    "Count",
    "Traffic",
    "block_trips",
    "ends_of_step",
    "gathers",
    "gradient_names",
    "neighbours_of",
    "traffic",
]


class Count(NamedTuple):
    """Transfers of one kind over one channel."""

    calls: int
    sent_bytes: int


class Traffic(NamedTuple):
    """All transfers of a rank in a step."""

    by_channel: dict[tuple[str, str], Count]
    """By (kind, channel), as the log has them."""
    by_subject: dict[str, Count]
    """By what travels."""

    @property
    def sent_bytes(self) -> int:
        """What the rank sends in all."""
        return sum(count.sent_bytes for count in self.by_channel.values())


def traffic(case: Case, rank: int) -> Traffic:
    """What `rank` sends in a step, from the broadcast of the data to the published weights."""
    place = case.place(rank)
    trips = Trips(case, place)
    totals: Counter[Trip] = Counter()
    for block in (block for chunk in stage_chunks(case, place.stage) for block in chunk):
        for trip in block_trips(trips, block):
            totals[trip] += case.micro_num
    totals.update(_between_stages(trips))
    if case.gathers_weights:
        for name, count in gathers(case, place.stage).items():
            totals[trips.gather(weight_layout(case, name, place))] += count
    totals.update(ends_of_step(trips))
    return Traffic(
        _sum(((trip.kind, str(trip.channel)), trip, n) for trip, n in totals.items()),
        _sum((trip.what, trip, n) for trip, n in totals.items()),
    )


def _sum(items: Iterable[tuple[K, Trip, int]]) -> dict[K, Count]:
    found: dict[K, Count] = {}
    for key, trip, n in items:
        calls, sent = found.get(key, Count(0, 0))
        found[key] = Count(calls + n, sent + n * trip.sent_bytes)
    return found


def block_trips(trips: Trips, block: Block) -> Iterator[Trip]:
    """What travels for one micro-batch in a block, forward and backward, but gathered weights."""
    if block.name == "embedding":
        yield from (*trips.row().forward, *trips.row().backward)
    elif block.name == "head":
        yield from (*trips.head().forward, *trips.loss(), *trips.head().backward)
    else:
        yield from _layer_trips(trips, block)
    if trips.case.gathers_weights:
        for visit in block.visits:
            for name in gradient_names(trips.case, block, visit):
                yield trips.reduce(weight_layout(trips.case, name, trips.place))


def _layer_trips(trips: Trips, block: Block) -> Iterator[Trip]:
    there, back = trips.attention()
    linears = (trips.column(), trips.row()) * 2
    forward = [trip for linear in linears for trip in linear.forward]
    yield from (*there, *forward, *back)
    yield from (trip for linear in linears for trip in linear.backward)
    if block.recomputed:
        yield from (*trips.recomputed_inputs(), *forward)
        if not trips.case.model.checkpoint_keeps_attention:
            yield from there


def gradient_names(case: Case, block: Block, visit: Visit) -> list[str]:
    """The gradients that a visit sets off in backward; a tied head has no bias of its own."""
    if visit.weight is None:
        return []
    if block.name == "head" or not has_bias(case, visit.weight):
        return [visit.weight]
    return [visit.weight, bias_of(visit.weight)]


def _between_stages(trips: Trips) -> dict[Trip, int]:
    """To each neighbour go as many as come from it: activations one way, gradients the other."""
    neighbours = sum(sum(ends) for ends in neighbours_of(trips.case, trips.place.stage))
    if not neighbours:
        return {}
    send, calls = trips.between_stages(), neighbours * trips.case.micro_num
    return {send: calls, send._replace(kind="recv", sent_bytes=0): calls}


def neighbours_of(case: Case, rank: int) -> list[tuple[bool, bool]]:
    """For each chunk whether the stage before it, and the one behind it, is on another rank."""
    order = order_of(case)
    own = order.stages_of(rank)
    return [
        (stage > 0 and stage - 1 not in own, stage + 1 < order.num_stages and stage + 1 not in own)
        for stage in own
    ]


def ends_of_step(trips: Trips) -> Counter[Trip]:
    """What travels once a step: data, gradients of replicas, the norm, the weights, the loss."""
    case = trips.case
    found = [trips.data(), trips.over(Axis.DATA, 8, "numbers")]
    held = buckets(case, trips.place)
    for axis, length in held.gradients:
        found.append(trips.over(axis, length * case.wide_bytes, "gradients"))
    found += [_tied(trips), trips.over(Axis.MODEL, 8, "numbers")]
    found += [trips.publish(length) for length in held.published]
    found.append(trips.over(Axis.DATA if case.splits_logits else Axis.STAGE, 8, "numbers"))
    found.append(trips.over(Axis.PIPELINE, 8, "numbers"))
    return Counter(trip for trip in found if trip is not None)


def _tied(trips: Trips) -> Trip | None:
    """The gradient of a table that the first and the last stage have, on different ranks."""
    case, spans = trips.case, stage_chunks(trips.case, trips.place.stage)
    ends = (spans[0][0].name == "embedding") + (spans[-1][-1].name == "head")
    if not case.model.tie_embeddings or ends != 1:
        return None
    numbers = prod(weight_layout(case, "embedding.weight", trips.place).local_shape)
    return trips.over(Axis.EMBEDDING, numbers * case.wide_bytes, "gradients")


def gathers(case: Case, stage: int) -> Counter[str]:
    """How often each weight of a stage is gathered in a step, and each bias beside its weight.

    [Note: Long steps] In the steady state of a schedule as many micro-batches more as there are
    ranks in the pipeline gather always the same, so a step of many is planned as two short ones.
    """
    few, period = few_micro_batches(case), case.topology.pipeline
    short = _gathers(case, stage, few)
    if case.micro_num == few:
        return short
    longer, rest = _gathers(case, stage, few + period), (case.micro_num - few) // period
    return Counter({name: short[name] + rest * (longer[name] - short[name]) for name in longer})


def _gathers(case: Case, stage: int, micro_num: int) -> Counter[str]:
    chunks = stage_chunks(case, stage)
    blocks = [block for chunk in chunks for block in chunk]
    weights = {visit.weight for block in blocks for visit in block.visits if visit.weight}
    return _count_gathers(
        chunks,
        actions_of(case, stage, micro_num),
        case.parallel.weight,
        frozenset(weight for weight in weights if has_bias(case, weight)),
    )


@lru_cache(maxsize=512)
def _count_gathers(
    chunks: Chunks,
    actions: tuple[Action, ...],
    config: WeightConfig,
    with_bias: frozenset[str],
) -> Counter[str]:
    """A bias is gathered with its weight if a forward reads it before the weight is freed."""
    plan = weights_plan(chunks, actions, config)
    found: Counter[str] = Counter(a.weight for a in plan.start if a.kind is ActKind.GATHER)
    forward: dict[str, bool] = {}
    for step in plan.steps:
        for act in step.before:
            if act.kind is ActKind.GATHER:
                found[act.weight] += 1
            elif act.kind is ActKind.WAIT:
                forward[act.weight] = False
        weight = chunks[step.site.chunk][step.site.block].visits[step.site.visit].weight
        if weight in forward and step.site.phase is not Phase.BACKWARD:
            forward[weight] = True
        for act in step.after:
            if act.kind is ActKind.FREE and forward.pop(act.weight) and act.weight in with_bias:
                found[bias_of(act.weight)] += 1
    return found
