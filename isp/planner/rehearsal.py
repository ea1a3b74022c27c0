"""A micro-batch's acts in each block, in order: the model itself, run without ranks or numbers.

The model goes forward and back once on the meta device, over channels of the layout's sizes that
say what would travel. So what is planned is what the layers do, in the order in which they do it,
and what autograd keeps of it.

One block of a kind is run and stands for all of its kind. Kinds are told apart by what the blocks
declare and by the shapes of their weights.

[Note: Segments] Blocks are rehearsed as if each kept its input. One that does not, because it is
computed again for it, does what the others do but keep it and bring it back.

[Note: One node] Norms and local attention are one kernel each on CUDA, and keep their inputs,
output and statistics. On CPU a norm is several operations, as on meta, and attention computes in
float32 at least. What CUDA keeps has not been counted on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from isp.attention import AttentionMask
from isp.comm import Channel
from isp.comm.cargo import Trip
from isp.comm.channel import DryChannel
from isp.comm.host import TO_HOST, HostChannel, HostMemory
from isp.config.models import language_model
from isp.layers.factory import LayerFactory
from isp.layers.norm import RMSNorm
from isp.layers.sequence import SequenceRanks
from isp.parallel import Axis, ContextExchange, Topology
from isp.parallel.context import Windows
from isp.parallel.phase import Phase
from isp.planner.case import Case, Coordinates
from isp.planner.declared import BlockKind, kind_of, kinds_of
from isp.planner.made import Made
from isp.planner.tape import (
    Attend,
    Gradient,
    Loss,
    Product,
    Reach,
    Read,
    TapeRecorder,
    Tapes,
    pairs_seen,
)
from isp.traced.chunk import TracedChunk
from isp.traced.model import TracedModel
from isp.traced.trace import Role as TraceRole
from isp.weights.declare import WeightHolder, as_chunks
from isp.weights.trace import Block
from isp.weights.wp import FullWeights, WPCommunicator
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
    recomputed, visits = kind
    found = rehearsal(case, place, recomputed=recomputed).tapes
    assert kind in found, f"no block with {[visit.name for visit, _ in visits]} was rehearsed"
    return found[kind]


def rehearsal(case: Case, place: Coordinates, *, recomputed: bool = False) -> Rehearsal:
    """A micro-batch on the rank at `place`, all layers recomputed or none."""
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
        parallel.weight.vocab_parallel_loss,
        parallel.sequence_2D.exchange,
        case.documents if topology.context > 1 else 1,
    )
    model = _alike_layers(case.model, recomputed)
    return _rehearsed(model, part, case.rows, case.tokens, case.dtype, case.on_cpu)


@lru_cache(maxsize=64)
def _alike_layers(model: ModelConfig, recomputed: bool) -> ModelConfig:
    """Two layers of the model; all of those that a folder has."""
    segmented = model.checkpoint_segment > 0 and model.attention_head_groups > 1
    return replace(
        model,
        num_layers=2 if model.hf is None else model.num_layers,
        checkpoint=float(recomputed),
        checkpoint_keeps_attention=recomputed and model.checkpoint_keeps_attention,
        checkpoint_distribute_activations=recomputed and model.checkpoint_distribute_activations,
        checkpoint_offload=recomputed and model.checkpoint_offload,
        checkpoint_segment=int(recomputed and segmented),  # [Note: Segments]
    )


class _RankPart(NamedTuple):
    """What decides a rank's part of a micro-batch."""

    sequence: Topology
    """Of the ranks of a sequence alone."""
    place: int
    gathers_weights: bool
    vocab_parallel_loss: bool
    exchange: ContextExchange
    documents: int
    """Equal documents in a row, if they decide which tokens a rank has."""

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
        )


META = torch.device("meta")


@lru_cache(maxsize=256)
def _rehearsed(
    model: ModelConfig, part: _RankPart, rows: int, tokens: int, dtype: str, on_cpu: bool
) -> Rehearsal:
    """What the first of two like layers keeps beyond the second is shared."""
    recorder, mode = TapeRecorder(), part.sequence.mode
    facts, tensor = mode.facts, part.channel(Axis.TENSOR, recorder)
    own_model = language_model(model, dtype)
    layers = (LayerFactory if on_cpu else _CudaLayers)(
        mode=mode,
        tensor=tensor,
        weight=Channel.solo() if facts.gathers_weights else tensor,
        communicator=_DryWeights(recorder, gathers=part.gathers_weights),
        host=HostMemory(META, key="model.checkpoint_offload", channel=_DryHost(recorder)),
        device=META,
        dtype=getattr(torch, dtype),
        sequence=part.ranks(own_model.attention_windows, recorder),
        vocab_parallel_loss=part.vocab_parallel_loss,
    )
    if isinstance(own_model, TracedModel) and own_model.trace.elements(TraceRole.EXPERT):
        raise ValueError(
            f"isp layouts cannot plan model.hf={model.hf}: which experts its tokens go to is known"
            f" in a run alone; isp profile measures one"
        )
    (whole,) = own_model.build(layers, attention=_DryAttention(recorder, on_cpu))
    blocks = whole.weight_blocks()
    recorder.follow(blocks)
    own = tokens // tensor.size if facts.slices_batch else tokens
    ids = torch.empty(rows, own, dtype=torch.int64, device=META)
    labels = ids.new_empty(rows, tokens if whole.splits_logits else own)
    parameters = list(whole.shards())
    recorder.know((*(item.parameter for item in parameters), ids))
    with _Products(recorder):
        with saved_tensors_hooks(recorder.keep, lambda x: x):
            output = whole(ids, ids, _ends_of(tokens, part.documents))
            recorder.at_loss(len(blocks))
            length = output.shape[1]
            chunk_tokens = model.loss_chunk_tokens
            if traced := isinstance(whole, TracedChunk):
                chunk_tokens = whole.loss_chunk_tokens
            run, left_out = _few_chunks(chunk_tokens, length, labels.numel())
            if left_out:
                output, labels = output[:, :run], labels[:, : labels.shape[1] * run // length]
            with Made() as made:
                expected = output.new_empty((), dtype=torch.float64)
                loss = whole.loss(output, labels, expected)
            if left_out:
                recorder.repeat_products(_PRODUCTS, 2 * _PRODUCTS, left_out)
            recorder.note(Loss())
            recorder.note(Loss())  # its gradient, too
        saved = recorder.turn(len(blocks) + 1)
        loss.backward()
    (declared,) = as_chunks((blocks,))
    shapes = {p.name: p.layout.global_shape for p in parameters}
    kinds = [kind_of(block, shapes) for block in declared]
    pairs = ((kinds.index(kind), b) for b, kind in enumerate(kinds))
    first, second = next(((a, b) for a, b in pairs if a < b), (0, 0))
    shared = saved[first].total - saved[second].total
    tapes = (recorder.tapes(b, saved[b]) for b in range(len(kinds)))
    by_kind = dict(zip(kinds, tapes, strict=True))
    vocab = own_model.trace.vocab_size if isinstance(own_model, TracedModel) else model.vocab_size
    logits = rows * tokens * vocab // tensor.size
    # dx of what was left out; of whole logits, the loss's backward, which makes its gradient.
    rest = (length - run) * rows * output.shape[2] * output.itemsize
    after = logits * max(4, output.itemsize) if traced and not chunk_tokens else 0
    loss_bytes = saved[-1].total + rest, made.most + rest + after
    return Rehearsal(by_kind, shared, *loss_bytes, logits, whole.splits_logits)


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


class _DryWeights(WPCommunicator):
    """Notes who reads weights and has gradients; weights are whole where they are gathered."""

    def __init__(self, recorder: TapeRecorder, *, gathers: bool) -> None:
        self.gathers_weights = gathers
        self._recorder = recorder

    @property
    def communication_mode(self) -> str:
        return "isp" if self.gathers_weights else "tp"

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        before, self._recorder.phase = self._recorder.phase, Phase.RECOMPUTE
        try:
            yield
        finally:
            self._recorder.phase = before

    def visit(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        return nullcontext(_DryVisit(self._recorder, module, phase, weight, bias))

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor:
        self._recorder.note(Gradient(self._recorder.visit_of(module), is_bias))
        self._recorder.delivered(grad)
        return grad


class _DryVisit:
    """Shards that stand for full tensors; notes when the weight is read."""

    def __init__(
        self,
        recorder: TapeRecorder,
        module: WeightHolder,
        phase: Phase,
        weight: Tensor,
        bias: Tensor | None,
    ) -> None:
        self.bias = bias
        self._recorder, self._visit, self._weight = recorder, recorder.visit_of(module), weight
        if phase is Phase.BACKWARD:  # a forward is reached when the layer is called
            recorder.note(Reach(self._visit, phase))
        elif recorder.is_inside(module):
            recorder.note(Reach(self._visit, recorder.phase))

    @cached_property
    def weight(self) -> Tensor:
        self._recorder.note(Read(self._visit, self._recorder.phase))
        return self._weight


class _DryHost(HostChannel):
    """Notes what goes to the host. When it comes back is not the block's to say."""

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__(META)
        self._recorder = recorder

    def _start(self, trip: Trip, *_: object) -> Callable[[], object]:
        if trip.kind == TO_HOST:
            self._recorder.offload(trip)
        return lambda: None


class _DryAttention:
    """Local attention that attends to nothing; also an `isp.attention.lse.LseKernel`."""

    def __init__(self, recorder: TapeRecorder, on_cpu: bool) -> None:
        self._recorder = recorder
        self._on_cpu = on_cpu

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        """q [B, Sq, H, d], k [B, Sk, K, d] and v [B, Sk, K, e] -> [B, Sq, H, e]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        own = wide if self._on_cpu else q.dtype  # [Note: One node]
        self._recorder.attends = True
        statistics = wide if self._on_cpu else torch.float32
        event = self._event(q, v, mask)
        tensors = (x.to(own) for x in (q, k, v))
        out: Tensor = _Attention.apply(*tensors, statistics, event, self._recorder)
        self._recorder.attends = False
        return out.to(q.dtype)

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        self._recorder.note(self._event(q, v, mask))
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:-1], dtype=dtype)

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._recorder.note(self._event(q, v, mask)._replace(phase=Phase.BACKWARD))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def _event(self, q: Tensor, v: Tensor, mask: AttentionMask) -> Attend:
        features = q.shape[-2] * (q.shape[-1] + v.shape[-1]) // 2
        phase = self._recorder.phase
        again = Phase.RECOMPUTE if phase is Phase.BACKWARD else phase
        return Attend(again, features, mask.window, _pairs(mask))


def _pairs(mask: AttentionMask) -> float | None:
    """Pairs of a query and a key that it sees; None if the mask knows no documents."""
    if mask.cu_seqlens is None:
        return None
    documents = list(zip(mask.lengths, mask.key_lengths, strict=True))
    if not mask.causal:
        return float(sum(queries * keys for queries, keys in documents))
    return sum(pairs_seen(k, mask.window) - pairs_seen(k - q, mask.window) for q, k in documents)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: torch.dtype,
        event: Attend,
        recorder: TapeRecorder,
    ) -> Tensor:
        ctx.event, ctx.recorder = event, recorder
        recorder.note(event)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        sums = out.new_empty(out.shape[:-1], dtype=statistics)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.recorder.note(ctx.event._replace(phase=Phase.BACKWARD))
        q, k, v, _, _ = ctx.saved_tensors
        return (*(torch.empty_like(x) for x in (q, k, v)), None, None, None)


class _CudaLayers(LayerFactory):
    """Layers as CUDA computes them, [Note: One node]."""

    def rms_norm(self, size: int, *, eps: float, per_head: bool = False) -> RMSNorm:
        layout = super().rms_norm(size, eps=eps, per_head=per_head).layouts["weight"]
        return _CudaNorm(layout, eps=eps, device=self.device, dtype=self.dtype)


class _CudaNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Norm.apply(x, self.weight)
        return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Products(TorchDispatchMode):
    """Notes the products of matrices, and memory that is made."""

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self._recorder.note(Product(count(*args, **kwargs, out_val=out)))
        self._recorder.made(x for x in tree_iter(out) if isinstance(x, Tensor))
        return out
