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

from isp.comm import Channel
from isp.comm.channel import DryChannel
from isp.comm.host import HostMemory
from isp.config.models import language_model
from isp.layers.linear import linears_of
from isp.layers.sequence import SequenceRanks
from isp.models.protocol import Chunk
from isp.parallel import Axis, ContextExchange, SequenceScan, Topology
from isp.parallel.context import Windows
from isp.planner.case import Case, Coordinates
from isp.planner.declared import BlockKind, bare, kind_of, kinds_of
from isp.planner.dry import (
    META,
    CudaLayers,
    DryAttention,
    DryHost,
    DryLayers,
    DryProducts,
    DryWeights,
    Products,
)
from isp.planner.made import Made
from isp.planner.tape import (
    Loss,
    TapeRecorder,
    Tapes,
)
from isp.traced.chunk import TracedChunk
from isp.weights.declare import as_chunks
from isp.weights.parameter import by_whole
from isp.weights.trace import Block
from model.config import ModelConfig

__all__ = ["Rehearsal", "rehearsal", "tapes_of", "tapes_of_kind"]


class Rehearsal(NamedTuple):
    """A micro-batch of a model."""

    tapes: dict[BlockKind, Tapes]
    shared: int
    """Bytes that all blocks keep together."""
    loss: int
    """Bytes that the loss keeps."""
    in_loss: int
    """Bytes that it makes, where they are most; what it keeps among them."""
    logits: int
    """Numbers that the loss is made of."""
    splits_logits: bool
    """Whether a rank has the losses of its whole sequence."""


def tapes_of(case: Case, place: Coordinates, blocks: Iterable[Block]) -> dict[str, Tapes]:
    """The tapes of `blocks` at `place`, by name."""
    blocks = list(blocks)
    kinds = kinds_of(case, place.stage, blocks)
    found = {kind: tapes_of_kind(case, place, kind) for kind in set(kinds.values())}
    kept = {block.name for block in blocks if block.input_kept}
    return {
        name: found[kind] if name in kept else found[kind].without_input()  # [Note: Segments]
        for name, kind in kinds.items()
    }


def tapes_of_kind(case: Case, place: Coordinates, kind: BlockKind) -> Tapes:
    """The tapes of blocks of `kind` at `place`."""
    recomputed, uses = kind
    found = rehearsal(case, place, recomputed=recomputed).tapes
    assert kind in found, f"no block with {[use.name for use, _ in uses]} was rehearsed"
    return found[kind]


def rehearsal(case: Case, place: Coordinates, *, recomputed: bool = False) -> Rehearsal:
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
    )
    model = _alike_layers(case.model, recomputed)
    return _rehearsed(model, part, case.rows, case.tokens, case.dtype, case.on_cpu)


@lru_cache(maxsize=64)
def _alike_layers(model: ModelConfig, recomputed: bool) -> ModelConfig:
    """Two layers of the model; all of those that a folder has."""
    if not recomputed and model.checkpoint == 1.0:
        # No layer is left to show the rest, but the loss and the last norm are.
        chunk, compiled = model.loss_chunk_tokens, model.compile
        model = replace(bare(model), loss_chunk_tokens=chunk, compile=compiled)
    return replace(
        model,
        num_layers=2 if model.hf is None else model.num_layers,
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

    def channel(self, axis: Axis, recorder: TapeRecorder) -> DryChannel:
        """The channel along `axis`, of which `recorder` hears."""
        axis = self.sequence.channel_axis(axis)
        index = self.sequence.index(axis, self.place)
        return DryChannel(axis.value, self.sequence.size(axis), index, recorder)

    def ranks(self, windows: Windows, recorder: TapeRecorder) -> SequenceRanks:
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
    recorder, mode, recomputed = TapeRecorder(), part.sequence.mode, model.checkpoint > 0
    facts, tensor = mode.facts, part.channel(Axis.TENSOR, recorder)
    own_model = language_model(model, dtype)
    layers = (CudaLayers if not on_cpu or model.compile is True else DryLayers)(
        recorder=recorder,
        mode=mode,
        tensor=tensor,
        weight=Channel.solo() if facts.gathers_weights else tensor,
        communicator=DryWeights(
            recorder, gathers=part.gathers_weights, wide_gradients=part.wide_gradients
        ),
        host=HostMemory(META, key="model.checkpoint_offload", channel=DryHost(recorder)),
        device=META,
        dtype=getattr(torch, dtype),
        sequence=part.ranks(own_model.attention_windows, recorder),
        vocab_parallel_loss=part.vocab_parallel_loss,
    )
    (whole,) = own_model.build(layers, attention=DryAttention(recorder, on_cpu))
    blocks = whole.weight_blocks()
    parameters = list(by_whole(whole.shards()))
    (declared,) = as_chunks((blocks,))
    shapes = {p.name: p.layout.global_shape for p in parameters}
    kinds = [kind_of(block, shapes) for block in declared]
    run_blocks: Sequence[int] = range(len(blocks))
    if isinstance(whole, TracedChunk):
        run_blocks = _first_and_last(kinds)
        whole.left_out = frozenset(b.name for i, b in enumerate(blocks) if i not in run_blocks)
    recorder.follow(blocks, run_blocks)
    own = tokens // tensor.size if facts.slices_batch else tokens
    ids = torch.empty(rows, own, dtype=torch.int64, device=META)
    labels = ids.new_empty(rows, tokens if whole.splits_logits else own)
    weights = [item.parameter for item in parameters]
    products = DryProducts(recorder, weights, on_cpu=on_cpu)
    if not part.gathers_weights:
        for linear in linears_of([blocks]):
            linear.weight_gradients = products
    recorder.know((*weights, *products.main_gradients, ids))
    with Products(recorder):
        if isinstance(whole, TracedChunk) and whole.learns:
            _forward(whole, model, ids, _ends_of(tokens, part.documents))
            recorder.forget()
        with saved_tensors_hooks(recorder.keep, lambda x: x):
            output = _forward(whole, model, ids, _ends_of(tokens, part.documents))
            recorder.at_loss(len(blocks))
            length = output.shape[1]
            headless = isinstance(whole, TracedChunk) and whole.trace.head is None
            run, again = length, 0
            if not recomputed and not headless:
                run, again = _few_chunks(model.loss_chunk_tokens, length, labels.numel())
            if again:
                output, labels = output[:, :run], labels[:, : labels.shape[1] * run // length]
            with Made() as made:
                expected = output.new_empty((), dtype=torch.float64)
                loss = output.sum() if recomputed else whole.loss(output, labels, expected)
            if again:
                begin, end = recorder.position(_PRODUCTS), recorder.position(2 * _PRODUCTS)
                recorder.repeat(begin, end, again)
            if not recomputed:  # [Note: Plain loss]
                recorder.note(Loss())
                recorder.note(Loss())  # its gradient, too
        saved = recorder.turn(len(blocks) + 1)
        loss.backward()
    pairs = ((kinds.index(kinds[b]), b) for b in run_blocks)
    first, second = next(((a, b) for a, b in pairs if a < b), (0, 0))
    shared = saved[first].total - saved[second].total
    own_kinds = ((b, kinds[b]) for b in run_blocks if kinds[b][0] == recomputed)
    by_kind = {kind: recorder.tapes(b, saved[b]) for b, kind in own_kinds}
    logits = rows * tokens * own_model.vocab_size // tensor.size
    # dx of what was left out; of whole logits, the loss's backward, which makes its gradient.
    rest = (length - run) * rows * output.shape[2] * output.itemsize
    after = logits * max(4, output.itemsize) if headless else 0
    loss_bytes = saved[-1].total + rest, made.most + rest + after
    return Rehearsal(by_kind, shared, *loss_bytes, logits, whole.splits_logits)


def _first_and_last(kinds: Sequence[BlockKind]) -> Sequence[int]:
    """Where the first of each kind is, and the last: those that are run."""
    last = {kind: b for b, kind in enumerate(kinds)}
    return sorted({*last.values(), *(kinds.index(kind) for kind in last)})


def _forward(whole: Chunk, model: ModelConfig, ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    try:
        output: Tensor = whole(ids, ids, cu_seqlens)
        return output
    except (NotImplementedError, RuntimeError) as error:
        if model.hf is None:
            raise
        raise ValueError(
            f"cannot plan model.hf={model.hf}: its code does not run without values, such as which"
            f" experts a token goes to: {next(iter(str(error).splitlines()), '')}"
        ) from error


def _ends_of(tokens: int, documents: int) -> Tensor | None:
    """The `cu_seqlens` of equal documents; None for one."""
    if documents == 1:
        return None
    return torch.arange(0, tokens + 1, tokens // documents, dtype=torch.int32)


_PRODUCTS = 3
"""Of a chunk: logits, dx and dW."""


def _few_chunks(chunk_tokens: int, length: int, losses: int) -> tuple[int, int]:
    """The tokens of each row whose loss is run, and the number of chunks that are left out.

    [Note: Alike chunks] All chunks but the last are alike, so of many four are run, and the second
    stands for the rest.
    """
    count = 1
    if chunk_tokens:
        count = ceil(length / max(1, chunk_tokens // (losses // length)))
    return (length, 0) if count <= 4 else (4 * ceil(length / count), count - 4)
