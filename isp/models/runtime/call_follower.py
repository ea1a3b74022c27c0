"""`CallFollower`: a model's calls on a rank, each compared with its trace.

B batch, S' the tokens of this rank, D hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.layers.rank_layers import RankLayers
from isp.core.mixers.api import mix_by
from isp.core.recompute.config import Recomputation
from isp.models.moe.gather import ExpertPlace
from isp.models.runtime.activation_checkpointing import BlockRecomputer
from isp.models.runtime.forward_pass import ForwardPass
from isp.models.runtime.positions import at_positions, current_positions
from isp.models.runtime.sequence_ops import LocalOf, TracedMixers
from isp.models.runtime.tiles import Holder, TiledModule
from isp.models.sharding.pipeline_split import Stage
from isp.models.tracing.calls import Ahead, Call, ForwardEnd, Kind
from isp.models.tracing.trace import ModelTrace

__all__ = ["CallFollower"]


class CallFollower:
    """The calls of a model on this rank, in the forward pass that is under way."""

    def __init__(
        self,
        trace: ModelTrace,
        layers: RankLayers,
        recomputation: Recomputation,
        stages: tuple[Stage, ...],
        local_attention: LocalOf,
    ) -> None:
        """`stages`: those that the rank has."""
        self.trace = trace
        self.blocks = BlockRecomputer(recomputation, trace.blocks, stages, layers)
        self.tiled = trace.by_token if recomputation.mlp_tile_tokens else {}
        self._tile_tokens = recomputation.mlp_tile_tokens
        self._layers = layers
        self._mixers = TracedMixers(layers, self, local_attention, trace.attentions)
        self._calls = trace.calls_in
        numbers = ((b, i) for b, calls in self._calls.items() for i, _ in enumerate(calls))
        self.points = {number: nn.Identity() for number in numbers}
        """Called where a block mixes tokens, by block and number of the call."""
        self._forward_pass: ForwardPass | None = None

    def follow(self, model: nn.Module, holders: Mapping[str, Holder]) -> None:
        """Let the model's calls come here; those of the modules with `holders` already do."""
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

    # -- the pass under way ------------------------------------------------------------------

    def under_way(self, called: str) -> ForwardPass:
        """The pass in which `called` is called.  Raises RuntimeError if there is none."""
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
        """In this context the pass is under way; at the end all its calls must have come."""
        before, self._forward_pass = self._forward_pass, forward_pass
        try:
            with mix_by(self._mixers):
                yield
            forward_pass.finish()
        finally:
            self._forward_pass = before

    def arrive(self, kind: Kind, module: str) -> Callable[[Tensor], Tensor] | None:
        """Note a call of a linear, a table or experts; return what is called in their place."""
        forward_pass = self.under_way(module)
        forward_pass.arrive(kind, module)
        return forward_pass.instead.calls.get(module)

    def mix(self, kind: Kind, x: Tensor) -> tuple[ForwardPass, Call]:
        """Note a call that mixes the tokens x; return the pass that it lies in, and the call."""
        forward_pass = self.under_way(kind)
        call = forward_pass.arrive(kind, forward_pass.name)
        self.points[forward_pass.name, forward_pass.passed - 1](x)
        return forward_pass, call

    def place(self) -> ExpertPlace:
        """Where the experts that are called now lie in their block."""
        forward_pass = self.under_way("experts")
        recomputed = self.blocks.recomputed.get(forward_pass.name, False)
        return ExpertPlace(forward_pass.passed, recomputed)

    def ahead_of(self, call: Call) -> Ahead | None:
        """What is computed ahead with experts; None in other tiles, and where calls are kept."""
        if call.ahead is None or self.blocks.between_linears:
            return None
        within = self.tile_of(call.module) == self.tile_of(call.ahead.module)
        return call.ahead if within else None

    def tile_of(self, module: str) -> str | None:
        """The module in tiles that a module is, or lies in, if there is one."""
        return next((name for name in self.tiled if f"{module}.".startswith(f"{name}.")), None)

    def kept(
        self,
        kind: Kind,
        module: str | None,
        call: Callable[[], Tensor],
        dropped: Tensor | None = None,
    ) -> Tensor:
        """As `ForwardPass.keep`; calls that are not made again are noted, too.

        `module`: None for what mixes tokens.
        """
        forward_pass = self.under_way(module or kind)
        if forward_pass.kept is not None and forward_pass.kept.skips(kind):
            if kind.mixes and self.blocks.recomputed[forward_pass.name]:
                self.mix(kind, torch.empty(0))
            elif kind is not Kind.EXPERTS:  # whose hook follows them
                forward_pass.arrive(kind, module or forward_pass.name)
        return forward_pass.keep(kind, call, dropped)

    # -- forwards of modules -----------------------------------------------------------------

    def _keep_call(
        self, kind: Kind, module: str, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any
    ) -> Tensor:
        """A forward of a linear, a table or experts."""
        dropped = args[0] if kind is Kind.LINEAR else None
        return self.kept(kind, module, partial(forward, *args, **kwargs), dropped)

    def _through_tiles(
        self, name: str, calls: tuple[Call, ...], tiled: TiledModule, x: Tensor
    ) -> Any:
        """The forward of a module in tiles of tokens."""
        forward_pass = self.under_way(name)
        forward_pass.skip(name, calls)
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
        """A block's forward, recomputed in backward if that was asked for.

        A recompute uses the documents of its own forward, whatever has run since.
        """
        forward_pass = self.under_way(block)
        forward_pass.arrive(Kind.BLOCK, block)
        masks, where, instead = forward_pass.masks, current_positions(), forward_pass.instead

        if not args:  # its input is the first of what it is called with
            first, *others = kwargs.items()
            forward, args, kwargs = partial(_by_name, forward, first[0]), first[1:], dict(others)
        form = self.trace.outputs.get(block)
        if block in instead.left_out:
            x = args[0] if instead.received is None else instead.received
            return x if form is None else form.around(x)

        calls = self.blocks.calls(block, module, args)

        def run(*args: Any) -> Any:
            forward_pass = ForwardPass(block, self._calls[block], masks, kept=calls)
            kept = nullcontext() if calls is None else calls.passing()
            with self.passing(forward_pass), at_positions(where), kept:
                return forward(*args, **kwargs)

        out = self.blocks(block, run, args)
        if block == instead.last_block:
            assert form is not None
            raise ForwardEnd(form.hidden_of(out).to(self._layers.dtype))
        return out


def _by_name(forward: Callable[..., Any], name: str, /, x: Any, **kwargs: Any) -> Any:
    return forward(**{name: x}, **kwargs)
