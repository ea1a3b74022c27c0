"""The memory of a rank by owner, at the moment of a step at which it takes most.

P parameters of a rank's stage, w ranks of a weight group, z of a zero1 group

    weights     P / w of the training dtype           what is replicated counts whole
    gradients   P / w in float32                      main gradients, in buckets
    optimizer   P / (w z) in float32                  master weights, none where they are the
                                                      weights themselves
                and as the update rule says           states: 2 P / (w z) in float32 for adamw,
                                                      with the masters on the host if offloaded

in the modes that split features with t in the place of w. This is the hybrid ZeRO of Rajbhandari
et al. 2020 with three sizes of its own (Chen et al. 2023, AMSP, arXiv 2311.00257). Activations and
attention are what a rehearsal keeps (`isp.planner.rehearsal`), for as many micro-batches as the
schedule does; the pools follow from the plan of gathers and from the gradients in flight. `work` is
what is in hand besides: what a block has computed again, gradients of activations, copies for a
collective, full gradients on their way. What lies in the memory of the host is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from isp.core.mesh.partition import chunk_range
from isp.core.optim.buckets import pads_little
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.core.weights.uses import ActionKind, Block
from isp.planner.case import Coordinates, PlanCase
from isp.planner.declared import (
    local_parameters,
    shape_of,
    trained_parameters,
    updated_parameters,
)
from isp.planner.flights import Flights, alike_in_weights, gather_pool, reductions
from isp.planner.rank import DryRank, Heard
from isp.planner.record import Saved
from isp.planner.rehearsal import records_of, rehearsal

__all__ = ["Memory", "busiest", "memory", "moments", "peak", "states"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank, by owner."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    pool: int = 0
    """Buffers that weights are gathered into and gradients reduced into."""
    activations: int = 0
    attention: int = 0
    loss: int = 0
    """Logits of a chunk of tokens, and the gradients that are computed with their loss."""
    work: int = 0
    host: int = 0
    """In the memory of the host, with copies for background saves: no part of `total`."""
    moment: str = ""
    """Moment of the maximum."""

    @property
    def total(self) -> int:
        """All of it on the device."""
        return sum(self.by_owner().values())

    @property
    def states(self) -> int:
        """The part independent of the batch: weights, gradients, optimizer."""
        return self.weights + self.gradients + self.optimizer

    def by_owner(self) -> dict[str, int]:
        """Bytes on the device by the owner's name."""
        owners = (f.name for f in fields(self) if f.name not in ("host", "moment"))
        return {name: getattr(self, name) for name in owners}


def states(case: PlanCase, place: Coordinates) -> Memory:
    """Weights, gradients and optimizer of a rank."""
    trained, parts = trained_parameters(case, place), case.topology.zero1
    numbers = sum(p.parameter.numel() for p in local_parameters(case, place))
    padded = sum(_padded(case, p) for p in trained)
    master_bytes = case.wide_bytes if case.item_bytes < case.wide_bytes else 0
    weights, on_host = numbers * case.item_bytes, case.optimizer.offload_states
    kept = sum(
        _owned(p.layout.local_shape, parts, place.zero1)
        * (master_bytes + case.state_bytes(p.name, p.layout))
        for p in updated_parameters(case, place)
    )
    copies = weights + kept if case.saves_in_background else 0
    return Memory(
        weights=weights,
        gradients=padded * case.wide_bytes,
        optimizer=0 if on_host else kept,
        host=copies + (kept if on_host else 0),
    )


def peak(case: PlanCase) -> Memory:
    """The memory of the rank that takes most, at its most; of the host the most of all."""
    found = [m for rank in busiest(case) for m in moments(case, rank)]
    return replace(max(found, key=lambda m: m.total), host=max(m.host for m in found))


def busiest(case: PlanCase) -> list[int]:
    """Ranks one of which takes most: first stages keep most micro-batches, the last has logits."""
    stage, last = case.topology.stage, case.topology.pipeline - 1
    return sorted(rank * stage + case.most_keys for rank in {0, min(1, last), last})


def memory(case: PlanCase, rank: int) -> Memory:
    """The memory of `rank` at its most."""
    return max(moments(case, rank), key=lambda m: m.total)


def moments(case: PlanCase, rank: int) -> list[Memory]:
    """The memory of `rank` at each moment of a step at which it may be at its most."""
    place = case.place(rank)
    flights, reduce_pool = reductions(case, place)
    pool = gather_pool(case, place) + reduce_pool
    fixed = replace(states(case, place), pool=pool)
    return list(_moments(case, place, fixed, flights))


def _padded(case: PlanCase, item: ShardedParameter) -> int:
    """Numbers of a main gradient, with what fills its last rows up to equal parts."""
    rows, *rest = item.layout.local_shape
    parts = case.topology.zero1 if _is_scattered(case, item) else 1
    return -(-rows // parts) * parts * prod(rest)


def _is_scattered(case: PlanCase, item: ShardedParameter) -> bool:
    """Whether each rank of the zero1 group has the sums of its own rows alone."""
    parts = case.topology.zero1
    same = parts == case.topology.weight_data == case.size(item.layout.reduce_over)
    return parts > 1 and same and pads_little(item.layout.local_shape[0], parts)


def _owned(shape: tuple[int, ...], parts: int, index: int) -> int:
    rows = chunk_range(shape[0], parts, index)
    return len(rows) * prod(shape[1:])


# -- moments of a step -----------------------------------------------------------------------


def _moments(
    case: PlanCase, place: Coordinates, fixed: Memory, flights: Flights
) -> Iterator[Memory]:
    kept = _kept(case, place)
    waiting = _most_waiting(case, place, kept)
    between = _between_stages(case, place)
    if place.stage < case.topology.pipeline - 1:  # the last of another micro-batch
        between += sum(own.on_both for own in kept)
    fixed = replace(fixed, host=fixed.host + _most_on_host(case, place, kept))
    for own, older in zip(kept, waiting, strict=True):
        base = replace(
            fixed,
            activations=older.activations + own.ends + between + _batch(case),
            attention=older.attention,
        )
        yield from _backward(case, place, base, own, flights)
    if case.on_cpu:
        items = (p for p in trained_parameters(case, place) if _is_scattered(case, p))
        received = sum(_padded(case, p) for p in items) * case.wide_bytes
        yield replace(fixed, work=received, moment="the sums over replicas")
    yield replace(fixed, work=_update(case, place), moment="the update")


def _backward(
    case: PlanCase, place: Coordinates, base: Memory, own: _Chunk, flights: Flights
) -> Iterator[Memory]:
    """The moments of the last backward through a chunk."""

    def moment(name: str, kept: Saved, work: int, loss: int = 0) -> Memory:
        return replace(
            base,
            activations=base.activations + kept.activations,
            attention=base.attention + kept.attention,
            loss=loss,
            work=work,
            moment=name,
        )

    kept = _sum([*own.saved, Saved(own.on_both)])
    if own.head is not None:
        in_loss = rehearsal(case, place).in_loss
        yield moment("the loss", kept, flights[own.head.name].before, in_loss)
    kept = _sum(own.saved)  # the input that comes back is rehearsed
    of_blocks = records_of(case, place, own.layers)
    found, taken = _found_again(own.layers), case.between_stages.sent_bytes
    for block, held in zip(reversed(own.layers), reversed(own.saved), strict=True):
        kept = Saved(kept.activations - held.activations, kept.attention - held.attention)
        record = of_blocks[block.name]
        again = Saved(found[block.name] * taken)
        work = record.work + flights[block.name].before
        yield moment(f"the backward of {block.name}", _sum([kept, record.saved, again]), work)
    if own.table is not None:
        work = _full_gradient(case, place, own.table) + flights[own.table.name].after
        yield moment(f"the backward of {own.table.name}", Saved(), work)


class _Chunk(NamedTuple):
    """Memory one micro-batch keeps in a chunk."""

    table: Block | None
    """What the chunk has of the model before the layers."""
    layers: tuple[Block, ...]
    head: Block | None
    """What it has behind them."""
    saved: list[Saved]
    """By layer."""
    ends: int

    @property
    def total(self) -> Saved:
        """Of all layers and ends."""
        return _sum([*self.saved, Saved(self.ends)])

    @property
    def on_both(self) -> int:
        """Of what goes to the host the part that is on the device, too: the last input."""
        return max((saved.host for saved in self.saved), default=0)


def _kept(case: PlanCase, place: Coordinates) -> list[_Chunk]:
    """What the chunks of a rank keep."""
    found, last = [], case.order.num_stages - 1
    stages, chunks = case.order.stages_of(place.stage), shape_of(case, place.stage).chunks
    for stage, chunk in zip(stages, chunks, strict=True):
        records = records_of(case, place, chunk)
        table, head = chunk[0] if stage == 0 else None, chunk[-1] if stage == last else None
        layers = tuple(block for block in chunk if block not in (table, head))
        ends = sum(records[block.name].saved.total for block in (table, head) if block is not None)
        saved = [records[block.name].saved for block in layers]
        shared = rehearsal(case, place).shared
        found.append(_Chunk(table, layers, head, saved, ends + shared))
    return found


def _sum(parts: Iterable[Saved]) -> Saved:
    activations = attention = host = 0
    for part in parts:
        activations += part.activations
        attention += part.attention
        host += part.host
    return Saved(activations, attention, host)


def _found_again(layers: tuple[Block, ...]) -> dict[str, int]:
    """The inputs of blocks before each, which were computed again for it and are still there."""
    found, number = {}, 0
    for block in layers:
        number = 0 if block.input_kept else number + 1
        found[block.name] = max(0, number - 1)
    return found


def _most_on_host(case: PlanCase, place: Coordinates, kept: list[_Chunk]) -> int:
    """Bytes of the buffers that are lent at once."""
    live = most = 0
    for action in case.order.actions(place.stage, case.few_micro_batches):
        size = kept[action.chunk].total.host
        live += {ActionKind.FORWARD: size, ActionKind.BACKWARD: -size}.get(action.kind, 0)
        most = max(most, live)
    return most


def _most_waiting(case: PlanCase, place: Coordinates, kept: list[_Chunk]) -> list[Saved]:
    """For each chunk the most that other micro-batches keep when one of it goes back.

    Where a backward is split, the inputs of the linears and the gradients of their outputs wait
    for its second half; that is taken to be as much as a forward keeps without recomputation.
    """
    actions = case.order.actions(place.stage, case.few_micro_batches)
    halves = {a[1:] for a in actions if a.kind is ActionKind.WEIGHT_GRADIENT}
    plain = replace(
        case.model,
        checkpoint=0.0,
        checkpoint_keeps_attention=False,
        checkpoint_distribute_activations=False,
        checkpoint_offload=False,
        checkpoint_segment=0,
    )
    waiting = _kept(replace(case, model=plain), place) if halves else ()
    sizes = [own.total for own in (*kept, *waiting)]
    live = [0] * len(sizes)  # and behind them, where there are any, the second halves
    most = [Saved() for _ in kept]
    for kind, micro_batch, chunk in actions:
        if kind is ActionKind.FORWARD:
            live[chunk] += 1
        elif kind is ActionKind.WEIGHT_GRADIENT:
            live[len(kept) + chunk] -= 1
        else:
            live[chunk] -= 1
            found = Saved(
                sum(n * size.activations for n, size in zip(live, sizes, strict=True)),
                sum(n * size.attention for n, size in zip(live, sizes, strict=True)),
            )
            most[chunk] = max(most[chunk], found, key=lambda saved: saved.total)
            if (micro_batch, chunk) in halves:
                live[len(kept) + chunk] += 1
    return most


def _batch(case: PlanCase) -> int:
    """Tokens, labels and positions of a micro-batch."""
    return 3 * case.rows * case.tokens * 8


def _between_stages(case: PlanCase, place: Coordinates) -> int:
    """The bytes on their way to each neighbour, and of the gradient that came from behind.

    That gradient is there until the chunk's backward ends.
    """
    ends = case.neighbours(place.stage)
    count = sum(map(sum, ends)) + any(behind for _, behind in ends)
    return count * case.between_stages.sent_bytes


def _update(case: PlanCase, place: Coordinates) -> int:
    """States on their way through the device, and then updated weights, packed and gathered."""
    alike, place = alike_in_weights(case), place._replace(tensor=0)
    return max(_streamed(alike, place), _published(alike, place))


@lru_cache(maxsize=1024)
def _streamed(case: PlanCase, place: Coordinates) -> int:
    asked = case.optimizer
    if asked.moment_dtype == "float32" and not asked.offload_states and "muon" not in asked.rules:
        return 0
    return DryRank(case, place, Heard()).optimizer.work_bytes


@lru_cache(maxsize=1024)
def _published(case: PlanCase, place: Coordinates) -> int:
    size, heard = case.topology.zero1, Heard()
    DryRank(case, place, heard).publisher.launch()
    return sum(transfer.sent_bytes for transfer in heard) // max(1, size - 1) * (size + 1)


def _full_gradient(case: PlanCase, place: Coordinates, block: Block) -> int:
    """Bytes of the largest weight gradient of a block where it stays on the rank."""
    if case.gathers_weights:
        return 0
    numbers = {item.name: item.parameter.numel() for item in local_parameters(case, place)}
    weights = (use.weight for use in block.uses if use.weight is not None)
    return max((numbers[weight] for weight in weights), default=0) * case.item_bytes
