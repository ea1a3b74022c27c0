"""`TracedChunk`: a traced model on one rank, its calls followed through every pass.

B batch, S sequence, D hidden size, H heads, K KV heads, d and e sizes of heads, V vocabulary;
S' the tokens of this rank
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isp.attention import DistributedAttention, LocalAttention
from isp.attention.call import AttentionOptions, attend_by
from isp.layers.factory import LayerFactory
from isp.layers.head import HeadLoss
from isp.layers.linear import Moves, Role, moves_for, multiply
from isp.layers.loss import vocab_parallel_cross_entropy
from isp.mixers.call import mix_by
from isp.rng import generator_states, restore_generators
from isp.settings.recomputation import Recomputation
from isp.traced.blocks import BlockRecomputer, KeptMixers
from isp.traced.calls import Call, ForwardEnd, Kind
from isp.traced.experts import ExpertPlace, SwappedExperts
from isp.traced.forward_pass import ForwardPass, Masks, outer_calls
from isp.traced.fused import FusedLinears, groups_of, rows_of
from isp.traced.hosts import Host, check_row
from isp.traced.mixers import TracedMixers
from isp.traced.positions import at_positions, current_positions
from isp.traced.random_numbers import random_numbers
from isp.traced.region import Entrance
from isp.traced.rotary import by_document, token_lengths
from isp.traced.stages import Stage
from isp.traced.swap import InitialWeights, SwappedLinear, SwappedTable, shard_parameters
from isp.traced.tensor_plan import TensorPlan, in_features
from isp.traced.tiles import TiledModule
from isp.traced.trace import ModelTrace, check_not_compiled
from isp.traced.uses import parts_of, uses_of
from isp.weights.declare import DeclaredBlock
from isp.weights.parameter import ShardedParameter

__all__ = ["TracedChunk"]


class TracedChunk:
    """A traced model on this rank: its linears and tables hold shards, its blocks are followed."""

    def __init__(
        self,
        model: nn.Module,
        trace: ModelTrace,
        host: Host,
        layers: LayerFactory,
        local_attention: Callable[[float | None, float | None, bool, int, int], LocalAttention],
        recomputation: Recomputation,
        *,
        weights: InitialWeights | None = None,
        plan: TensorPlan | None = None,
        loss_chunk_tokens: int = 0,
        stages: tuple[Stage, ...],
    ) -> None:
        """`plan`: of the modes that split features; None: of isp. `stages`: those that the rank
        has; nothing of others is there.

        If the trace has a head, losses are computed `loss_chunk_tokens` tokens at a time, 0: all.
        """
        self.left_out = frozenset[str]()
        """Blocks that hand on what they are given, or what the stage has received."""
        self._received: Tensor | None = None
        self._last_block: str | None = None
        """The block behind which the stage's forward ends."""
        self.model = model
        self.splits_logits = layers.splits_logits
        self.entrances: dict[str, Entrance] = {}
        """Those of the plan's regions, by column."""
        self._weights = weights
        self.trace = trace
        self._host = host
        self._layers = layers
        self._plan = plan
        self._local_attention = local_attention
        self._cores: dict[tuple[Any, ...], DistributedAttention] = {}
        self._tile_tokens = recomputation.mlp_tile_tokens
        self._tiled = trace.by_token if self._tile_tokens else ()
        self._blocks = BlockRecomputer(recomputation, trace.blocks, stages, layers)
        self._calls = {
            block: tuple(call for call in trace.calls if call.block == block)
            for block in trace.blocks
        }
        numbers = ((b, i) for b, calls in self._calls.items() for i, _ in enumerate(calls))
        self._points = {number: nn.Identity() for number in numbers}
        self._mixers = KeptMixers(
            TracedMixers(layers, self._mixing, self._under_way), self._kept, self._under_way
        )
        self._outer_calls, self._outside = tuple(outer_calls(trace)), frozenset(trace.called_at)
        self._length_limits = host.length_limits(model)
        self._most_tokens = host.most_tokens(model)
        self._forward_pass: ForwardPass | None = None
        self._holders: dict[str, SwappedLinear | SwappedTable] = {}
        self._experts: dict[str, SwappedExperts] = {}
        self._fused: dict[str, FusedLinears] = {}
        """By each of their linears."""
        own = frozenset[str]().union(*(stage.parameters for stage in stages))
        self._groups = groups_of(model, trace) if plan is None else ()
        rows = rows_of(model, self._groups)
        self._named = tuple(shard_parameters(model, trace, layers, plan, own, rows))
        host.connect(model)
        self._swap()
        self._loss: HeadLoss | None = None
        """Those of the head, if there is one."""
        if trace.head is not None:
            head, behind = self._holders[trace.head], self._behind_head
            assert isinstance(head, SwappedLinear)
            self._loss = layers.head_loss(
                head, trace.vocab_size, chunk_tokens=loss_chunk_tokens, behind=behind
            )

    @property
    def vocab_size(self) -> int:
        """Logits of a token, over all ranks."""
        return self.trace.vocab_size

    @property
    def learns(self) -> bool:
        """Whether a first forward tells what later ones need not keep."""
        return self._blocks.learns

    # -- what the runtime asks ---------------------------------------------------------------

    def __call__(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """This rank's logits: x and positions [B, S'] -> [B, S', V'], or what the head is given.

        All positions, [B, S], where the table leaves a rank its tokens.
        """
        forward_pass = ForwardPass(
            "the model", self._outer_calls, self._masks(positions, cu_seqlens)
        )
        self._blocks.begin(next(b for b in self._blocks.recomputed if b not in self.left_out))
        ends = {} if self.trace.head is None else {self.trace.head: _end}
        with (
            self._passing(forward_pass),
            random_numbers(self.model.training, self._layers),
            self._instead(ends),
        ):
            try:
                return self._host.forward(self.model, x, positions)
            except ForwardEnd as end:
                forward_pass.end()
                return end.hidden

    def through_stage(
        self, stage: Stage, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None
    ) -> Tensor:
        """As a call, through a stage alone: x [B, S'] on the first one, [B, S', D] on others."""
        before = self.left_out, self._received, self._last_block
        if not stage.is_first:
            self._received, x = x, torch.zeros_like(positions)
        if not stage.is_last:
            self._last_block = stage.blocks[-1]
        self.left_out = frozenset(self.trace.blocks) - stage.parts
        try:
            with self._instead(self._nothing_of(self._outside - stage.parts)):
                return self(x, positions, cu_seqlens)
        finally:
            self.left_out, self._received, self._last_block = before

    def logits(self, output: Tensor) -> Tensor:
        """The logits [B, S', V'] of what a forward gave."""
        if self._loss is None:
            return output
        head = self._loss.head
        return self._behind_head(multiply(output, head.weight, head.bias, head))

    def logits_of(
        self,
        x: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor | None,
        pick: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The logits [B, n, V'] of the tokens that `pick`, [B, .., F] -> [B, n, F], leaves.

        x, positions, cu_seqlens: those of a forward. The others' are not computed, if the model has
        a head. Where a region before the head joins the tokens of all ranks, `pick` is given these.
        """
        forward_pass = ForwardPass(
            "the model", self._outer_calls, self._masks(positions, cu_seqlens)
        )
        with self._passing(forward_pass), random_numbers(self.model.training, self._layers):
            if self._loss is None:
                return pick(self._host.forward(self.model, x, positions))
            head = self._loss.head
            picked = {head.name: lambda h: multiply(pick(h), head.weight, head.bias, head)}
            with self._instead(picked):
                return self._host.forward(self.model, x, positions)

    def loss(self, output: Tensor, labels: Tensor, expected: Tensor | None = None) -> Tensor:
        """The sum of the tokens' cross-entropies: what a forward gave, [B, S'] -> []."""
        if self._loss is None:
            return self._whole_losses(output, labels).sum()
        return self._loss.total(output, labels, expected)

    def losses(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token, as the labels; of what `loss` gives the sum of. No gradient."""
        if self._loss is None:
            return self._whole_losses(output, labels)
        return self._loss.each(output, labels)

    def shards(self) -> Iterator[ShardedParameter]:
        """The parameters, each once, with their names in the model."""
        yield from self._named

    def init_weights(self, seed: int | None, names: Collection[str] | None = None) -> None:
        """The initial weights are the model's own, or come from their source.

        `names`: of the parameters that are filled; None: all.
        """
        if self._weights is not None:
            shards = [item for item in self._named if names is None or item.name in names]
            self._weights.fill(self.model, () if seed is None else shards, seed or 0)

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

    def weight_blocks(self, stage: Stage | None = None) -> tuple[DeclaredBlock, ...]:
        """The weights gathered in a forward, in order; of one stage, or of the whole model."""
        experts = {} if self._plan is not None else self._experts
        holders = {**self._holders, **experts, **self._fused}
        unused = (name.rpartition(".")[0] for name in self.trace.unused)
        forward_only = {*unused, self.trace.head or ""}
        return tuple(
            DeclaredBlock(
                name=name,
                module=self.model.get_submodule(name),
                uses=tuple(
                    uses_of(self.model, calls, holders, self._points, forward_only, self._tiled)
                ),
                recomputed=self._blocks.recomputed.get(name, False),
                input_kept=self._blocks.input_kept.get(name, True),
            )
            for name, calls in parts_of(self.trace)
            if stage is None or name in stage.parts
        )

    # -- inside ------------------------------------------------------------------------------

    def _swap(self) -> None:
        """Let linears, tables and blocks go through this chunk."""
        communicator, plan = self._layers.communicator, self._plan
        mode, tensor = self._layers.mode, self._layers.tensor
        for region in () if plan is None or tensor.size == 1 else plan.regions:
            module = self.model.get_submodule(region.module)
            width = in_features(self.model.get_submodule(region.columns[0]))
            entrance = Entrance(region.module, module, width, mode, tensor, region.attends)
            self.entrances |= dict.fromkeys(region.columns, entrance)
        own = {None, *self._blocks.input_kept}
        here = (call for call in self.trace.calls if call.block in own)
        self._fused = self._fuse()
        for kind, name in dict.fromkeys((call.kind, call.module) for call in here):
            module = self.model.get_submodule(name)
            called = partial(self._passed, kind, name)
            if name in self._fused:
                continue
            if kind is Kind.LINEAR:
                self._holders[name] = SwappedLinear(
                    module,
                    name,
                    communicator,
                    called,
                    Moves() if plan is None else plan.moves(name, mode, tensor),
                    entrance=self.entrances.get(name),
                    bias_after_move=plan is not None and plan.is_row(name),
                )
            elif kind is Kind.TABLE:
                assert isinstance(module, nn.Embedding)
                moves = Moves() if plan is None else moves_for(mode, Role.ROW, tensor)
                self._holders[name] = SwappedTable(module, name, communicator, called, moves)
            elif kind is Kind.EXPERTS:
                self._experts[name] = SwappedExperts(
                    module, name, communicator, called, self._place
                )
        layouts = {item.parameter: item.layout for item in self._named}
        for holder in self._holders.values():
            holder.layouts = {
                local: layouts[parameter]
                for local, parameter in holder.module.named_parameters(recurse=False)
                if parameter in layouts
            }
        for experts in self._experts.values():
            for weight in experts.weights:
                weight.layouts = {weight.weight_name: layouts[weight.weight]}
        if self._blocks.between_linears:
            own_calls = (c for c in self.trace.calls if c.block in self._blocks.input_kept)
            for kind, name in dict.fromkeys((c.kind, c.module) for c in own_calls):
                if not kind.mixes:
                    module = self.model.get_submodule(name)
                    module.forward = partial(self._keep_call, kind, name, module.forward)
        in_blocks = tuple(f"{block}." for block in self._blocks.input_kept)
        for name in (name for name in self._tiled if name.startswith(in_blocks)):
            calls = tuple(c for c in self.trace.calls if c.module.startswith(f"{name}."))
            holders = {**self._holders, **self._experts, **self._fused}
            within = [holders[call.module] for call in calls if call.module in holders]
            within = [*dict.fromkeys(within)]
            module = self.model.get_submodule(name)
            tiled = TiledModule(module, within, self._tile_tokens, self._layers)
            module.forward = partial(self._through_tiles, name, calls, tiled)
        for block in self.trace.blocks:
            module = self.model.get_submodule(block)
            module.forward = partial(self._through_block, block, module.forward)

        for part, limit in self._length_limits.items():
            part.forward = by_document(limit, self._under_way, part.forward)

    def _fuse(self) -> dict[str, FusedLinears]:
        """What is made of each linear of a group."""
        found: dict[str, FusedLinears] = {}
        named = {item.name: item for item in self._named}
        for group in self._groups:
            weight, bias = (named.get(f"{group[0]}.{local}") for local in ("weight", "bias"))
            if weight is None or weight.whole is None:  # of another stage
                continue
            linears = {name: self.model.get_submodule(name) for name in group}
            called = partial(self._passed, Kind.LINEAR)
            whole = weight.whole, None if bias is None else bias.whole
            fused = FusedLinears(linears, self._layers.communicator, called, *whole)
            found |= dict.fromkeys(group, fused)
        return found

    def _masks(self, positions: Tensor, cu_seqlens: Tensor | None) -> Masks:
        """Those of a micro-batch with these positions, [B, S'] or [B, S]."""
        check_not_compiled(self.model)
        parts = self._layers.tensor.size if self._layers.mode.facts.slices_batch else 1
        check_row(self._most_tokens, positions.shape[1] * parts)
        if not self._length_limits or self._layers.cache is not None:
            return Masks(cu_seqlens)
        return Masks(cu_seqlens, token_lengths(positions, cu_seqlens, self._layers))

    def _through_block(
        self, block: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """A block's forward, recomputed in backward if that was asked for.

        A recompute finds the documents of its own forward, whatever has run since.
        """
        forward_pass = self._under_way(block)
        forward_pass.arrive(Kind.BLOCK, block)
        masks, where = forward_pass.masks, current_positions()

        if not args:  # its input is the first of what it is called with
            first, *others = kwargs.items()
            forward, args, kwargs = partial(_by_name, forward, first[0]), first[1:], dict(others)
        form = self.trace.outputs.get(block)
        if block in self.left_out:
            x = args[0] if self._received is None else self._received
            return x if form is None else form.around(x)

        calls = self._blocks.calls(block, self.model.get_submodule(block), args)

        def run(*args: Any) -> Any:
            forward_pass = ForwardPass(block, self._calls[block], masks, calls)
            with self._passing(forward_pass), at_positions(where), calls.passing():
                return forward(*args, **kwargs)

        out = self._blocks(block, run, args)
        if block == self._last_block:
            assert form is not None
            raise ForwardEnd(form.hidden_of(out).to(self._layers.dtype))
        return out

    # -- behind the head ---------------------------------------------------------------------

    def _whole_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits,
            labels,
            first=self._layers.first_logit(self.trace.vocab_size),
            channel=self._layers.loss_channel,
        )

    def _behind_head(self, y: Tensor) -> Tensor:
        """The logits that the model makes of what its head gives, [B, n, V]."""
        ids = torch.zeros(y.shape[:2], dtype=torch.int64, device=y.device)
        positions = torch.arange(y.shape[1], device=y.device).expand(y.shape[:2])
        assert self.trace.head is not None
        before = generator_states(self._layers.device) if self.model.training else None
        left_out, self.left_out = self.left_out, frozenset(self._blocks.recomputed)
        try:
            with (
                self._passing(ForwardPass("the model", self._outer_calls, Masks(None))),
                self._instead({**self._nothing_of(self._outside), self.trace.head: lambda _: y}),
            ):
                return self._host.forward(self.model, ids, positions)
        finally:
            self.left_out = left_out
            if before is not None:  # what is left out may have drawn numbers
                restore_generators(self._layers.device, before)

    @contextmanager
    def _instead(self, others: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
        """Linears and tables of which others are called."""
        before = {name: self._holders[name].instead for name in others}
        for name, other in others.items():
            self._holders[name].instead = other
        try:
            yield
        finally:
            for name in others:
                self._holders[name].instead = before[name]

    def _nothing_of(self, names: Iterable[str]) -> dict[str, Callable[[Tensor], Tensor]]:
        """Zeros in place of what these linears and tables give."""
        dtype = self._layers.dtype
        return {name: partial(_nothing, self._holders[name].width, dtype) for name in names}

    # -- calls -------------------------------------------------------------------------------

    def _attend(self, *given: Any) -> Tensor:
        """As `isp.attention.call.Attend`."""
        return self._kept(Kind.ATTENTION, None, partial(self._attend_now, *given))

    def _attend_now(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        causal, window, scale, softcap, _, chunk, chosen, _ = options
        forward_pass, call = self._mixing(Kind.ATTENTION, q)
        sinks = options.of_heads(q.shape[2])
        explicit = sinks is not None or chosen is not None
        key = scale, softcap, explicit, q.shape[-1], q.shape[2] // k.shape[2]
        if key not in self._cores:
            local = self._local_attention(*key)
            self._cores[key] = self._layers.attention(local, scale=scale, softcap=softcap)
        parts = 1 if self._layers.splits_features else self._layers.tensor.size
        mask = forward_pass.masks(causal, window, chunk, (len(q), q.shape[1] * parts))
        out = self._cores[key](q, k, v, mask=mask, sinks=sinks, chosen=chosen)
        return out.clone() if call.written else out.contiguous()

    def _mixing(self, kind: Kind, x: Tensor) -> tuple[ForwardPass, Call]:
        """Follow a call that mixes tokens: the pass that it lies in, and the call."""
        forward_pass = self._under_way(kind)
        call = forward_pass.arrive(kind, forward_pass.name)
        self._points[forward_pass.name, forward_pass.passed - 1](x)
        return forward_pass, call

    def _kept(
        self,
        kind: Kind,
        module: str | None,
        call: Callable[[], Tensor],
        dropped: Tensor | None = None,
    ) -> Tensor:
        """As `BlockCalls`, following calls that are not made again; of what mixes, no `module`."""
        forward_pass = self._under_way(module or kind)
        if forward_pass.kept.skips(kind):
            if kind.mixes and self._blocks.recomputed[forward_pass.name]:
                self._mixing(kind, torch.empty(0))
            elif kind is not Kind.EXPERTS:  # whose hook follows them
                forward_pass.arrive(kind, module or forward_pass.name)
        return forward_pass.kept(kind, call, dropped)

    def _keep_call(
        self, kind: Kind, module: str, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any
    ) -> Tensor:
        """A forward of a linear, a table or experts."""
        dropped = args[0] if kind is Kind.LINEAR else None
        return self._kept(kind, module, partial(forward, *args, **kwargs), dropped)

    def _through_tiles(
        self, name: str, calls: tuple[Call, ...], tiled: TiledModule, x: Tensor
    ) -> Tensor:
        """The forward of a module in tiles of tokens."""
        forward_pass = self._under_way(name)
        forward_pass.skip(name, calls)
        masks = forward_pass.masks

        def inside() -> AbstractContextManager[None]:
            return self._passing(ForwardPass(name, calls, masks))

        return forward_pass.kept(Kind.TILED, lambda: tiled(x, inside), x)

    def _passed(self, kind: Kind, module: str) -> None:
        self._under_way(module).arrive(kind, module)

    def _place(self) -> ExpertPlace:
        forward_pass = self._under_way("experts")
        return ExpertPlace(
            forward_pass.passed, self._blocks.recomputed.get(forward_pass.name, False)
        )

    def _under_way(self, called: str) -> ForwardPass:
        if self._forward_pass is None:
            raise RuntimeError(
                f"{called} was called outside of the forward that isp runs: a parallelised model is"
                f" called by the run's `loss` alone, and recomputed by model.checkpoint, not by"
                f" gradient checkpointing of its own"
            )
        return self._forward_pass

    @contextmanager
    def _passing(self, forward_pass: ForwardPass) -> Iterator[None]:
        before, self._forward_pass = self._forward_pass, forward_pass
        try:
            with attend_by(self._attend), mix_by(self._mixers):
                yield
            forward_pass.finish()
        finally:
            self._forward_pass = before


def _by_name(forward: Callable[..., Any], name: str, /, x: Any, **kwargs: Any) -> Any:
    return forward(**{name: x}, **kwargs)


def _end(x: Tensor) -> Tensor:
    raise ForwardEnd(x)


def _nothing(width: int, dtype: torch.dtype, x: Tensor) -> Tensor:
    """Zeros, of the shape that a linear or table of this width would give."""
    if x.is_floating_point():
        return x.new_zeros(*x.shape[:-1], width)
    return torch.zeros(*x.shape, width, dtype=dtype, device=x.device)
