"""What a rehearsal's layers are given: nothing that computes or sends, all of which is noted.

[Note: One node] Norms and local attention are one kernel each on CUDA, and keep their inputs,
output and statistics. On CPU a norm is several operations, as on meta, and attention computes in
float32 at least. What CUDA keeps has not been counted on a device.

[Note: Workspace] In backward flash attention adds up dq in float32. With shared KV heads versions 3
and 4 add up dk and dv in float32, too, and version 2 writes those of every query head. `auto` is
planned as version 2, which takes most, and so are `sdpa` and `cudnn`: what cuDNN takes is not known
until it is measured. With deterministic kernels version 2 has several copies of dq, which are not
planned. Source: mha_bwd and mha_varlen_bwd of torch (flash_attn/flash_api.cpp) and of
flash-attention's hopper/flash_api.cpp, and _flash_attn_bwd of its flash_attn/cute/interface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from isp.core.attention.backend import AttentionBackend
from isp.core.attention.backends.explicit import block_rows
from isp.core.attention.backends.mask_blocks import document_lengths
from isp.core.attention.mask import AttentionMask, Chosen
from isp.core.comm.host_offload import TO_HOST, HostChannel
from isp.core.comm.tag import Transfer
from isp.core.layers.linear import LinearLayer
from isp.core.layers.rank_layers import RankLayers
from isp.core.layers.weight_gradients import OutputGradient, weight_gradient
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.phase import Phase
from isp.core.mixers.recurrence import Recurrence
from isp.core.optim.buckets import master_dtype
from isp.core.tensors import tensors_in
from isp.core.torch_private import TorchDispatchMode, aten_grouped_mm
from isp.core.weights.declare import WeightHolder
from isp.core.weights.wp import FullWeights, LocalWeights, WPCommunicator
from isp.planner.dry_scan import DryRecurrence
from isp.planner.record import Compute, EventRecorder, Gradient, Reach, Read, Work

__all__ = [
    "META",
    "DryAttention",
    "DryHost",
    "DryLayers",
    "DryProducts",
    "DryWeights",
    "Products",
    "fuse_norms",
]

META = torch.device("meta")


class DryWeights(WPCommunicator):
    """Notes who reads weights and has gradients; weights are whole where they are gathered."""

    def __init__(
        self,
        recorder: EventRecorder,
        *,
        gathers: bool,
        wide_gradients: bool,
    ) -> None:
        self.gathers_weights = gathers
        self._recorder = recorder
        self._wide_gradients = wide_gradients

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        before = self._recorder.phase, self.is_recomputing
        self._recorder.phase, self.is_recomputing = Phase.RECOMPUTE, True
        try:
            yield
        finally:
            self._recorder.phase, self.is_recomputing = before

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return master_dtype(dtype) if self._wide_gradients else dtype

    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        if not self._recorder.is_declared(module):  # spread experts, which are not gathered
            return LocalWeights().unshard(module, phase, weight, bias)
        return nullcontext(_Use(self._recorder, module, phase, weight, bias))

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor:
        if self._recorder.is_declared(module):
            self._recorder.note(Gradient(self._recorder.use_of(module), is_bias))
        self._recorder.delivered(grad)
        return grad


class DryProducts:
    """The route into main gradients: notes that a weight gradient is there.

    On CPU a product of narrow factors takes memory of its own, [Note: Wide products].
    """

    def __init__(
        self, recorder: EventRecorder, parameters: Iterable[nn.Parameter], *, on_cpu: bool
    ) -> None:
        self._recorder = recorder
        self._main = {
            parameter: torch.empty_like(parameter, dtype=master_dtype(parameter.dtype))
            for parameter in parameters
            if not on_cpu or master_dtype(parameter.dtype) == parameter.dtype
        }

    @property
    def main_gradients(self) -> Iterable[Tensor]:
        """Where products end."""
        return self._main.values()

    def __call__(
        self, layer: LinearLayer, weight: nn.Parameter, dy: OutputGradient, x: Tensor
    ) -> None:
        weight_gradient(dy, x, into=self._main.get(weight), add=True)
        self._recorder.note(Gradient(self._recorder.use_of(layer), is_bias=False))


class _Use:
    """Shards that stand for full tensors; notes when the weight is read."""

    def __init__(
        self,
        recorder: EventRecorder,
        module: WeightHolder,
        phase: Phase,
        weight: Tensor,
        bias: Tensor | None,
    ) -> None:
        self.bias = bias
        self._recorder, self._unshard, self._weight = recorder, recorder.use_of(module), weight
        if phase is Phase.BACKWARD:  # a forward is reached when the layer is called
            recorder.note(Reach(self._unshard, phase))
        elif recorder.is_inside(module):
            recorder.note(Reach(self._unshard, recorder.phase))

    @cached_property
    def weight(self) -> Tensor:
        self._recorder.note(Read(self._unshard, self._recorder.phase))
        return self._weight


class DryHost(HostChannel):
    """Notes what goes to the host. When it comes back is not the block's to say."""

    def __init__(self, recorder: EventRecorder) -> None:
        super().__init__(META)
        self._recorder = recorder

    def _start(self, transfer: Transfer, *_: object) -> Callable[[], object]:
        if transfer.kind == TO_HOST:
            self._recorder.offload(transfer)
        return lambda: None


class DryAttention:
    """Local attention that attends to nothing; also an `LseKernel` of `attention.backends.lse`."""

    def __init__(self, recorder: EventRecorder, backend: AttentionBackend, on_cpu: bool) -> None:
        self._recorder = recorder
        self._backend = backend
        self._on_cpu = on_cpu

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        sinks: Tensor | None = None,
        chosen: Chosen | None = None,
    ) -> Tensor:
        """q [B, Sq, H, d], k [B, Sk, K, d] and v [B, Sk, K, e] -> [B, Sq, H, e].

        Of chosen keys isp computes the products of all, and keeps the numbers.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        own = wide if self._on_cpu or chosen is not None else q.dtype  # [Note: One node]
        self._recorder.attends = True
        statistics = wide if self._on_cpu else torch.float32
        flops = _flops(q, k, v, mask)
        tensors = (x.to(own) for x in (q, k, v))
        if chosen is None:
            # that of `SinkAttention` on CUDA, whatever is configured
            backend = self._backend if sinks is None else AttentionBackend.VARLEN
            numbers, work = None, self._workspace(q, k, v, backend)
        else:
            numbers, work = chosen.numbers, _LOGITS * _block(q, k, mask) * own.itemsize
        out: Tensor = _Attention.apply(*tensors, numbers, work, statistics, flops, self._recorder)
        self._recorder.attends = False
        return out.to(q.dtype)

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        self._recorder.note(Compute(Work.ATTENTION, _flops(q, k, v, mask)))
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
        self._recorder.note(Compute(Work.ATTENTION, _BACKWARD * _flops(q, k, v, mask)))
        work = self._workspace(q, k, v, AttentionBackend.VARLEN)  # that of `FlashKernel`
        return _gradients((q, k, v), work)

    def _workspace(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend) -> int:
        """Bytes that backward takes besides the gradients: [Note: Workspace]."""
        if self._on_cpu or q.itemsize > 2:  # flash attention takes 16 bits
            return 0
        work, group = 4 * q.numel(), q.shape[-2] // k.shape[-2]
        if group > 1:
            of_kv_heads = backend in (AttentionBackend.FLASH3, AttentionBackend.FLASH4)
            work += (k.numel() + v.numel()) * (4 if of_kv_heads else group * k.itemsize)
        return work


_BACKWARD = 2.5
"""FLOPs of the gradients of attention, as multiples of its own: five products instead of two."""


def _flops(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> float:
    """FLOPs of the pairs of a query and a key that the mask lets see each other."""
    if mask.cu_seqlens is None:
        pairs = q.shape[0] * _pairs_before(k.shape[1], mask.window)
    else:
        documents = zip(mask.lengths, mask.key_lengths, strict=True)
        pairs = sum(
            _pairs_before(k, mask.window) - _pairs_before(k - q, mask.window)
            if mask.causal
            else q * k
            for q, k in documents
        )
    return 2 * pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1])


def _pairs_before(length: int, window: int | None) -> float:
    """Pairs of a query and a key before it, in a causal document."""
    reach = length if window is None else min(length, window)
    return reach * (2 * length - reach) / 2


_LOGITS = 3
"""Of a block of explicit attention, as many at once in backward: softmax, and gradients."""


def _block(q: Tensor, k: Tensor, mask: AttentionMask) -> int:
    """Logits of the largest block of explicit attention."""
    lengths = document_lengths(mask, len(q), q.shape[1], k.shape[1])
    queries, keys = (max(each) for each in zip(*lengths, strict=True))
    heads = q.shape[2]
    logits: int = heads * min(queries, block_rows(heads, keys)) * keys
    return logits


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        numbers: Tensor | None,
        work: int,
        statistics: torch.dtype,
        flops: float,
        recorder: EventRecorder,
    ) -> Tensor:
        ctx.flops, ctx.recorder, ctx.work = flops, recorder, work
        recorder.note(Compute(Work.ATTENTION, flops))
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        sums = out.new_empty(out.shape[:-1], dtype=statistics)
        ctx.save_for_backward(q, k, v, *((out, sums) if numbers is None else (numbers,)))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.recorder.note(Compute(Work.ATTENTION, _BACKWARD * ctx.flops))
        return *_gradients(ctx.saved_tensors[:3], ctx.work), None, None, None, None, None


def _gradients(qkv: Sequence[Tensor], work: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v, counting a workspace of `work` bytes at their peak."""
    dq, dk, dv = (torch.empty_like(x) for x in qkv)
    dq.new_empty(work, dtype=torch.uint8)  # seen at its most, and gone
    return dq, dk, dv


@dataclass(frozen=True, kw_only=True)
class DryLayers(RankLayers):
    """Layers of which alike parts are run a few times, and scans on few tokens."""

    recorder: EventRecorder
    like_cuda: bool
    """Whether they compute as on CUDA, [Note: One node]."""

    def expert_layout(self, shape: tuple[int, ...]) -> ParameterLayout:
        """Those of the first rank that has different ones, which has most."""
        if self.expert.size == 1:
            return super().expert_layout(shape)
        return replace(self.sharded_layout(shape, dim=0), parts=self.expert.size)

    def recurrence(self, kind: Recurrence) -> Recurrence:
        return DryRecurrence(kind, self.recorder)

    def tiles(self, parts: Sequence[slice]) -> Iterator[slice]:
        """The first, whose products stand for those of the others."""
        first, *others = parts
        begin = len(self.recorder.running)
        yield first
        events = (e for e in self.recorder.running[begin:] if isinstance(e, Compute))
        flops = sum(event.amount for event in events)
        rows = sum(part.stop - part.start for part in others)
        self.recorder.note(Compute(Work.PRODUCT, flops * rows / (first.stop - first.start)))

    def each_tile(self, tiles: Sequence[slice]) -> Iterator[slice]:
        """The third stands for all between it and the last."""
        *alike, last = tiles
        yield from alike[:2]
        if len(alike) > 2:
            begin = len(self.recorder.running)
            yield alike[2]
            self.recorder.running.extend(self.recorder.running[begin:] * (len(alike) - 3))
        yield last

    @property
    def on_cpu(self) -> bool:
        return not self.like_cuda


def fuse_norms(model: nn.Module) -> None:
    """Let torch's own norms be one node each, as on CUDA: [Note: One node]."""
    for norm in model.modules():
        if type(norm) is nn.RMSNorm:
            setattr(norm, "forward", partial(_normed, norm))  # noqa: B010


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    y: Tensor = _Norm.apply(x, norm.weight)
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


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """What `torch._grouped_mm` gives, which torch knows on the meta device for bfloat16 alone.

    Groups of rows, [N, I] and [E, I, O] -> [N, O], or of what is added up, [I, N] and [N, O] ->
    [E, I, O].
    """
    groups = offs.shape if b.dim() == 2 else ()
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


_CONVOLUTIONS = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
"""Those of a language model: with a few taps a channel they pass over memory."""


_FLOPS = flop_registry | {torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm]}


class Products(TorchDispatchMode):
    """Notes the products of matrices, convolutions, and memory that is made."""

    def __init__(self, recorder: EventRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is aten_grouped_mm:
            out = _grouped_product(*args, **kwargs)
            self._recorder.note(Compute(Work.PRODUCT, 2 * args[0].numel() * args[1].shape[-1]))
        else:
            out = func(*args, **kwargs)
            if func.overloadpacket in _CONVOLUTIONS:
                moved = sum(x.nbytes for x in tensors_in(args, out))
                self._recorder.note(Compute(Work.MEMORY, moved))
            elif (count := _FLOPS.get(func.overloadpacket)) is not None:
                self._recorder.note(Compute(Work.PRODUCT, count(*args, **kwargs, out_val=out)))
        self._recorder.made(tensors_in(out))
        return out
