"""Runs the model itself on the meta device and records what each block does for a micro-batch.

The model goes forward and backward once, over channels of the layout's sizes that log transfers. So
a plan has the layers' own operations in their order, and what autograd saves of them.

At most two blocks of each kind are run: blocks of a kind declare the same uses, of weights of the
same shapes. Embedding table, head and loss are rehearsed without recomputation, and every block as
if it kept its input. See [Note: Plain loss] and [Note: Segments] in docs/design/notes/planner.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel
from isp.core.comm.channel import DryChannel
from isp.core.comm.host_offload import HostMemory
from isp.core.layers.head import num_loss_chunks
from isp.core.mesh import Axis, ContextExchange, Mode, SequenceScan, Topology
from isp.core.mesh.sequence_split import Windows
from isp.core.weights.declare import as_chunks
from isp.core.weights.sharded_parameter import by_whole
from isp.core.weights.uses import Block
from isp.models.runtime.stage_module import StageModule
from isp.models.sharding.pipeline_split import with_blocks
from isp.models.traced_model import TracedModel
from isp.planner.case import Coordinates, PlanCase
from isp.planner.declared import BlockKind, bare, kind_of, kinds_of, whole_shape
from isp.planner.dry import (
    META,
    DryAttention,
    DryHost,
    DryLayers,
    DryProducts,
    DryWeights,
    Products,
    fuse_norms,
)
from isp.planner.record import BlockRecord, Compute, EventRecorder, PeakMemory, Work
from model.build import language_model
from model.config import ModelConfig

__all__ = ["Rehearsal", "record_of_kind", "records_of", "rehearsal"]


class Rehearsal(NamedTuple):
    """Results of a rehearsal: records by kind of block, and the memory of the loss."""

    records: dict[BlockKind, BlockRecord]
    shared: int
    """Bytes that the blocks of a micro-batch keep once, such as tables of rotary positions."""
    loss: int
    """Bytes that the loss keeps."""
    in_loss: int
    """Peak of the bytes that the loss makes, those it keeps included."""
    splits_logits: bool
    """True if the loss is vocabulary-parallel.

    Each rank then computes part of the logits of all tokens of its tensor group, and all losses.
    """


def records_of(
    case: PlanCase, place: Coordinates, blocks: Iterable[Block]
) -> dict[str, BlockRecord]:
    """Return the records of `blocks` at `place`, by block name."""
    blocks = list(blocks)
    kinds = kinds_of(case, place.stage, blocks)
    found = {kind: record_of_kind(case, place, kind) for kind in set(kinds.values())}
    kept = {block.name for block in blocks if block.input_kept}
    # Rehearsed blocks always keep their input; remove it from blocks that do not: [Note: Segments].
    return {
        name: found[kind] if name in kept else found[kind].without_input()
        for name, kind in kinds.items()
    }


def record_of_kind(case: PlanCase, place: Coordinates, kind: BlockKind) -> BlockRecord:
    """Return the compute, transfers and memory of a block of `kind` on the rank at `place`."""
    recomputed, uses = kind
    found = rehearsal(case, place, recomputed=recomputed).records
    assert kind in found, f"no block with {[use.name for use, _ in uses]} was rehearsed"
    return found[kind]


def rehearsal(case: PlanCase, place: Coordinates, *, recomputed: bool = False) -> Rehearsal:
    """Rehearse a micro-batch on the rank at `place`, with all blocks recomputed or none.

    If the run recomputes all blocks, only table, head and loss are taken from the rehearsal with
    `recomputed=False`. See [Note: Plain loss].
    """
    topology, parallel = case.topology, case.parallel
    # Keep only what decides what one rank computes in a block, so that layouts which differ in
    # pipeline, weight or zero1 size find the same rehearsal in the cache.
    part = _RankPart(
        Topology(
            world_size=topology.tensor,
            mode=case.mode,
            tensor=topology.tensor,
            weight=1,
            pipeline=1,
            zero1=1,
            context=topology.context,
            head_first=topology.head_first,
        ),
        place.tensor,
        case.gathers_weights,
        case.gathers_weights
        and parallel.weight.reduce_dtype == "float32"
        and not case.sums_locally,
        parallel.weight.vocab_parallel_loss,
        parallel.sequence_2D.exchange,
        parallel.sequence_scan,
        case.documents,
        topology.expert,
        parallel.expert.num_chunks,
        topology.experts_stay,
    )
    model = _uniform_layers(case.model, recomputed)
    return _rehearsed(model, part, case.rows, case.tokens, case.dtype, case.on_cpu)


@lru_cache(maxsize=64)
def _uniform_layers(model: ModelConfig, recomputed: bool) -> ModelConfig:
    """Return `model` with all of its blocks recomputed, or none."""
    if not recomputed and model.checkpoint == 1.0:
        # Only table, head and loss are taken from this rehearsal, and they are the same for all
        # ways of recomputing blocks: drop the keys of these ways, so that the cache is hit.
        chunk, compiled = model.loss_chunk_tokens, model.compile
        model = replace(bare(model), loss_chunk_tokens=chunk, compile=compiled)
    return replace(
        model,
        checkpoint=float(recomputed),
        checkpoint_keeps_attention=recomputed and model.checkpoint_keeps_attention,
        checkpoint_distribute_activations=recomputed and model.checkpoint_distribute_activations,
        checkpoint_offload=recomputed and model.checkpoint_offload,
        # Each block is rehearsed as if it kept its input: [Note: Segments].
        checkpoint_segment=0,
    )


class _RankPart(NamedTuple):
    """The part of the layout that decides a rank's work for a micro-batch; a key of the cache."""

    sequence: Topology
    """Topology of the ranks of one sequence."""
    place: int
    gathers_weights: bool
    wide_gradients: bool
    """True if weight gradients are reduced in float32 at least."""
    vocab_parallel_loss: bool
    exchange: ContextExchange
    scan: SequenceScan
    documents: int
    """Number of documents of equal length in a row."""
    expert: int
    """Number of ranks with different experts; all experts are taken to get equally many tokens."""
    expert_chunks: int
    experts_stay: bool

    def channel(self, axis: Axis, recorder: EventRecorder) -> DryChannel:
        """Return a channel along `axis` that reports to `recorder`."""
        axis = self.sequence.channel_axis(axis)
        index = self.sequence.index(axis, self.place)
        return DryChannel(axis.value, self.sequence.size(axis), index, recorder)

    def ranks(self, windows: Windows, recorder: EventRecorder) -> SequenceRanks:
        """Return the ranks of the sequence, for a model with these attention windows."""
        return SequenceRanks(
            head=self.channel(Axis.HEAD, recorder),
            context=self.channel(Axis.CONTEXT, recorder),
            windows=windows,
            head_first=self.sequence.head_first,
            exchange=self.exchange,
            scan=self.scan,
        )


@lru_cache(maxsize=256)
def _rehearsed(
    model: ModelConfig, part: _RankPart, rows: int, tokens: int, dtype: str, on_cpu: bool
) -> Rehearsal:
    """Run the rehearsal of `rehearsal`, cached by its arguments.

    Bytes that the first of two blocks of a kind keeps beyond the second count as shared.
    """
    recorder, mode, recomputed = EventRecorder(), part.sequence.mode, model.checkpoint > 0
    tensor = part.channel(Axis.TENSOR, recorder)
    own_model = _of_first_and_last(model, dtype, mode, part.experts_stay)
    # These are the classes of a run, but weights, host memory and channels are stand-ins: they send
    # and gather nothing, and record what they are asked for.
    layers = DryLayers(
        recorder=recorder,
        like_cuda=not on_cpu,
        mode=mode,
        tensor=tensor,
        weight=Channel.solo() if mode.gathers_weights else tensor,
        expert=DryChannel(Axis.EXPERT.value, part.expert, 0, recorder),
        expert_chunks=part.expert_chunks,
        experts_stay=part.experts_stay,
        communicator=DryWeights(
            recorder,
            gathers=part.gathers_weights,
            wide_gradients=part.wide_gradients,
        ),
        host=HostMemory(META, channel=DryHost(recorder)),
        device=META,
        dtype=getattr(torch, dtype),
        sequence=part.ranks(own_model.attention_windows, recorder),
        vocab_parallel_loss=part.vocab_parallel_loss,
    )
    attention = DryAttention(recorder, model.attention_backend, on_cpu)
    (whole,) = own_model.build(layers, attention=attention)
    if not on_cpu:
        fuse_norms(whole.model)
    blocks = whole.weight_blocks()
    parameters = list(by_whole(whole.shards()))
    (declared,) = as_chunks((blocks,))
    shapes = {p.name: p.layout.global_shape for p in parameters}
    kinds = [kind_of(block, shapes) for block in declared]
    recorder.follow(blocks, whole.position)
    # Token ids are this rank's slice; a vocab-parallel loss needs the labels of all tokens.
    own = tokens // tensor.size if mode.slices_batch else tokens
    ids = torch.empty(rows, own, dtype=torch.int64, device=META)
    labels = ids.new_empty(rows, tokens if whole.splits_logits else own)
    weights = [item.parameter for item in parameters]
    logits = rows * tokens * own_model.vocab_size // tensor.size
    products = DryProducts(recorder, weights, on_cpu=on_cpu)
    # Without gathers, weight gradients are not reduced first: products add them to main gradients.
    if not part.gathers_weights:
        layers.communicator.route = products
    # These tensors exist before and after the micro-batch, and have owners of their own in a plan.
    recorder.know((*weights, *products.main_gradients, ids))
    with Products(recorder):
        # The first forward of a model that learns finds out what later ones need not keep, and so
        # keeps more than they do: run it once, and discard its record.
        if whole.learns:
            _forward(whole, ids, _ends_of(tokens, part.documents))
            recorder.forget()
        with saved_tensors_hooks(recorder.keep, lambda x: x):
            output = _forward(whole, ids, _ends_of(tokens, part.documents))
            recorder.at_loss(len(blocks))
            # A model without a separate head returns whole logits, which are not cut into chunks.
            headless = whole.trace.head is None
            rest = 0
            with PeakMemory() as made:
                # Of a rehearsal with recomputation only decoder blocks are used, so any scalar will
                # do to start its backward.
                if recomputed:
                    loss = output.sum()
                else:
                    chunks = (
                        1
                        if headless
                        else num_loss_chunks(output, labels.numel(), model.loss_chunk_tokens)
                    )
                    loss, rest = _loss(whole, output, labels, chunks, recorder)
            # Softmax and its gradient are not counted by torch: each reads and writes the logits
            # about four times in float32.
            if not recomputed:
                over_logits = Compute(Work.MEMORY, 4 * logits * max(4, output.itemsize))
                recorder.note(over_logits)
                recorder.note(over_logits)
        saved = recorder.turn(len(blocks) + 1)
        loss.backward()
    # A storage that several blocks save, such as a rotary table, counts only for the first of them.
    # So take two blocks of one kind: the first of them keeps more bytes than the second, and the
    # difference is what all blocks share.
    pairs = ((kinds.index(kind), b) for b, kind in enumerate(kinds))
    first, second = next(((a, b) for a, b in pairs if a < b), (0, 0))
    shared = saved[first].total - saved[second].total
    # With recomputation, the blocks that are not recomputed (table, head) are left out here: their
    # records are those of the plain rehearsal.
    own_kinds = ((b, kind) for b, kind in enumerate(kinds) if kind[0] == recomputed)
    by_kind = {kind: recorder.record(b, saved[b]) for b, kind in own_kinds}
    # A model without a separate head computes the loss of whole logits. Their gradient is made in
    # `loss.backward`, where `made` no longer measures, so it is added here.
    after = logits * max(4, output.itemsize) if headless else 0
    in_loss = made.peak_bytes + rest + after
    return Rehearsal(by_kind, shared, saved[-1].total + rest, in_loss, whole.splits_logits)


@lru_cache(maxsize=64)
def _of_first_and_last(model: ModelConfig, dtype: str, mode: Mode, stay: bool) -> TracedModel:
    """Return the model with only the first and the last block of each kind.

    The rehearsal needs no more, and other blocks are never built.
    """
    shape = whole_shape(model, dtype, mode, experts_stay=stay)
    shapes = {name: layout.global_shape for name, layout in shape.layouts.items()}
    (blocks,) = shape.chunks
    run = _first_and_last([kind_of(block, shapes) for block in blocks])
    traced = language_model(model, dtype)
    own, found = with_blocks(traced.shape, traced.trace, {blocks[b].name for b in run})
    return traced.with_options(shape=own, trace=found)


def _first_and_last(kinds: Sequence[BlockKind]) -> Sequence[int]:
    """Return the indices of the first and the last block of each kind."""
    last = {kind: b for b, kind in enumerate(kinds)}
    return sorted({*last.values(), *(kinds.index(kind) for kind in last)})


def _forward(whole: StageModule, ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Run a forward on the meta device; raise ValueError if the model's code reads values."""
    try:
        return whole(ids, ids, cu_seqlens)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"cannot plan this {type(whole.model).__name__}, so choose its layout by hand: its code"
            f" does not run without values, such as which experts a token goes to:"
            f" {next(iter(str(error).splitlines()), '')}"
        ) from error


def _ends_of(tokens: int, documents: int) -> Tensor | None:
    """Return the `cu_seqlens` of equal documents; None for a single one."""
    if documents == 1:
        return None
    return torch.arange(0, tokens + 1, tokens // documents, dtype=torch.int32)


_PRODUCTS = 3
"""Matrix products of a loss chunk: the logits, and the gradients of its input and its weight."""


def _loss(
    whole: StageModule, output: Tensor, labels: Tensor, chunks: int, recorder: EventRecorder
) -> tuple[Tensor, int]:
    """Compute the loss of at most four of `chunks` chunks of tokens.

    The events of the second chunk are repeated for each chunk that is left out. Returns the loss,
    and the bytes that the gradient of the left-out tokens would take. See [Note: Loss chunks] in
    docs/design/notes/planner.md.
    """
    length, left_out, rest = output.shape[1], max(0, chunks - 4), 0
    if left_out:
        # Cut off tokens, so that exactly four chunks are left.
        run = 4 * ceil(length / chunks)
        rest = output[:, run:].nbytes
        output, labels = output[:, :run], labels[:, : labels.shape[1] * run // length]
    loss = whole.loss(output, labels, output.new_empty((), dtype=torch.float64))
    if left_out:
        events = recorder.running
        # Each chunk has three products, by which chunks are told apart: the events of the second
        # one begin at the fourth product of the loss and end before the seventh.
        is_product = (isinstance(e, Compute) and e.kind is Work.PRODUCT for e in events)
        places = [i for i, found in enumerate(is_product) if found]
        begin, end = places[_PRODUCTS], places[2 * _PRODUCTS]
        events[end:end] = left_out * events[begin:end]
    return loss, rest
