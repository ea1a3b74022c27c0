"""Stand-ins for a rehearsal: weights, host memory, attention, norms and scans that only record.

For CUDA, a norm and local attention are one autograd node each, which saves what the kernel saves;
attention's backward also takes a workspace. See [Note: One node] and [Note: Workspace] in
docs/design/notes/planner.md.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from isp.core.attention.backend import AttentionBackend
from isp.core.attention.backends.explicit import block_rows
from isp.core.attention.backends.mask_blocks import document_lengths
from isp.core.attention.mask import AttentionMask, Chosen
from isp.core.comm.host_offload import TO_HOST, HostChannel
from isp.core.comm.tag import Transfer
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.phase import Phase
from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.core.optim.buckets import master_dtype
from isp.core.tensors import memory_of, tensors_in
from isp.core.torch_private import (
    TorchDispatchMode,
    aten_grouped_mm,
    disable_current_modes,
    storage_key,
)
from isp.core.weights.declare import WeightHolder
from isp.core.weights.gradients import OutputGradient, weight_gradient
from isp.core.weights.wp_communicator import (
    FullWeights,
    LocalWeights,
    ShardedLayer,
    WPCommunicator,
)
from isp.models.forwards import set_forward
from isp.planner.record import Compute, EventRecorder, GradientReady, PeakMemory, Reach, Read, Work

__all__ = [
    "META",
    "DryAttention",
    "DryHost",
    "DryLayers",
    "DryProducts",
    "DryRecurrence",
    "DryWeights",
    "Products",
    "fuse_norms",
]

META = torch.device("meta")


class DryWeights(WPCommunicator):
    """A communicator that records reads of weights and their gradients, and gathers nothing.

    `gathers`: the layout gathers weights, so that a rehearsal's parameters have their full shapes.
    `wide_gradients`: weight gradients are reduced in float32 at least.
    """

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
        # Experts that stay on their rank are never gathered, so no block declares a use of them.
        if not self._recorder.is_declared(module):
            return LocalWeights().unshard(module, phase, weight, bias)
        return nullcontext(_Use(self._recorder, module, phase, weight, bias))

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor:
        if self._recorder.is_declared(module):
            self._recorder.note(GradientReady(self._recorder.use_of(module), is_bias))
        self._recorder.delivered(grad)
        return grad


class DryProducts:
    """Computes weight gradients into main gradients, and records when each one is ready.

    On CPU, a product of 16-bit factors is computed in memory of its own and added afterwards, so
    such parameters have no main gradient here: [Note: Wide products].
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
        """The main gradients that products are added to."""
        return self._main.values()

    def __call__(
        self, layer: ShardedLayer, weight: nn.Parameter, dy: OutputGradient, x: Tensor
    ) -> None:
        weight_gradient(dy, x, into=self._main.get(weight), add=True)
        self._recorder.note(GradientReady(self._recorder.use_of(layer), is_bias=False))


class _Use:
    """The weight and bias of one use of a layer; records when the weight is read."""

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
        # In forward the hook on the module has already recorded that the use begins. In backward
        # there is no such hook: the use begins where the layer asks for its weight.
        if phase is Phase.BACKWARD:
            recorder.note(Reach(self._unshard, phase))
        elif recorder.is_inside(module):
            recorder.note(Reach(self._unshard, recorder.phase))

    @cached_property
    def weight(self) -> Tensor:
        self._recorder.note(Read(self._unshard, self._recorder.phase))
        return self._weight


class DryHost(HostChannel):
    """A host channel that records what goes to the host.

    Copies back to the device are not recorded: `isp.planner.walk` decides when they are launched.
    """

    def __init__(self, recorder: EventRecorder) -> None:
        super().__init__(META)
        self._recorder = recorder

    def _start(self, transfer: Transfer, *_: object) -> Callable[[], object]:
        if transfer.kind == TO_HOST:
            self._recorder.offload(transfer)
        return lambda: None


class DryAttention:
    """Local attention that records its FLOPs and memory and computes nothing.

    It is also an `LseKernel` (`isp.core.attention.backends.lse`), for blocks of a ring.
    """

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
        """Return an empty output [B, Sq, H, e].

        Shapes: q [B, Sq, H, d], k [B, Sk, K, d], v [B, Sk, K, e]: rows, queries or keys, heads or
        KV heads, features. If each query attends to `chosen` keys only, attention still computes
        the products with all keys, and saves the indices of the chosen ones.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        # Explicit attention, which CPU and chosen keys need, saves its inputs in float32 at least:
        # [Note: One node].
        own = wide if self._on_cpu or chosen is not None else q.dtype
        self._recorder.attends = True
        statistics = wide if self._on_cpu else torch.float32
        flops = _flops(q, k, v, mask)
        tensors = (x.to(own) for x in (q, k, v))
        if chosen is None:
            # Sinks always run on variable-length flash attention on CUDA (`SinkAttention`).
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
        """Return an empty output and log-sum-exp, as for one block of ring attention."""
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
        """Return empty gradients of q, k and v, as for one block of ring attention."""
        self._recorder.note(Compute(Work.ATTENTION, _BACKWARD * _flops(q, k, v, mask)))
        # Ring attention runs variable-length flash attention for each block (`FlashKernel`).
        work = self._workspace(q, k, v, AttentionBackend.VARLEN)
        return _gradients((q, k, v), work)

    def _workspace(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend) -> int:
        """Return the bytes that backward takes in addition to the gradients: [Note: Workspace]."""
        # Only flash attention has a workspace, and it takes 16-bit inputs only.
        if self._on_cpu or q.itemsize > 2:
            return 0
        work, group = 4 * q.numel(), q.shape[-2] // k.shape[-2]
        if group > 1:
            of_kv_heads = backend in (AttentionBackend.FLASH3, AttentionBackend.FLASH4)
            work += (k.numel() + v.numel()) * (4 if of_kv_heads else group * k.itemsize)
        return work


_BACKWARD = 2.5
"""FLOPs of attention's backward as a multiple of its forward: five products instead of two."""


def _flops(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> float:
    """Return the FLOPs of all pairs of a query and a key that the mask allows."""
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
    """Return how many pairs of a query and a visible key a causal document of `length` has.

    Each query sees itself and the tokens before, but no more than `window` keys.
    """
    reach = length if window is None else min(length, window)
    return reach * (2 * length - reach) / 2


_LOGITS = 3
"""Tensors as large as a block's logits that the backward of explicit attention holds at once."""


def _block(q: Tensor, k: Tensor, mask: AttentionMask) -> int:
    """Return the most logits that explicit attention has at once; it takes queries in blocks."""
    lengths = document_lengths(mask, len(q), q.shape[1], k.shape[1])
    queries, keys = (max(each) for each in zip(*lengths, strict=True))
    heads = q.shape[2]
    logits: int = heads * min(queries, block_rows(heads, keys)) * keys
    return logits


class _Attention(torch.autograd.Function):
    """Attention as one autograd node that saves what the kernel saves: [Note: One node].

    `numbers`: the indices of chosen keys; `work`: bytes of workspace in backward; `statistics`: the
    dtype of the log-sum-exp.
    """

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
    """Return empty gradients of q, k and v.

    A workspace of `work` bytes exists together with them for a moment, so that it counts in the
    recorded peak.
    """
    dq, dk, dv = (torch.empty_like(x) for x in qkv)
    # The recorder counts this tensor when it is made; it is freed at once.
    dq.new_empty(work, dtype=torch.uint8)
    return dq, dk, dv


@dataclass(frozen=True, kw_only=True)
class DryLayers(RankLayers):
    """Layers of a rank for a rehearsal: only a few of equal tiles are run, and scans are short."""

    recorder: EventRecorder
    like_cuda: bool
    """True if norms and attention save for backward what their CUDA kernels save.

    See [Note: One node] in docs/design/notes/planner.md.
    """

    def expert_layout(self, shape: tuple[int, ...]) -> ParameterLayout:
        """Return the layout of the first expert rank, which has the most experts."""
        if self.expert.size == 1:
            return super().expert_layout(shape)
        return replace(self.sharded_layout(shape, dim=0), parts=self.expert.size)

    def recurrence(self, kind: Recurrence) -> Recurrence:
        return DryRecurrence(kind, self.recorder)

    def tiles(self, parts: Sequence[slice]) -> Iterator[slice]:
        """Yield the first part of the tokens only, so that a module computes only this part.

        For the other parts, FLOPs are recorded in proportion to their numbers of tokens.
        """
        first, *others = parts
        begin = len(self.recorder.running)
        yield first
        events = (e for e in self.recorder.running[begin:] if isinstance(e, Compute))
        flops = sum(event.amount for event in events)
        rows = sum(part.stop - part.start for part in others)
        self.recorder.note(Compute(Work.PRODUCT, flops * rows / (first.stop - first.start)))

    def each_tile(self, tiles: Sequence[slice]) -> Iterator[slice]:
        """Yield the first three tiles and the last; for the rest repeat the third's events.

        The last tile may be shorter. The first two are run in any case: their memory is counted,
        and from the third on each tile does the same.
        """
        *equal, last = tiles
        yield from equal[:2]
        if len(equal) > 2:
            begin = len(self.recorder.running)
            yield equal[2]
            self.recorder.running.extend(self.recorder.running[begin:] * (len(equal) - 3))
        yield last

    @property
    def on_cpu(self) -> bool:
        return not self.like_cuda


def fuse_norms(model: nn.Module) -> None:
    """Make each `nn.RMSNorm` a single autograd node, as on CUDA: [Note: One node]."""
    for norm in model.modules():
        if type(norm) is nn.RMSNorm:
            set_forward(norm, partial(_normed, norm))


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Return the empty output of a norm, as a forward for `fuse_norms`."""
    y: Tensor = _Norm.apply(x, norm.weight)
    return y


class _Norm(torch.autograd.Function):
    """A norm as one autograd node that saves its input, its weight and a statistic per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the empty result of `torch._grouped_mm`, which is bfloat16-only on the meta device.

    [N, I] and [E, I, O] -> [N, O] for groups of rows, or [I, N] and [N, O] -> [E, I, O] for groups
    of what is summed over.
    """
    groups = offs.shape if b.dim() == 2 else ()
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


_CONVOLUTIONS = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
"""Convolutions, which count in bytes: in language models they have few taps per channel."""


# torch's counter does not know the in-place product that adds to main gradients.
_FLOPS = flop_registry | {torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm]}


class Products(TorchDispatchMode):
    """Records the FLOPs of matrix products, the bytes of convolutions, and new tensors."""

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


# -- scans -----------------------------------------------------------------------------------
#
# A recurrence is run on segments of two lengths, and longer ones are extrapolated. See
# [Note: Short scans] in docs/design/notes/planner.md.


_STEP = 64
"""Tokens between the two lengths; a multiple of every recurrence's chunk."""


class DryRecurrence:
    """A `Recurrence` whose scans and summaries are recorded instead of computed."""

    def __init__(self, kind: Recurrence, recorder: EventRecorder) -> None:
        self._kind = kind
        self._recorder = recorder
        self.summary_size = kind.summary_size
        self.state_size = kind.state_size
        self.flops = kind.flops
        self.after = kind.after

    def scan(
        self, inputs: Inputs, lengths: Sequence[int], initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Record a scan; shapes as `Recurrence.scan`."""
        rows = sum(lengths), len(lengths)
        out, states = self._noted(rows, self.flops(inputs), inputs, lengths, initial)
        return out, states

    def summary(self, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
        """Record a summary; its FLOPs are a scan's times the ratio of summary to state size."""
        flops = self.flops(inputs) * self.summary_size(inputs) // self.state_size(inputs)
        (found,) = self._noted((len(lengths),), flops, inputs, lengths, None)
        return found

    def _noted(
        self,
        rows: tuple[int, ...],
        flops: int,
        inputs: Inputs,
        lengths: Sequence[int],
        initial: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return the empty results of a scan or summary, and record `flops` for each token.

        `rows` has the length of dim 0 of each result: a scan has two results (outputs, one for each
        token, and states, one for each segment), a summary has one.
        """
        begin = () if initial is None else (initial,)
        segment = _Segment(
            self._kind,
            len(rows) == 1,
            tuple(map(_Like.of, inputs.of_heads)),
            tuple(map(_Like.of, inputs.of_groups)),
            tuple(map(_Like.of, begin)),
            tuple(None if x is None else _Like.of(x[None]) for x in inputs.constants),
        )
        counts = Counter(lengths)
        # Segments of the same length take the same bytes, so each length is measured once.
        taken = {n: _taken(segment, n) for n in counts}
        total = tuple(sum(counts[n] * taken[n].sizes[i] for n in counts) for i in range(3))
        first = taken[lengths[0]]
        results = (x.rows(n) for x, n in zip(first.results, rows, strict=True))
        found: tuple[Tensor, ...] = _Scanned.apply(
            flops * sum(lengths),
            self._recorder,
            total,
            first.saves,
            tuple(results),
            *(x for xs in (*inputs, begin) for x in xs if x is not None),
        )
        return found


class _Like(NamedTuple):
    """Shape and dtype of a tensor, without its first dim."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _Like:
        return cls(x.shape[1:], x.dtype)

    def rows(self, length: int) -> Tensor:
        """Return an empty tensor with `length` rows."""
        return _memory(length, *self.shape, dtype=self.dtype)


class _Scanned(torch.autograd.Function):
    """A scan as one autograd node that computes nothing and takes as much memory as a real scan.

    `sizes`: bytes saved for backward, peak in forward, and peak in backward, as `_taken` returns
    them. `saves` tells for each input whether it is saved for backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        flops: int,
        recorder: EventRecorder,
        sizes: tuple[int, int, int],
        saves: tuple[bool, ...],
        results: tuple[Tensor, ...],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.flops, ctx.recorder, (kept, most, ctx.most) = flops, recorder, sizes
        ctx.inputs = [(x.shape, x.dtype) for x in inputs]
        recorder.note(Compute(Work.SCAN, flops))
        # The recorder counts this tensor when it is made; it is freed at once.
        _memory(most)
        saved = (x for x, is_saved in zip(inputs, saves, strict=True) if is_saved)
        ctx.save_for_backward(_memory(kept), *saved)
        return results

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        # Backward scans forward once more, and then computes two gradients.
        ctx.recorder.note(Compute(Work.SCAN, 3 * ctx.flops))
        kept, *_ = ctx.saved_tensors
        _memory(max(0, ctx.most - kept.nbytes))
        # A real scan frees its saved chunks one by one, so they are gone when gradients are made.
        kept.untyped_storage().resize_(0)
        gradients = (_memory(*shape, dtype=dtype) for shape, dtype in ctx.inputs)
        return None, None, None, None, None, *gradients


def _memory(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return an empty tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


class _Segment(NamedTuple):
    """The inputs of a scan over tokens of one document, of any length; a key of the cache."""

    kind: Recurrence
    summarized: bool
    of_heads: tuple[_Like, ...]
    of_groups: tuple[_Like, ...]
    initial: tuple[_Like, ...]
    """The state before the segment, as a tuple of one; empty if the segment begins a document."""
    constants: tuple[_Like | None, ...]

    def inputs(self, tokens: int) -> tuple[Inputs, Tensor | None]:
        """Return inputs of `tokens` tokens, and the state before them."""
        of_heads, of_groups = (
            tuple(x.rows(tokens).requires_grad_() for x in of)
            for of in (self.of_heads, self.of_groups)
        )
        constants = (None if x is None else x.rows(1)[0].requires_grad_() for x in self.constants)
        initial = next((x.rows(1).requires_grad_() for x in self.initial), None)
        return Inputs(of_heads, of_groups, tuple(constants)), initial

    def run(self, inputs: Inputs, initial: Tensor | None) -> tuple[Tensor, ...]:
        """Run the recurrence, and return its results."""
        tokens = [len(inputs.of_heads[0])]
        if self.summarized:
            return (self.kind.summary(inputs, tokens),)
        return self.kind.scan(inputs, tokens, initial)


class _Taken(NamedTuple):
    """Results of a segment's scan, and the bytes that it takes in addition to its inputs."""

    kept: int
    """Bytes saved for backward."""
    forward: int
    """Peak bytes in forward."""
    backward: int
    """Peak bytes in backward, saved bytes included."""
    saves: tuple[bool, ...]
    """By input, True if it is saved for backward."""
    results: tuple[_Like, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.kept, self.forward, self.backward


def _taken(segment: _Segment, tokens: int) -> _Taken:
    """Return the bytes of a segment of `tokens` tokens: [Note: Short scans]."""
    short = min(tokens, 2 * _STEP + tokens % _STEP)
    base, steps = _measured(segment, short), (tokens - short) // _STEP
    if not steps:
        return base
    pairs = zip(base.sizes, _measured(segment, short + _STEP).sizes, strict=True)
    kept, forward, backward = (a + steps * (b - a) for a, b in pairs)
    return base._replace(kept=kept, forward=forward, backward=backward)


@lru_cache(maxsize=1024)
def _measured(segment: _Segment, tokens: int) -> _Taken:
    """Measure a short segment by running it on the meta device."""
    saved: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def keep(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        saved[storage_key(memory)] = memory
        return x

    # The rehearsal's own modes must not record this run.
    with disable_current_modes(), torch.enable_grad():
        inputs, initial = segment.inputs(tokens)
        with PeakMemory() as made:
            with saved_tensors_hooks(keep, lambda x: x):
                out, *others = segment.run(inputs, initial)
            results = tuple(map(_Like.of, (out, *others)))
            # Final states get no gradient here, and must not count as memory of the backward.
            del others
            given = (x for of in (*inputs, (initial,)) for x in of if x is not None)
            saves = tuple(saved.pop(memory_of(x), None) is not None for x in given)
            kept = sum(memory.nbytes() for memory in saved.values())
            forward, made.peak_bytes = made.peak_bytes, 0
            out.backward(torch.empty_like(out))
    # The output and its gradient were made here, but outside of this measurement the caller has
    # them, and counts them.
    return _Taken(kept, forward, made.peak_bytes - 2 * out.nbytes, saves, results)
