"""Calls and bytes of every collective in a step, exactly as a run counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple, TypeVar

from isp.comm.host import FROM_HOST, TO_HOST
from isp.comm.tag import Purpose, Tag, Transfer
from isp.parallel import Axis, SequenceScan
from isp.planner.case import Coordinates, PlanCase
from isp.planner.declared import shape_of
from isp.planner.rank import DryRank, Heard
from isp.planner.record import BlockRecord, Event, Gradient, Launch
from isp.planner.rehearsal import records_of, rehearsal
from isp.weights.plan import ActKind, plan
from isp.weights.trace import ActionKind, Block, sequential_actions, trace

K = TypeVar("K")

__all__ = [
    "Count",
    "Traffic",
    "between_stages",
    "block_transfers",
    "gathers",
    "gradients_of",
    "neighbours_of",
    "scans",
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
    by_purpose: dict[Purpose, Count]
    """By what travels."""

    @property
    def sent_bytes(self) -> int:
        """The sum of sent bytes."""
        return sum(count.sent_bytes for count in self.by_channel.values())


def traffic(case: PlanCase, rank: int) -> Traffic:
    """The transfers `rank` sends in a step, from the data's broadcast to the published weights."""
    place = case.place(rank)
    found: Counter[Transfer] = Counter()
    blocks = [block for chunk in shape_of(case, place.stage).chunks for block in chunk]
    records = records_of(case, place, blocks)
    for block in blocks:
        for transfer in block_transfers(records[block.name]):
            found[transfer] += case.micro_num
    found.update(_recompute_transfers(case, place, records))
    send = between_stages(case)
    for hop in (send, send._replace(kind="recv", sent_bytes=0)):  # as many come as go
        found[hop] += case.micro_num * sum(sum(ends) for ends in neighbours_of(case, place.stage))
    found.update(_weight_transfers(case, place, blocks, records))
    found.update(_ends_of_step(case, place))
    return Traffic(
        _sum(
            ((transfer.kind, transfer.channel), transfer, n) for transfer, n in found.items() if n
        ),
        _sum((transfer.tag.purpose, transfer, n) for transfer, n in found.items() if n),
    )


def scans(case: PlanCase) -> str:
    """How scans over several ranks are split, in words; "" if there are none."""
    sent = traffic(case, 0).by_purpose
    ways = {SequenceScan.HEADS: Purpose.SCAN_HEADS, SequenceScan.STATE: Purpose.STATES}
    found = " and ".join(way for way, purpose in ways.items() if purpose in sent)
    is_auto = case.parallel.sequence_scan is SequenceScan.AUTO
    why = " (auto, by the bytes that a rank receives)" if is_auto else ""
    return f"by {found}{why}" if found else ""


def _sum(items: Iterable[tuple[K, Transfer, int]]) -> dict[K, Count]:
    found: dict[K, Count] = {}
    for key, transfer, n in items:
        calls, sent = found.get(key, Count(0, 0))
        found[key] = Count(calls + n, sent + n * transfer.sent_bytes)
    return found


def block_transfers(record: BlockRecord) -> Iterator[Transfer]:
    """The transfers of one micro-batch in a block, besides weights and their gradients."""
    yield from _transfers((*record.forward, *record.backward))


def _transfers(events: Iterable[Event]) -> Iterator[Transfer]:
    return (event.transfer for event in events if isinstance(event, Launch))


def _recompute_transfers(
    case: PlanCase, place: Coordinates, records: dict[str, BlockRecord]
) -> Counter[Transfer]:
    """Transfers of blocks that are recomputed for the next one, and of inputs from the host."""
    found: Counter[Transfer] = Counter()
    for c, chunk in enumerate(shape_of(case, place.stage).chunks):
        spans = trace((chunk,), sequential_actions(1))
        for block in (chunk[span.block] for span in spans if span.computes_again):
            for transfer in _transfers(records[block.name].again):
                found[transfer] += case.micro_num
        transfers = [
            transfer for block in chunk for transfer in _transfers(records[block.name].forward)
        ]
        back = [
            transfer._replace(kind=FROM_HOST) for transfer in transfers if transfer.kind == TO_HOST
        ]
        for transfer in back:
            found[transfer] += case.micro_num
        if back:
            found[back[-1]] -= _never_left(case, place, c)
    return found


def _never_left(case: PlanCase, place: Coordinates, chunk: int) -> int:
    """The micro-batches whose last input is still on the device in their backward.

    No other has gone forward since.
    """
    last, count = -1, 0
    for kind, micro_batch, of in case.order.actions(place.stage, case.micro_num):
        if of == chunk and kind is ActionKind.FORWARD:
            last = micro_batch
        if of == chunk and kind is ActionKind.BACKWARD:
            count += micro_batch == last
    return count


def gradients_of(block: Block, record: BlockRecord) -> list[str]:
    """The parameters whose gradients the backward of a block gives, in order."""
    found = []
    for event in record.backward:
        if isinstance(event, Gradient):
            use = block.uses[event.use]
            name = use.bias if event.is_bias else use.weight
            assert name is not None
            found.append(name)
    return found


def between_stages(case: PlanCase) -> Transfer:
    """The transfer of a micro-batch to the next stage, whose gradient comes back."""
    sent = case.rows * case.tokens_between * case.language_model.hidden_size * case.item_bytes
    return Transfer("send", Axis.PIPELINE.value, Tag(Purpose.STAGE_ACTIVATION), sent)


def _weight_transfers(
    case: PlanCase, place: Coordinates, blocks: list[Block], records: dict[str, BlockRecord]
) -> Counter[Transfer]:
    """Weights gathered, and their gradients summed."""
    found: Counter[Transfer] = Counter()
    if not case.gathers_weights:
        return found
    heard = Heard()
    rank = DryRank(case, place, heard)
    for weight, count in gathers(case, place.stage).items():
        rank.gather(weight)
        found[heard.pop()] += count
    for block in blocks:
        for name in gradients_of(block, records[block.name]):
            rank.reduce(name)
            found[heard.pop()] += case.micro_num
    return found


def neighbours_of(case: PlanCase, rank: int) -> list[tuple[bool, bool]]:
    """For each chunk whether the stage before it, and the one behind it, is on another rank."""
    order = case.order
    own = order.stages_of(rank)
    return [
        (stage > 0 and stage - 1 not in own, stage + 1 < order.num_stages and stage + 1 not in own)
        for stage in own
    ]


def _ends_of_step(case: PlanCase, place: Coordinates) -> Counter[Transfer]:
    """The transfers once a step: data, gradients of replicas, the norm, the weights, the loss."""
    heard = Heard()
    rank = DryRank(case, place, heard)
    rank.share_batch()
    rank.gradients.reduce()
    if (table := _tied(case, place)) is not None:
        rank.add_tied(table)
    rank.publisher.launch()
    losses = Axis.DATA if rehearsal(case, place).splits_logits else Axis.STAGE
    for axis in (Axis.DATA, Axis.WORLD, losses, Axis.PIPELINE):
        rank.all_reduce_number(axis)
    return Counter(heard)


def _tied(case: PlanCase, place: Coordinates) -> str | None:
    """The weight of the first and the last stage, if the rank has one of two copies of it."""
    ends = {0, case.order.num_stages - 1} & set(case.order.stages_of(place.stage))
    return shape_of(case, place.stage).tied if len(ends) == 1 else None


def gathers(case: PlanCase, stage: int) -> Counter[str]:
    """The gathers in a step of each weight of a stage, and each bias beside it.

    [Note: Long steps] In the steady state of a schedule as many micro-batches more as there are
    ranks in the pipeline gather always the same, so a step of many is planned as two short ones.
    """
    few, period = case.few_micro_batches, case.topology.pipeline
    short = _gathers(case, stage, few)
    if case.micro_num == few:
        return short
    longer, rest = _gathers(case, stage, few + period), (case.micro_num - few) // period
    return Counter({name: short[name] + rest * (longer[name] - short[name]) for name in longer})


def _gathers(case: PlanCase, stage: int, micro_num: int) -> Counter[str]:
    chunks, actions = shape_of(case, stage).chunks, case.order.actions(stage, micro_num)
    start, steps = plan(chunks, actions, case.parallel.weight.prefetch)
    acts = chain(start, *(step.before for step in steps))
    return Counter(name for act in acts if act.kind is ActKind.GATHER for name in act.parameters)
