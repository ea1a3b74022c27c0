"""A micro-batch's acts in each block, in order: the model itself, run without ranks or numbers.

The model goes forward and back once on the meta device, over channels of the layout's sizes that
say what would travel. So what is planned is what the layers do, in the order in which they do it,
and what autograd keeps of it.

At most two blocks of a kind are run, and stand for all of it. Kinds are told apart by what the
blocks declare and by the shapes of their weights.

[Note: Plain loss] Tables and head are rehearsed with layers that are not recomputed. A rehearsal of
layers that are goes back from a sum, and is of use for them alone.

[Note: Segments] Blocks are rehearsed as if each kept its input. One that does not, because it is
computed again for it, does what the others do but keep it and bring it back.
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

from isp.config.models import language_model
from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel
from isp.core.comm.channel import DryChannel
from isp.core.comm.host_offload import HostMemory
from isp.core.layers.head import num_loss_chunks
from isp.core.layers.linear import linears_of
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
from isp.planner.made import Made
from isp.planner.record import BlockRecord, Compute, EventRecorder, Work
from model.config import ModelConfig

__all__ = ["Rehearsal", "record_of_kind", "records_of", "rehearsal"]


class Rehearsal(NamedTuple):
    """A micro-batch of a model."""

    records: dict[BlockKind, BlockRecord]
    shared: int
    """Bytes that all blocks keep together."""
    loss: int
    """Bytes that the loss keeps."""
    in_loss: int
    """Bytes that it makes, where they are most; what it keeps among them."""
    splits_logits: bool
    """Whether a rank has the losses of its whole sequence."""


def records_of(
    case: PlanCase, place: Coordinates, blocks: Iterable[Block]
) -> dict[str, BlockRecord]:
    """The record of `blocks` at `place`, by name."""
    blocks = list(blocks)
    kinds = kinds_of(case, place.stage, blocks)
    found = {kind: record_of_kind(case, place, kind) for kind in set(kinds.values())}
    kept = {block.name for block in blocks if block.input_kept}
    return {
        name: found[kind] if name in kept else found[kind].without_input()  # [Note: Segments]
        for name, kind in kinds.items()
    }


def record_of_kind(case: PlanCase, place: Coordinates, kind: BlockKind) -> BlockRecord:
    """The record of blocks of `kind` at `place`."""
    recomputed, uses = kind
    found = rehearsal(case, place, recomputed=recomputed).records
    assert kind in found, f"no block with {[use.name for use, _ in uses]} was rehearsed"
    return found[kind]


def rehearsal(case: PlanCase, place: Coordinates, *, recomputed: bool = False) -> Rehearsal:
    """A micro-batch on the rank at `place`, all layers recomputed or none.

    Where all are in a run, one without is of use for what is not in them, and has plain layers.
    """
    topology, parallel = case.topology, case.parallel
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
    model = _alike_layers(case.model, recomputed)
    return _rehearsed(model, part, case.rows, case.tokens, case.dtype, case.on_cpu)


@lru_cache(maxsize=64)
def _alike_layers(model: ModelConfig, recomputed: bool) -> ModelConfig:
    """The model with all of its layers recomputed, or none."""
    if not recomputed and model.checkpoint == 1.0:
        # No layer is left to show the rest, but the loss and the last norm are.
        chunk, compiled = model.loss_chunk_tokens, model.compile
        model = replace(bare(model), loss_chunk_tokens=chunk, compile=compiled)
    return replace(
        model,
        checkpoint=float(recomputed),
        checkpoint_keeps_attention=recomputed and model.checkpoint_keeps_attention,
        checkpoint_distribute_activations=recomputed and model.checkpoint_distribute_activations,
        checkpoint_offload=recomputed and model.checkpoint_offload,
        checkpoint_segment=0,  # [Note: Segments]
    )


class _RankPart(NamedTuple):
    """What decides a rank's part of a micro-batch."""

    sequence: Topology
    """Of the ranks of a sequence alone."""
    place: int
    gathers_weights: bool
    wide_gradients: bool
    """Whether weight gradients travel in float32 at least."""
    vocab_parallel_loss: bool
    exchange: ContextExchange
    scan: SequenceScan
    documents: int
    """Equal documents in a row."""
    expert: int
    """Ranks that have different experts; tokens are taken to go to all alike."""
    expert_chunks: int
    experts_stay: bool

    def channel(self, axis: Axis, recorder: EventRecorder) -> DryChannel:
        """The channel along `axis`, of which `recorder` hears."""
        axis = self.sequence.channel_axis(axis)
        index = self.sequence.index(axis, self.place)
        return DryChannel(axis.value, self.sequence.size(axis), index, recorder)

    def ranks(self, windows: Windows, recorder: EventRecorder) -> SequenceRanks:
        """The ranks of the sequence, for a model with these windows."""
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
    """What the first of two like layers keeps beyond the second is shared."""
    recorder, mode, recomputed = EventRecorder(), part.sequence.mode, model.checkpoint > 0
    tensor = part.channel(Axis.TENSOR, recorder)
    own_model = _of_first_and_last(model, dtype, mode, part.experts_stay)
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
    recorder.follow(blocks)
    own = tokens // tensor.size if mode.slices_batch else tokens
    ids = torch.empty(rows, own, dtype=torch.int64, device=META)
    labels = ids.new_empty(rows, tokens if whole.splits_logits else own)
    weights = [item.parameter for item in parameters]
    logits = rows * tokens * own_model.vocab_size // tensor.size
    products = DryProducts(recorder, weights, on_cpu=on_cpu)
    if not part.gathers_weights:
        for linear in linears_of([blocks]):
            linear.weight_gradients = products
    recorder.know((*weights, *products.main_gradients, ids))
    with Products(recorder):
        if whole.learns:
            _forward(whole, ids, _ends_of(tokens, part.documents))
            recorder.forget()
        with saved_tensors_hooks(recorder.keep, lambda x: x):
            output = _forward(whole, ids, _ends_of(tokens, part.documents))
            recorder.at_loss(len(blocks))
            headless = whole.trace.head is None
            rest = 0
            with Made() as made:
                if recomputed:
                    loss = output.sum()
                else:
                    chunks = (
                        1
                        if headless
                        else num_loss_chunks(output, labels.numel(), model.loss_chunk_tokens)
                    )
                    loss, rest = _loss(whole, output, labels, chunks, recorder)
            if not recomputed:  # [Note: Plain loss]
                over_logits = Compute(Work.MEMORY, 4 * logits * max(4, output.itemsize))
                recorder.note(over_logits)
                recorder.note(over_logits)  # its gradient, too
        saved = recorder.turn(len(blocks) + 1)
        loss.backward()
    pairs = ((kinds.index(kind), b) for b, kind in enumerate(kinds))
    first, second = next(((a, b) for a, b in pairs if a < b), (0, 0))
    shared = saved[first].total - saved[second].total
    own_kinds = ((b, kind) for b, kind in enumerate(kinds) if kind[0] == recomputed)
    by_kind = {kind: recorder.record(b, saved[b]) for b, kind in own_kinds}
    # Of whole logits the loss's backward makes the gradient.
    after = logits * max(4, output.itemsize) if headless else 0
    in_loss = made.most + rest + after
    return Rehearsal(by_kind, shared, saved[-1].total + rest, in_loss, whole.splits_logits)


@lru_cache(maxsize=64)
def _of_first_and_last(model: ModelConfig, dtype: str, mode: Mode, stay: bool) -> TracedModel:
    """The model with the blocks that are run, so that nobody makes the others for nothing."""
    shape = whole_shape(model, dtype, mode, experts_stay=stay)
    shapes = {name: layout.global_shape for name, layout in shape.layouts.items()}
    (blocks,) = shape.chunks
    run = _first_and_last([kind_of(block, shapes) for block in blocks])
    traced = language_model(model, dtype)
    own, found = with_blocks(traced.shape, traced.trace, {blocks[b].name for b in run})
    return traced.computed(shape=own, trace=found)


def _first_and_last(kinds: Sequence[BlockKind]) -> Sequence[int]:
    """Where the first of each kind is, and the last: those that are run."""
    last = {kind: b for b, kind in enumerate(kinds)}
    return sorted({*last.values(), *(kinds.index(kind) for kind in last)})


def _forward(whole: StageModule, ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    try:
        return whole(ids, ids, cu_seqlens)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"cannot plan this {type(whole.model).__name__}: its code does not run without values,"
            f" such as which experts a token goes to: {next(iter(str(error).splitlines()), '')}"
        ) from error


def _ends_of(tokens: int, documents: int) -> Tensor | None:
    """The `cu_seqlens` of equal documents; None for one."""
    if documents == 1:
        return None
    return torch.arange(0, tokens + 1, tokens // documents, dtype=torch.int32)


_PRODUCTS = 3
"""Of a chunk: logits, dx and dW."""


def _loss(
    whole: StageModule, output: Tensor, labels: Tensor, chunks: int, recorder: EventRecorder
) -> tuple[Tensor, int]:
    """The loss, and bytes of the gradient of the tokens in chunks that are not run.

    [Note: Alike chunks] All chunks but the last are alike, so of many four are run, and the second
    stands for the rest.
    """
    length, alike, rest = output.shape[1], max(0, chunks - 4), 0
    if alike:
        run = 4 * ceil(length / chunks)
        rest = output[:, run:].nbytes
        output, labels = output[:, :run], labels[:, : labels.shape[1] * run // length]
    loss = whole.loss(output, labels, output.new_empty((), dtype=torch.float64))
    if alike:
        events = recorder.running
        is_product = (isinstance(e, Compute) and e.kind is Work.PRODUCT for e in events)
        places = [i for i, found in enumerate(is_product) if found]
        begin, end = places[_PRODUCTS], places[2 * _PRODUCTS]
        events[end:end] = alike * events[begin:end]
    return loss, rest
