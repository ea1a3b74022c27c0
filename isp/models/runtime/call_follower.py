"""`CallFollower`: the calls of a model on a rank, each compared with the trace, and its mixers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.attention.api import AttentionOptions
from isp.core.attention.backend import AttentionBackend
from isp.core.attention.kinds import AttentionKind, make_attention
from isp.core.attention.local import LocalAttention
from isp.core.attention.sequence import SequenceRanks
from isp.core.attention.ulysses import DistributedAttention
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh.config import SequenceScan
from isp.core.mixers.api import mix_by
from isp.core.mixers.convolution import convolve
from isp.core.mixers.key_choice import Indexer, choose
from isp.core.mixers.placement import Placement
from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.core.mixers.scan import cheaper_way, scan_by_heads, scan_by_state
from isp.core.recompute.config import Recomputation
from isp.models.positions import at_positions, current_positions
from isp.models.runtime.activation_checkpointing import BlockRecomputer
from isp.models.runtime.tiles import Holder, TiledModule
from isp.models.sharding.pipeline_split import Stage
from isp.models.tracing.calls import Ahead, AttentionSizes, Call, ForwardEnd, Kind
from isp.models.tracing.forward_pass import ForwardPass
from isp.models.tracing.trace import ModelTrace

__all__ = ["CallFollower", "LocalOf", "TracedMixers", "local_of"]

logger = logging.getLogger(__name__)

LocalOf = Callable[[AttentionKind], LocalAttention]


def local_of(
    layers: RankLayers, backend: AttentionBackend, given: LocalAttention | None
) -> LocalOf:
    """Return a function from a kind of attention to its implementation over whole sequences.

    That is `given` for all kinds, or, if it is None, what `backend` has for each kind.
    """

    def local(kind: AttentionKind) -> LocalAttention:
        if given is not None:
            return given
        return make_attention(
            kind,
            backend,
            device=layers.device,
            dtype=layers.dtype,
            everyone=layers.everyone,
        )

    return local


class CallFollower:
    """The calls of a model on this rank, compared with the trace in the current forward pass."""

    def __init__(
        self,
        trace: ModelTrace,
        layers: RankLayers,
        recomputation: Recomputation,
        stages: tuple[Stage, ...],
        local_attention: LocalOf,
    ) -> None:
        """Prepare to follow the calls of a model with this `trace`.

        `stages`: the pipeline stages of this rank. `local_attention`: see `local_of`.
        """
        self.trace = trace
        self.blocks = BlockRecomputer(recomputation, trace.blocks, stages, layers)
        self.tiled = trace.by_token if recomputation.mlp_tile_tokens else {}
        self._tile_tokens = recomputation.mlp_tile_tokens
        self._layers = layers
        self._mixers = TracedMixers(layers, self, local_attention, trace.attentions)
        self._calls = trace.calls_in
        numbers = ((b, i) for b, calls in self._calls.items() for i, _ in enumerate(calls))
        self.points = {number: nn.Identity() for number in numbers}
        """Modules that are called where a block mixes tokens, by block and index of the call.

        Mixing is a function call without a module, but launch points need one to hook into."""
        self._forward_pass: ForwardPass | None = None

    def follow(self, model: nn.Module, holders: Mapping[str, Holder]) -> None:
        """Replace forwards in the model so that its calls come here.

        The modules in `holders` already report theirs (`arrive`). Forwards are replaced from the
        inside out: kept calls, tiles, blocks.
        """
        own = [call for call in self.trace.calls if call.block in self.blocks.input_kept]
        if self.blocks.between_linears:
            for kind, name in dict.fromkeys((call.kind, call.module) for call in own):
                if not kind.mixes:
                    module = model.get_submodule(name)
                    module.forward = partial(self._keep_call, kind, name, module.forward)
        for name, output in self.tiled.items():
            calls = tuple(call for call in own if call.module.startswith(f"{name}."))
            if calls:
                module = model.get_submodule(name)
                within = dict.fromkeys(holders[c.module] for c in calls if c.module in holders)
                tiled = TiledModule(module, output, [*within], self._tile_tokens, self._layers)
                module.forward = partial(self._through_tiles, name, calls, tiled)
        for block in self.trace.blocks:
            module = model.get_submodule(block)
            module.forward = partial(self._through_block, block, module, module.forward)

    # -- the current pass --------------------------------------------------------------------

    def under_way(self, called: str) -> ForwardPass:
        """Return the current pass, in which `called` is called.

        Raises RuntimeError if there is none.
        """
        if self._forward_pass is None:
            raise RuntimeError(
                f"{called} was called outside of a forward that isp runs: call a parallelised"
                f" model through the run's `loss` or isp.integrations.transformers.Trainer only,"
                f" and use model.checkpoint for recomputation, not the model's own gradient"
                f" checkpointing"
            )
        return self._forward_pass

    @contextmanager
    def passing(self, forward_pass: ForwardPass) -> Iterator[None]:
        """Make `forward_pass` the current one in this context, nested in the one before.

        Raises RuntimeError at the end if calls of the trace are missing, unless the context ends
        with an exception: a recompute ends with one as soon as it has all that it is for.
        """
        before, self._forward_pass = self._forward_pass, forward_pass
        try:
            with mix_by(self._mixers):
                yield
            forward_pass.finish()
        finally:
            self._forward_pass = before

    def arrive(self, kind: Kind, module: str) -> Callable[[Tensor], Tensor] | None:
        """Count a call of a linear, table or experts; return the function to call in its place.

        Returns None if the module itself is called. Raises RuntimeError if another call is next.
        """
        forward_pass = self.under_way(module)
        forward_pass.arrive(kind, module)
        return forward_pass.instead.calls.get(module)

    def mix(self, kind: Kind, x: Tensor) -> tuple[ForwardPass, Call]:
        """Count a call that mixes the tokens x; return the current pass and the call as traced."""
        forward_pass = self.under_way(kind)
        call = forward_pass.arrive(kind, forward_pass.name)
        # Fires the hooks of the launch point, if the plan has one here.
        self.points[forward_pass.name, forward_pass.passed - 1](x)
        return forward_pass, call

    def ahead_of(self, call: Call) -> Ahead | None:
        """Return the module that is computed ahead with the experts of `call`; None: no module.

        Nothing is computed ahead if module and experts are not in the same tiled module, nor if
        everything between linears is recomputed.
        """
        if call.ahead is None or self.blocks.between_linears:
            return None
        within = self.tile_of(call.module) == self.tile_of(call.ahead.module)
        return call.ahead if within else None

    def tile_of(self, module: str) -> str | None:
        """Return the name of the tiled module that is, or contains, `module`; None: no module."""
        return next((name for name in self.tiled if f"{module}.".startswith(f"{name}.")), None)

    def kept(
        self,
        kind: Kind,
        module: str | None,
        call: Callable[[], Tensor],
        dropped: Tensor | None = None,
    ) -> Tensor:
        """Return `call()` or its kept result (`ForwardPass.keep`), and count the call either way.

        `module` is None for calls that mix tokens. `dropped`: the input of the call, if it is to be
        recomputed instead of kept.
        """
        forward_pass = self.under_way(module or kind)
        # A call that a recompute skips does not reach the code that counts it, so count it here.
        if forward_pass.kept is not None and forward_pass.kept.skips(kind):
            if kind.mixes and self.blocks.recomputed[forward_pass.name]:
                self.mix(kind, torch.empty(0))
            elif kind is not Kind.EXPERTS:  # the module's forward pre-hook counts these
                forward_pass.arrive(kind, module or forward_pass.name)
        return forward_pass.keep(kind, call, dropped)

    # -- forwards of modules -----------------------------------------------------------------

    def _keep_call(
        self, kind: Kind, module: str, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the forward of a linear, a table or experts as a kept call."""
        dropped = args[0] if kind is Kind.LINEAR else None
        return self.kept(kind, module, partial(forward, *args, **kwargs), dropped)

    def _through_tiles(
        self, name: str, calls: tuple[Call, ...], tiled: TiledModule, x: Tensor
    ) -> Any:
        """Run the forward of a module in tiles of tokens.

        Its calls count once in the pass around it; each tile is a pass of its own.
        """
        forward_pass = self.under_way(name)
        forward_pass.skip(name, calls)
        # Taken now: backward runs tiles again, when another micro-batch may be the current one.
        masks = forward_pass.masks

        def inside() -> AbstractContextManager[None]:
            return self.passing(ForwardPass(name, calls, masks))

        return tiled.unpacked(forward_pass.keep(Kind.TILED, lambda: tiled(x, inside), x))

    def _through_block(
        self,
        block: str,
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a block's forward, which backward may recompute.

        A recompute uses the documents and positions of its own forward, also if other micro-batches
        ran in between.
        """
        forward_pass = self.under_way(block)
        forward_pass.arrive(Kind.BLOCK, block)
        masks, where, instead = forward_pass.masks, current_positions(), forward_pass.instead

        if not args:  # all by keyword: the first one is the hidden states, which may be kept
            first, *others = kwargs.items()
            forward, args, kwargs = partial(_by_name, forward, first[0]), first[1:], dict(others)
        form = self.trace.outputs.get(block)
        if block in instead.left_out:  # a block of another pipeline stage
            x = args[0] if instead.received is None else instead.received
            return x if form is None else form.around(x)

        calls = self.blocks.calls(block, module, args)

        def run(*args: Any) -> Any:  # once in forward, and again in each recompute
            forward_pass = ForwardPass(block, self._calls[block], masks, kept=calls)
            kept = nullcontext() if calls is None else calls.passing()
            with self.passing(forward_pass), at_positions(where), kept:
                return forward(*args, **kwargs)

        out = self.blocks(block, run, args)
        if block == instead.last_block:
            assert form is not None
            # Nothing after this block runs on this stage: its output goes to the next one.
            raise ForwardEnd(form.hidden_of(out).to(self._layers.dtype))
        return out


class TracedMixers:
    """The mixers of a traced model on a rank, which implement the `Mixers` protocol.

    `isp.attention` and the functions of `isp.core.mixers` come here while the model runs. A
    recompute may reuse their results. `__init__` makes attention of every kind in the model, also
    of other pipeline stages: all ranks choose backends together, and if they did so in a forward,
    the stages of a pipeline would wait for each other.
    """

    def __init__(
        self,
        layers: RankLayers,
        follower: CallFollower,
        local_attention: LocalOf,
        attentions: Iterable[AttentionSizes],
    ) -> None:
        """`attentions`: the sizes of all calls of attention in the model."""
        self._layers = layers
        self._sequence = layers.sequence or SequenceRanks.by_heads(layers.token_ranks)
        self._follower = follower
        self._local_attention = local_attention
        self._cores: dict[AttentionKind, DistributedAttention] = {}
        for sizes in attentions:
            self._core(sizes.attention_kind)
        self._reported = False

    def attend(self, *given: Any) -> Tensor:
        """Compute attention, as `Mixers.attend`."""
        return self._follower.kept(Kind.ATTENTION, None, partial(self._attend, *given))

    def convolve(self, *given: Any) -> Tensor:
        """Compute a causal convolution, as `Mixers.convolve`."""
        return self._follower.kept(Kind.CONVOLUTION, None, partial(self._convolve, *given))

    def scan(self, *given: Any) -> Tensor:
        """Compute a scan, as `Mixers.scan`."""
        return self._follower.kept(Kind.SCAN, None, partial(self._scan, *given))

    def choose(self, indexer: Indexer) -> Tensor:
        """Choose keys for attention, as `Mixers.choose`.

        It is kept whenever attention is, and no call of the trace is counted for it.
        """
        forward_pass = self._follower.under_way("an indexer")
        return forward_pass.keep(Kind.ATTENTION, partial(self._choose, indexer))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Compute attention over the sequence of all ranks."""
        causal, window, scale, softcap, _, chunk, chosen, _ = options
        forward_pass, call = self._follower.mix(Kind.ATTENTION, q)
        extras: dict[str, Any] = {"sinks": options.of_heads(q.shape[2]), "chosen": chosen}
        extras = {name: extra for name, extra in extras.items() if extra is not None}
        assert call.sizes is not None
        # Heads and features are as traced; scale and softcap are those of this very call.
        core = self._core(call.sizes.attention_kind._replace(scale=scale, softcap=softcap))
        parts = 1 if self._layers.splits_features else self._layers.tensor.size
        mask = forward_pass.masks(causal, window, chunk, (len(q), q.shape[1] * parts))
        out = core(q, k, v, mask=mask, **extras)
        # Backward needs the output as it was, so a model that writes into it gets a copy.
        return out.clone() if call.written else out.contiguous()

    def _core(self, kind: AttentionKind) -> DistributedAttention:
        """Return the distributed attention of a kind, making it if it is new."""
        if kind not in self._cores:
            local = self._local_attention(kind)
            self._cores[kind] = self._layers.attention(
                local, scale=kind.scale, softcap=kind.softcap
            )
        return self._cores[kind]

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        """Compute a convolution; rows of the batch are joined, since `placement` separates them."""
        placement = self._placement(Kind.CONVOLUTION, x)
        return convolve(x.flatten(0, 1), weight, bias, placement, dilation).view(x.shape)

    def _scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Compute a scan, with its tokens exchanged for heads or its states passed on."""
        x, flat = inputs.of_heads[0], inputs.flat()
        placement = self._placement(Kind.SCAN, x)
        way = self._sequence.scan
        if way is SequenceScan.AUTO:
            way = cheaper_way(recurrence, flat, placement)
            if not self._reported and placement.channel.size > 1:
                self._reported = True
                logger.info("scans: by %s (auto: fewest bytes received per rank)", way)
        scan = scan_by_heads if way is SequenceScan.HEADS else scan_by_state
        return scan(self._layers.recurrence(recurrence), flat, placement).view(x.shape)

    def _choose(self, indexer: Indexer) -> Tensor:
        """Return the numbers of the chosen keys.

        Raises ValueError in modes that split features.
        """
        keys, forward_pass = indexer.keys, self._follower.under_way("an indexer")
        layers = self._layers
        if layers.splits_features:
            raise ValueError(f"{forward_pass.name} uses an indexer to choose keys for attention")
        placement = forward_pass.masks.placement(self._sequence, layers.tensor, keys)
        numbers = choose(indexer, placement, on_cpu=layers.on_cpu, tiles=layers.tiles)
        return numbers.view(*keys.shape[:2], indexer.num_choices, -1)

    def _placement(self, kind: Kind, x: Tensor) -> Placement:
        """Count a call of this kind; return the placement of the micro-batch's tokens on ranks."""
        forward_pass, _ = self._follower.mix(kind, x)
        return forward_pass.masks.placement(self._sequence, self._layers.token_ranks, x)


def _by_name(forward: Callable[..., Any], name: str, /, x: Any, **kwargs: Any) -> Any:
    """Call `forward` with x as the argument called `name`."""
    return forward(**{name: x}, **kwargs)
