"""Memory of one rank by owner, at the moment of a step in which it is largest.

P: parameters of the rank's stage; w: ranks of a weight group; z: ranks of a zero1 group

    weights     P / w in the training dtype           (a replicated weight counts whole)
    gradients   P / w in float32                      main gradients, in buckets
    optimizer   P / (w z) in float32                  master weights; none in float32 training
                plus the states of the update rule    adamw: 2 P / (w z) in float32;
                                                      on the host with `offload_states`

In the modes that split features, replace w by t, the size of the tensor group. This is the hybrid
ZeRO of Rajbhandari et al. 2020 with three independent sizes (Chen et al. 2023, AMSP, arXiv
2311.00257). A rehearsal (`isp.planner.rehearsal`) gives the activations and attention that a
micro-batch keeps; the pipeline schedule says how many micro-batches are kept at once. The prefetch
plan and the reductions in flight give the pool. `work` is everything else: recomputed activations,
gradients of activations, copies for collectives, full weight gradients in flight. Host memory is
counted separately.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from isp.core.mesh import ParallelConfig
from isp.core.mesh.config import Prefetch
from isp.core.mesh.partition import chunk_range
from isp.core.optim.buckets import pads_little
from isp.core.weights.prefetch_plan import WeightOpKind, plan
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.core.weights.uses import Action, ActionKind, Block, Chunks
from isp.planner.case import Coordinates, PlanCase
from isp.planner.declared import (
    bare,
    local_parameters,
    shape_of,
    trained_parameters,
    updated_parameters,
)
from isp.planner.rank import DryRank, Heard
from isp.planner.record import Saved
from isp.planner.rehearsal import records_of, rehearsal

__all__ = [
    "Flights",
    "Memory",
    "busiest",
    "gather_pool",
    "memory",
    "moments",
    "only_weights",
    "peak",
    "reductions",
    "states",
]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that one rank has at one moment of a step, by what they are for."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    pool: int = 0
    """Buffers for gathered weights and for reduced gradients."""
    activations: int = 0
    attention: int = 0
    loss: int = 0
    """Logits of one loss chunk, and the gradients that are computed together with the loss."""
    work: int = 0
    host: int = 0
    """Bytes in host memory, the copies of background saves included; not part of `total`."""
    moment: str = ""
    """The moment of the step, in words, such as `the loss`."""

    @property
    def total(self) -> int:
        """Return all bytes on the device."""
        return sum(self.by_owner().values())

    @property
    def states(self) -> int:
        """Return the bytes that do not depend on the batch: weights, gradients, optimizer."""
        return self.weights + self.gradients + self.optimizer

    def by_owner(self) -> dict[str, int]:
        """Return the bytes on the device by owner, without `host`."""
        owners = (f.name for f in fields(self) if f.name not in ("host", "moment"))
        return {name: getattr(self, name) for name in owners}


def states(case: PlanCase, place: Coordinates) -> Memory:
    """Return the bytes of a rank's weights, gradients and optimizer states."""
    return _states(only_weights(case), place._replace(tensor=0))


@lru_cache(maxsize=1024)
def _states(case: PlanCase, place: Coordinates) -> Memory:
    """Compute `states`, which has replaced what does not affect them by default values.

    So layouts with the same states are the same key of this function's cache.
    """
    trained, parts = trained_parameters(case, place), case.topology.zero1
    numbers = sum(p.parameter.numel() for p in local_parameters(case, place))
    padded = sum(_padded(case, p) for p in trained)
    # A float32 weight is its own master weight: only 16-bit training has masters in addition.
    master_bytes = case.wide_bytes if case.item_bytes < case.wide_bytes else 0
    weights, on_host = numbers * case.item_bytes, case.optimizer.offload_states
    # The optimizer holds only its zero1 share of each parameter.
    kept = sum(
        _owned(p.layout.local_shape, parts, place.zero1)
        * (master_bytes + case.state_bytes(p.name, p.layout))
        for p in updated_parameters(case, place)
    )
    # A background save copies all weights and states to host memory before it writes them.
    copies = weights + kept if case.saves_in_background else 0
    return Memory(
        weights=weights,
        gradients=padded * case.wide_bytes,
        optimizer=0 if on_host else kept,
        host=copies + (kept if on_host else 0),
    )


def peak(case: PlanCase) -> Memory:
    """Return the peak of the rank that takes the most memory; `host` is the maximum of all ranks.

    Only the ranks of `busiest` are compared.
    """
    found = [m for rank in busiest(case) for m in moments(case, rank)]
    # Device and host memory may be largest on different ranks, and each has a limit of its own.
    return replace(max(found, key=lambda m: m.total), host=max(m.host for m in found))


def busiest(case: PlanCase) -> list[int]:
    """Return the global ranks among which the one with the most memory is.

    The first two stages keep the most micro-batches; the last stage has the logits.
    """
    stage, last = case.topology.stage, case.topology.pipeline - 1
    return sorted(rank * stage + case.most_keys for rank in {0, min(1, last), last})


def memory(case: PlanCase, rank: int) -> Memory:
    """Return the memory of `rank` at its peak."""
    return max(moments(case, rank), key=lambda m: m.total)


def moments(case: PlanCase, rank: int) -> list[Memory]:
    """Return the memory of `rank` at each moment of a step at which it may be largest."""
    place = case.place(rank)
    flights, reduce_pool = reductions(case, place)
    pool = gather_pool(case, place) + reduce_pool
    fixed = replace(states(case, place), pool=pool)
    return list(_moments(case, place, fixed, flights))


def _padded(case: PlanCase, item: ShardedParameter) -> int:
    """Return the number of elements in the main gradient of `item`.

    If the gradient is scattered over zero1 ranks, its first dim is padded to a multiple of them.
    """
    rows, *rest = item.layout.local_shape
    parts = case.topology.zero1 if _is_scattered(case, item) else 1
    return -(-rows // parts) * parts * prod(rest)


def _is_scattered(case: PlanCase, item: ShardedParameter) -> bool:
    """Return True if each zero1 rank keeps only its own rows of the summed gradient."""
    parts = case.topology.zero1
    # A reduce-scatter sums over replicas and leaves rows to zero1 ranks, so these two groups have
    # to be the same.
    same = parts == case.topology.weight_data == case.size(item.layout.reduce_over)
    return parts > 1 and same and pads_little(item.layout.local_shape[0], parts)


def _owned(shape: tuple[int, ...], parts: int, index: int) -> int:
    """Return the number of elements in the `index`-th of `parts` shards by rows."""
    rows = chunk_range(shape[0], parts, index)
    return len(rows) * prod(shape[1:])


# -- moments of a step -----------------------------------------------------------------------


def _moments(
    case: PlanCase, place: Coordinates, fixed: Memory, flights: Flights
) -> Iterator[Memory]:
    """Yield each backward of the last micro-batch, then the gradient sums and the update."""
    kept = _kept(case, place)
    waiting = _most_waiting(case, place, kept)
    between = _between_stages(case, place)
    # With inputs of blocks on the host, the last input that a forward sends there also stays on the
    # device until the next forward. On the last stage the same micro-batch goes backward next, and
    # `_backward` counts that input.
    if place.stage < case.topology.pipeline - 1:
        between += sum(own.on_both for own in kept)
    fixed = replace(fixed, host=fixed.host + _most_on_host(case, place, kept))
    for own, older in zip(kept, waiting, strict=True):
        # `older`: memory of the micro-batches that still wait for their backward.
        base = replace(
            fixed,
            activations=older.activations + own.ends + between + _batch(case),
            attention=older.attention,
        )
        yield from _backward(case, place, base, own, flights)
    if case.on_cpu:
        # gloo has no reduce-scatter: ranks exchange the parts and sum them themselves.
        items = (p for p in trained_parameters(case, place) if _is_scattered(case, p))
        received = sum(_padded(case, p) for p in items) * case.wide_bytes
        yield replace(fixed, work=received, moment="the sums over replicas")
    yield replace(fixed, work=_update(case, place), moment="the update")


def _backward(
    case: PlanCase, place: Coordinates, base: Memory, own: _Chunk, flights: Flights
) -> Iterator[Memory]:
    """Yield the moments of the last backward pass through one chunk, in order."""

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
    # The device copy of the last offloaded input (`on_both`) counts up to the loss only: the
    # rehearsal fetched each input from the host, so from here on a block's record includes it.
    kept = _sum(own.saved)
    of_blocks = records_of(case, place, own.layers)
    found, taken = _found_again(own.layers), case.between_stages.sent_bytes
    for block, held in zip(reversed(own.layers), reversed(own.saved), strict=True):
        # Backward frees a block's saved tensors, so memory shrinks from the last block on.
        kept = Saved(kept.activations - held.activations, kept.attention - held.attention)
        record = of_blocks[block.name]
        # In a segment, the inputs of all its blocks but the first are recomputed together, and each
        # one is kept until the backward of its block.
        again = Saved(found[block.name] * taken)
        work = record.work + flights[block.name].before
        yield moment(f"the backward of {block.name}", _sum([kept, record.saved, again]), work)
    if own.table is not None:
        work = _largest_gradient(case, place, own.table) + flights[own.table.name].after
        yield moment(f"the backward of {own.table.name}", Saved(), work)


class _Chunk(NamedTuple):
    """Blocks of one chunk of a pipeline rank, and the memory that a micro-batch keeps in them."""

    table: Block | None
    """The block of the embedding table, if this chunk has it; its bytes are in `ends`."""
    layers: tuple[Block, ...]
    """The decoder blocks."""
    head: Block | None
    """The block of the head, if this chunk has it; its bytes are in `ends`."""
    saved: list[Saved]
    """What each of `layers` saves for its backward in a micro-batch, in order."""
    ends: int
    """Bytes that table and head keep, plus the bytes that all blocks of the chunk share."""

    @property
    def total(self) -> Saved:
        """Return the saved memory of the whole chunk."""
        return _sum([*self.saved, Saved(self.ends)])

    @property
    def on_both(self) -> int:
        """Return the bytes of the last input that was sent to the host: it is on the device too."""
        return max((saved.host for saved in self.saved), default=0)


def _kept(case: PlanCase, place: Coordinates) -> list[_Chunk]:
    """Return the memory that one micro-batch keeps in each chunk of a rank."""
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
    """Return the sum of all fields."""
    activations = attention = host = 0
    for part in parts:
        activations += part.activations
        attention += part.attention
        host += part.host
    return Saved(activations, attention, host)


def _found_again(layers: tuple[Block, ...]) -> dict[str, int]:
    """Return, by block name, how many recomputed inputs of other blocks exist in its backward.

    A segment keeps the input of its first block only. Before the backward of its last block, the
    inputs of all its other blocks are recomputed; each is freed after the backward of its block.
    So in the backward of the block that is n blocks after the first block of its segment, the
    inputs of the n - 1 blocks between them still exist. A segment is the blocks between two kept
    inputs (`model.checkpoint_segment`).
    """
    found, number = {}, 0
    for block in layers:
        number = 0 if block.input_kept else number + 1
        found[block.name] = max(0, number - 1)
    return found


def _most_on_host(case: PlanCase, place: Coordinates, kept: list[_Chunk]) -> int:
    """Return the peak bytes of host buffers in use at once."""
    live = most = 0
    for action in case.order.actions(place.stage, case.few_micro_batches):
        size = kept[action.chunk].total.host
        live += {ActionKind.FORWARD: size, ActionKind.BACKWARD: -size}.get(action.kind, 0)
        most = max(most, live)
    return most


def _most_waiting(case: PlanCase, place: Coordinates, kept: list[_Chunk]) -> list[Saved]:
    """Return, for each chunk, the most that other micro-batches keep while one goes backward.

    With a split backward, the inputs of linears and the gradients of their outputs are kept until
    the weight gradients are computed. They are counted as the memory that a forward without
    recomputation keeps.
    """
    actions = case.order.actions(place.stage, case.few_micro_batches)
    # (micro-batch, chunk) of each backward whose weight gradients are computed in a later action.
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
    # `live` counts micro-batches: first, for each chunk, those that wait for their backward, then,
    # for each chunk with a split backward, those that wait for their weight gradients.
    live = [0] * len(sizes)
    most = [Saved() for _ in kept]
    for kind, micro_batch, chunk in actions:
        if kind is ActionKind.FORWARD:
            live[chunk] += 1
        elif kind is ActionKind.WEIGHT_GRADIENT:
            live[len(kept) + chunk] -= 1
        else:
            # The micro-batch that goes backward now is not counted: `_backward` adds its memory.
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
    """Return the bytes of tokens, labels and positions (int64) of a micro-batch."""
    return 3 * case.rows * case.tokens * 8


def _between_stages(case: PlanCase, place: Coordinates) -> int:
    """Return the bytes of tensors in transfer to and from the neighbor stages.

    The gradient that came from the next stage counts once more: it stays until the chunk's backward
    ends.
    """
    # For each neighbor of each chunk, one tensor is in transfer at a time.
    ends = case.neighbors(place.stage)
    count = sum(map(sum, ends)) + any(following for _, following in ends)
    return count * case.between_stages.sent_bytes


def _update(case: PlanCase, place: Coordinates) -> int:
    """Return the bytes that the update takes beyond weights, gradients and states.

    First states are updated (`_streamed`), then weights are published: the larger of both counts.
    """
    reduced, place = only_weights(case), place._replace(tensor=0)
    return max(_streamed(reduced, place), _published(reduced, place))


@lru_cache(maxsize=1024)
def _streamed(case: PlanCase, place: Coordinates) -> int:
    """Return the bytes that the update takes for offloaded or narrow states, and for muon."""
    asked = case.optimizer
    if asked.moment_dtype == "float32" and not asked.offload_states and "muon" not in asked.rules:
        return 0
    return DryRank(case, place, Heard()).optimizer.work_bytes


@lru_cache(maxsize=1024)
def _published(case: PlanCase, place: Coordinates) -> int:
    """Return the bytes of updated weights, packed and gathered over the zero1 group."""
    size, heard = case.topology.zero1, Heard()
    # Each bucket is sent to size - 1 ranks; packed and gathered it takes size + 1 times its bytes.
    DryRank(case, place, heard).publisher.launch()
    return sum(transfer.sent_bytes for transfer in heard) // max(1, size - 1) * (size + 1)


def _largest_gradient(case: PlanCase, place: Coordinates, block: Block) -> int:
    """Return the bytes of the block's largest weight gradient on one rank.

    It has the size of the rank's part of the weight. 0 in isp mode with several weight ranks, where
    weights are gathered: their gradients are counted as reductions in flight.
    """
    if case.gathers_weights:
        return 0
    numbers = {item.name: item.parameter.numel() for item in local_parameters(case, place)}
    weights = (use.weight for use in block.uses if use.weight is not None)
    return max((numbers[weight] for weight in weights), default=0) * case.item_bytes


# -- weights and gradients in flight, and their pools -----------------------------------------


class _InFlight(NamedTuple):
    """Bytes of full gradients whose reductions are in flight around a block's backward."""

    before: int
    """Bytes of these gradients when the block's backward starts."""
    after: int
    """Bytes of these gradients when the block's backward ends."""


Flights = defaultdict[str, _InFlight]
"""Full gradients in flight by block, in the last backward pass."""


def reductions(case: PlanCase, place: Coordinates) -> tuple[Flights, int]:
    """Return the full gradients in flight, and the bytes of the pool that they are reduced into."""
    found: dict[str, _InFlight] = {}
    pool_bytes = 0
    receives = case.on_cpu and case.topology.zero1 > 1
    # If weights are not gathered and no parts are received, each gradient is added in place, and
    # nothing is in flight.
    if case.gathers_weights or receives:
        blocks = _blocks(case, place)[::-1]
        records = records_of(case, place, blocks)
        order = tuple((b.name, tuple(records[b.name].gradients(b))) for b in blocks)
        reduced = replace(case, micro_num=1)
        if case.gathers_weights:
            # From the fourth micro-batch on, the bytes in flight are the same in each one.
            few = min(case.micro_num, 4)
            reduced = only_weights(case, micro_num=few)
        if not receives:
            reduced = replace(reduced, topology=replace(reduced.topology, zero1=1))
        found, pool_bytes = _reduced(reduced, place._replace(tensor=0, zero1=0), order)
    return defaultdict(lambda: _InFlight(0, 0), found), pool_bytes


@lru_cache(maxsize=1024)
def _reduced(
    case: PlanCase, place: Coordinates, order: tuple[tuple[str, tuple[str, ...]], ...]
) -> tuple[dict[str, _InFlight], int]:
    """Return the bytes in flight around each block of the last backward, and those of the pool.

    `GradientReducer` holds gradients that it sends, `MainGradients` parts that it receives to sum.
    """
    rank, found = DryRank(case, place, Heard()), {}
    uses = Counter(name for _, names in order for name in names)

    def in_flight() -> int:
        return rank.reducer.bytes_in_flight + rank.gradients.received_bytes

    for number in range(case.micro_num):
        # Earlier micro-batches are run because their reductions may still be in flight in the last.
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
    """Return the bytes of the pool that weights are gathered into.

    It has buffers for the two blocks (or modules) that are gathered at once, or for all weights if
    they stay gathered.
    """
    if not case.gathers_weights:
        return 0
    chunks = shape_of(case, place.stage).chunks
    rank = DryRank(case, place, Heard())
    layouts = {name: rank.travels(name).layout for name in rank.parameters}
    uses = (use for block in _blocks(case, place) for use in block.uses)
    names = {name for v in uses for name in (v.weight, v.bias) if name is not None}
    # Weights with the same number of elements share buffers.
    kinds = tuple((name, prod(layouts[name].global_shape)) for name in sorted(names))
    # The pool allocates a buffer if none of its size is free, and keeps it: after a few
    # micro-batches the largest number is reached.
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
    """Return how many buffers of each kind the pool has allocated by the end of a step."""
    steps, kind_of = plan(chunks, actions, prefetch), dict(kinds)
    leased: Counter[int] = Counter()
    reserved: Counter[int] = Counter()
    acts = [*steps.start, *(act for step in steps.entries for act in (*step.before, *step.after))]
    # Play the plan's gathers and frees: the most buffers leased at once is what the pool allocates.
    for act in acts:
        for kind in (kind_of[name] for name in act.parameters):
            if act.kind is WeightOpKind.GATHER:
                leased[kind] += 1
                reserved[kind] = max(reserved[kind], leased[kind])
            elif act.kind is WeightOpKind.FREE:
                leased[kind] -= 1
    return reserved


def only_weights(case: PlanCase, micro_num: int = 1) -> PlanCase:
    """Return `case` with defaults for all that does not affect weights and their gradients.

    Layouts that differ only in these then share cached results.
    """
    parallel = case.parallel
    return replace(
        case,
        model=bare(case.model),
        parallel=ParallelConfig(weight=parallel.weight, pipeline=parallel.pipeline),
        topology=replace(case.topology, tensor=1, context=1),
        rows=1,
        tokens=1,
        micro_num=micro_num,
        documents=1,
    )


def _blocks(case: PlanCase, place: Coordinates) -> list[Block]:
    """Return the blocks of all chunks of a rank."""
    return [block for chunk in shape_of(case, place.stage).chunks for block in chunk]
