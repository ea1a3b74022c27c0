"""A traced model as the runtime sees any model: `LanguageModel` and `Chunk`.

B batch, S sequence, D hidden size, H heads, K KV heads, d and e sizes of heads, V vocabulary;
S' the tokens of this rank
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isp.attention import AttentionMask, DistributedAttention, LocalAttention, make_local_attention
from isp.attention.explicit import ExplicitAttention
from isp.comm import Channel
from isp.layers.factory import LayerFactory
from isp.layers.loss import vocab_parallel_cross_entropy
from isp.layers.module import NamedParameter
from isp.parallel.config import LaunchPoint, ParallelConfig
from isp.parallel.layout import ParameterLayout
from isp.recompute import Recomputer
from isp.rng import RngStatesTracker, generator_states, restore_generators
from isp.settings.attention_backend import AttentionBackend
from isp.traced.hosts import Host, OwnModule, host_of
from isp.traced.model_folder import check_layout, check_model_config
from isp.traced.swap import SwappedLinear, SwappedTable
from isp.traced.trace import (
    Call,
    Kind,
    ModelTrace,
    Role,
    check_drivable,
    is_transposed,
    trace_model,
)
from isp.weights.declare import DeclaredBlock, DeclaredVisit
from isp.weights.trace import Passes, recomputed_blocks

__all__ = ["InitialWeights", "TracedChunk", "TracedModel"]


class InitialWeights(Protocol):
    """A source of the weights that a model begins from."""

    def fill(self, model: nn.Module, shards: Iterable[NamedParameter], seed: int) -> None:
        """Put values into a rank's shards of `model`'s parameters, and into its kept buffers."""


class TracedModel:
    """Somebody else's model, known by its trace."""

    def __init__(
        self,
        model: nn.Module,
        *,
        checkpoint: float = 0.0,
        attention_backend: AttentionBackend = AttentionBackend.AUTO,
        weights: InitialWeights | None = None,
        in_place: bool = True,
    ) -> None:
        """`weights`: the source of those of a `model` without memory; None: it has them.

        Not `in_place`, `build` takes a copy of the model each time.
        """
        self.host = host_of(model)
        self.checkpoint = checkpoint
        self.attention_backend = attention_backend
        self.model = model
        self._weights = weights
        self._in_place = in_place
        check_drivable(model)
        self._shape = self.host.without_values(on_meta(model))
        """Of the same structure and without memory, for those who plan."""
        shape = copy.deepcopy(self._shape)
        self.trace = trace_model(shape, self.host.connect, self.host.forward)
        if not self.trace.reads_positions and not isinstance(self.host, OwnModule):
            raise ValueError(
                f"{type(model).__name__} does not look at position_ids: it would count the tokens"
                f" of each rank, and of packed documents, from the wrong place"
            )

    @property
    def hidden_size(self) -> int:
        """Features of a token that travel between stages."""
        raise NotImplementedError

    @property
    def num_parameters(self) -> int:
        """Parameters, shared ones once."""
        return sum(self.trace.sizes.values())

    @property
    def flop_rule(self) -> str:
        """The `flops` rule, in words."""
        return (
            "6 x parameters of linears x tokens + 6 x (size of keys + of values) x heads x half the"
            " square of each document's length, recomputation not counted"
        )

    def flops(self, document_lengths: Iterable[int]) -> int:
        """FLOPs of forward and backward; an expert counts as if every token went to it."""
        lengths = list(document_lengths)
        total = 6 * self.trace.multiplied * sum(lengths)
        for call in self.trace.calls:
            if call.sizes is not None:
                heads, _, key, value, window = call.sizes
                for length in lengths:
                    reach = min(length, window or length)
                    total += 3 * heads * (key + value) * reach * (2 * length - reach)
        return total

    @property
    def tied_weight(self) -> str | None:
        """None: there is one stage, which has both uses of a tied weight."""
        return None

    def check_layout(self, parallel: ParallelConfig, seq_len: int) -> None:
        """Raise ValueError, naming key, value and way out, if it cannot be split as asked."""
        check_layout(parallel, seq_len)
        check_model_config(self.host.config(self.model), parallel)

    def build(
        self,
        layers: LayerFactory,
        stages: Iterable[int] = (0,),
        num_stages: int = 1,
        *,
        attention: LocalAttention | None = None,
    ) -> tuple[TracedChunk, ...]:
        """As `isp.models.protocol.LanguageModel.build`.

        The model itself is sharded if that was asked for, else a copy of it; on the meta device
        one without memory.
        """
        model = self.model if self._in_place else copy.deepcopy(self.model)
        if layers.device.type == "meta":
            model = copy.deepcopy(self._shape)
        recomputed = recomputed_blocks(len(self.trace.blocks), self.checkpoint)

        def local(scale: float | None, softcap: float | None, sinks: bool, size: int) -> Any:
            if attention is not None:
                return attention
            if sinks or softcap is not None:
                return ExplicitAttention(scale=scale, softcap=softcap)
            return make_local_attention(
                self.attention_backend,
                device=layers.device,
                dtype=layers.dtype,
                head_dim=size,
                scale=scale,
            )

        chunk = TracedChunk(
            model, self.trace, self.host, layers, local, recomputed, weights=self._weights
        )
        return (chunk,)


class TracedChunk:
    """A traced model on this rank: its linears and tables hold shards, its blocks are followed."""

    splits_logits = False

    def __init__(
        self,
        model: nn.Module,
        trace: ModelTrace,
        host: Host,
        layers: LayerFactory,
        local_attention: Callable[[float | None, float | None, bool, int], LocalAttention],
        recomputed: tuple[bool, ...],
        *,
        weights: InitialWeights | None = None,
    ) -> None:
        self.model = model
        self._weights = weights
        self.trace = trace
        self._host = host
        self._layers = layers
        self._local_attention = local_attention
        self._cores: dict[tuple[Any, ...], DistributedAttention] = {}
        self._recompute = Recomputer(
            tracker=RngStatesTracker(layers.device), announce=layers.recomputing
        )
        self._recomputed = dict(zip(trace.blocks, recomputed, strict=True))
        self._points = {block: nn.Identity() for block in trace.blocks}
        self._calls = {
            block: tuple(call for call in trace.calls if call.block == block)
            for block in trace.blocks
        }
        self._outer_calls = tuple(_outer_calls(trace))
        self._passage: _Passage | None = None
        self._holders: dict[str, SwappedLinear | SwappedTable] = {}
        self._named = tuple(_shard(model, trace, layers))
        self._swap()
        host.connect(model, self._attend)

    # -- what the runtime asks ---------------------------------------------------------------

    def __call__(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The logits of this rank's tokens: x and positions [B, S'] -> [B, S', V]."""
        passage = _Passage("the model", self._outer_calls, _Masks(cu_seqlens))
        with self._passing(passage), self._random_numbers():
            return self._host.forward(self.model, x, positions)

    def token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of each token: [B, S', V], [B, S'] -> [B, S'], 0 where ignored."""
        return vocab_parallel_cross_entropy(logits, labels, channel=Channel.solo("tensor"))

    def shards(self) -> Iterator[NamedParameter]:
        """The parameters, each once, with their names in the model."""
        yield from self._named

    def init_weights(self, seed: int) -> None:
        """The weights to begin from are the model's own, or come from their source."""
        if self._weights is not None:
            self._weights.fill(self.model, self._named, seed)

    def parts(self) -> dict[str, nn.Module]:
        """The blocks, and what has parameters outside of them.

        The whole model is among them if it has some that lie in no module that is called.
        """
        parts = {block: self.model.get_submodule(block) for block in self.trace.blocks}
        inside = tuple(f"{block}." for block in parts)
        for name, module in self.model.named_modules():
            outside = name not in parts and not name.startswith(inside)
            if outside and any(True for _ in module.parameters(recurse=False)):
                called = name in self.trace.called
                parts[name if called else ""] = module if called else self.model
        return parts

    def weight_blocks(self) -> tuple[DeclaredBlock, ...]:
        """The weights gathered in a forward, in order."""
        declared = []
        for block, group in groupby(self.trace.calls, key=lambda call: call.block):
            calls = list(group)
            if block is None:
                declared += [self._declared(call.module, None, [call]) for call in calls]
            else:
                declared.append(self._declared(block, block, calls))
        return tuple(declared)

    # -- inside ------------------------------------------------------------------------------

    def _declared(self, name: str, block: str | None, calls: list[Call]) -> DeclaredBlock:
        points = _launch_points(calls) if block is not None else {}
        visits = [
            DeclaredVisit(
                name=_visit_name(call),
                layer=self._holders.get(call.module) if call.kind is not Kind.ATTENTION else None,
                at=self._points[name]
                if call.kind is Kind.ATTENTION
                else self.model.get_submodule(call.module),
                launch_point=points.get(index),
                weight_in_backward=call.kind is not Kind.TABLE,
                passes=self._passes(call),
            )
            for index, call in enumerate(calls)
        ]
        return DeclaredBlock(
            name=name,
            module=self.model.get_submodule(name),
            visits=tuple(visits),
            recomputed=block is not None and self._recomputed[block],
        )

    def _passes(self, call: Call) -> Passes:
        """What a linear is given is written and read; of a table, the rows."""
        if call.kind is Kind.ATTENTION:
            return Passes()
        rows, columns = self._holders[call.module].layouts["weight"].global_shape
        transposed = is_transposed(self.model.get_submodule(call.module))
        return Passes(between=2 * (rows if transposed else columns))

    def _swap(self) -> None:
        """Let linears, tables and blocks go through this chunk."""
        communicator = self._layers.communicator
        for kind, name in dict.fromkeys((call.kind, call.module) for call in self.trace.calls):
            module = self.model.get_submodule(name)
            called = partial(self._passed, kind, name)
            if kind is Kind.LINEAR:
                self._holders[name] = SwappedLinear(module, name, communicator, called)
            elif kind is Kind.TABLE:
                assert isinstance(module, nn.Embedding)
                self._holders[name] = SwappedTable(module, name, communicator, called)
        layouts = {item.parameter: item.layout for item in self._named}
        for holder in self._holders.values():
            holder.layouts = {
                local: layouts[parameter]
                for local, parameter in holder.module.named_parameters(recurse=False)
            }
        for block in self.trace.blocks:
            module = self.model.get_submodule(block)
            module.forward = partial(self._through_block, block, module.forward)

    def _through_block(
        self, block: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """A block's forward, recomputed in backward if that was asked for.

        A recompute finds the documents of its own forward, whatever has run since.
        """
        passage = self._under_way(block)
        passage.arrive(Kind.BLOCK, block)
        masks = passage.masks

        def run(*args: Any) -> Any:
            with self._passing(_Passage(block, self._calls[block], masks)), self._host.attending():
                return forward(*args, **kwargs)

        if self._recomputed[block] and torch.is_grad_enabled():
            return self._recompute(run, *args)
        return run(*args)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `isp.attention.call.Attend`."""
        passage = self._under_way("attention")
        passage.arrive(Kind.ATTENTION, passage.name)
        self._points[passage.name](q)
        key = scale, softcap, sinks is not None, q.shape[-1]
        if key not in self._cores:
            self._cores[key] = DistributedAttention(
                self._local_attention(*key), self._layers.attention_channel
            )
        return self._cores[key](q, k, v, mask=passage.masks(causal, window), sinks=sinks)

    def _passed(self, kind: Kind, module: str) -> None:
        self._under_way(module).arrive(kind, module)

    def _under_way(self, called: str) -> _Passage:
        if self._passage is None:
            raise RuntimeError(
                f"{called} was called outside of the forward that isp runs: a parallelised model is"
                f" called by the run's `loss` alone, and recomputed by model.checkpoint, not by"
                f" gradient checkpointing of its own"
            )
        return self._passage

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """What a model in training draws (dropout) differs from rank to rank, as its tokens do.

        All of a forward follows from one number of the host's generator, and the rank.
        """
        if not self.model.training:
            yield
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        seed, device = int(torch.randint(1 << 48, ())), self._layers.device
        before = generator_states(device)
        torch.manual_seed(seed + rank)
        try:
            yield
        finally:
            restore_generators(device, before)

    @contextmanager
    def _passing(self, passage: _Passage) -> Iterator[None]:
        before, self._passage = self._passage, passage
        try:
            yield
            passage.finish()
        finally:
            self._passage = before


class _Masks:
    """The masks of one micro-batch, each made once."""

    def __init__(self, cu_seqlens: Tensor | None) -> None:
        self._cu_seqlens = cu_seqlens
        self._made: dict[tuple[bool, int | None], AttentionMask] = {}

    def __call__(self, causal: bool, window: int | None) -> AttentionMask:
        key = causal, window
        if key not in self._made:
            self._made[key] = AttentionMask(
                causal=causal, window=window, cu_seqlens=self._cu_seqlens
            )
        return self._made[key]


class _Passage:
    """One way through a block, or through what is outside of the blocks, next to its trace."""

    def __init__(self, name: str, calls: tuple[Call, ...], masks: _Masks) -> None:
        self.name = name
        self.masks = masks
        self._calls = calls
        self._next = 0

    def arrive(self, kind: Kind, module: str) -> None:
        """A call.  Raises RuntimeError if it is not the next one of the trace."""
        if self._next < len(self._calls):
            expected = self._calls[self._next]
            if expected.kind is kind and expected.module == module:
                self._next += 1
                return
        raise self._error(f"{kind} of {module} was called")

    def finish(self) -> None:
        """The end.  Raises RuntimeError if calls of the trace are missing."""
        if self._next < len(self._calls):
            raise self._error("the end was reached")

    def _error(self, found: str) -> RuntimeError:
        rest = self._calls[self._next :]
        expected = f"{rest[0].kind} of {rest[0].module}" if rest else "nothing more"
        return RuntimeError(
            f"in {self.name}, {found} where {expected} came when the model was traced: isp drives"
            f" models whose calls come in one order"
        )


def _outer_calls(trace: ModelTrace) -> Iterator[Call]:
    """The calls outside of the blocks, and those of the blocks as wholes."""
    for block, calls in groupby(trace.calls, key=lambda call: call.block):
        if block is None:
            yield from calls
        else:
            yield Call(Kind.BLOCK, block, block)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` without memory for its parameters and buffers."""
    empty: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for parameter in model.parameters():
        value = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, empty)


def _visit_name(call: Call) -> str:
    if call.kind is not Kind.ATTENTION:
        return call.module.removeprefix(f"{call.block}.")
    window = None if call.sizes is None else call.sizes.window
    return "attn" if window is None else f"attn of {window} tokens"


def _launch_points(calls: list[Call]) -> dict[int, LaunchPoint]:
    """The places of a block that the configuration has names for."""
    attention = next(i for i, call in enumerate(calls) if call.kind is Kind.ATTENTION)
    points = {attention: LaunchPoint.ATTN}
    if attention > 0:
        points[0] = LaunchPoint.WQKV
    for point, index in zip(
        (LaunchPoint.WO, LaunchPoint.W1), range(attention + 1, len(calls)), strict=False
    ):
        points[index] = point
    return points


def _shard(model: nn.Module, trace: ModelTrace, layers: LayerFactory) -> Iterator[NamedParameter]:
    """Put this rank's shard in the place of every parameter, wherever it is used."""
    uses: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for local, parameter in module.named_parameters(recurse=False):
            uses.setdefault(id(parameter), []).append((module, local))
    for name in [name for name, _ in model.named_parameters()]:
        parameter = model.get_parameter(name)
        shape = tuple(parameter.shape)
        if trace.roles[name] is Role.SHARDED:
            layout = layers.sharded_layout(shape, dim=0)
        else:
            layout = layers.replicated_layout(shape)
        shard = nn.Parameter(
            _own_part(parameter, layout, layers), requires_grad=parameter.requires_grad
        )
        for module, local in uses.pop(id(parameter)):
            setattr(module, local, shard)
        del parameter  # nobody else holds it: whole weights go one by one
        yield NamedParameter(name, shard, layout)
    for module in model.modules():
        for local, buffer in module.named_buffers(recurse=False):
            if layers.device.type != "meta":
                setattr(module, local, buffer.to(layers.device))


def _own_part(parameter: nn.Parameter, layout: ParameterLayout, layers: LayerFactory) -> Tensor:
    if parameter.is_meta or layers.device.type == "meta":
        return torch.empty(layout.local_shape, device=layers.device, dtype=layers.dtype)
    part = layout.shard(parameter.detach())
    return part.to(device=layers.device, dtype=layers.dtype, copy=True).contiguous()
