"""`Blocks`: runs the blocks of a rank, and recomputes in backward what they do not keep."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.layers.rank_layers import RankLayers
from isp.core.recompute.config import Recomputation
from isp.core.recompute.kept_calls import KeptCalls, Needs
from isp.core.recompute.recompute import Recomputer
from isp.core.rng import RngStatesTracker
from isp.core.weights.uses import inputs_kept, recomputed_blocks
from isp.models.forwards import ModuleForward, Wrapper
from isp.models.positions import at_positions, current_positions
from isp.models.sharding.pipeline_split import Stage
from isp.models.tracing.calls import ForwardEnd, Kind
from isp.models.tracing.position import ForwardPass, Position
from isp.models.tracing.trace import ModelTrace

__all__ = ["Blocks"]


class Blocks:
    """Runs the blocks of a model on this rank, and decides what each of them keeps for backward."""

    def __init__(
        self,
        trace: ModelTrace,
        layers: RankLayers,
        recomputation: Recomputation,
        stages: Iterable[Stage],
        position: Position,
    ) -> None:
        """`stages`: the pipeline stages of this rank; blocks of other stages are left out."""
        what, tracker = recomputation, RngStatesTracker(layers.device)
        self._trace, self._calls, self._layers = trace, trace.calls_in, layers
        self._position = position
        recomputed = recomputed_blocks(len(trace.blocks), what.checkpoint)
        self.recomputed = dict(zip(trace.blocks, recomputed, strict=True))
        """By block: True if backward recomputes it, as a whole or except for its kept calls."""
        self.input_kept: dict[str, bool] = {}
        """By block of the rank's stages: True if its input is kept; False after the first block of
        a segment."""
        self._recomputers: dict[str, Recomputer] = {}
        """The recomputer of each block of the rank; the blocks of a stage share one."""
        for stage in stages:
            recomputer = Recomputer(
                tracker=tracker,
                announce=layers.recomputing,
                distribute_over=layers.tensor if what.distributed else None,
                offload_to=layers.host if what.offload else None,
                segment=what.segment,
            )
            self._recomputers |= dict.fromkeys(stage.blocks, recomputer)
            kept = inputs_kept(tuple(self.recomputed[b] for b in stage.blocks), what.segment)
            self.input_kept |= dict(zip(stage.blocks, kept, strict=True))
        self.between_linears = what.between_linears
        """True if blocks that are not recomputed as a whole recompute everything between their
        linears."""
        tiled = (Kind.TILED,) if what.mlp_tile_tokens else ()
        self._of_recomputed = (*tiled, Kind.ATTENTION) if what.keeps_attention else tiled
        """The kinds of calls whose results recomputed blocks keep."""
        self._of_others = tuple(Kind) if what.between_linears else ()
        """The kinds of calls whose results other blocks keep. With `between_linears` these are all
        kinds, so that only the code between the calls is recomputed; else such blocks recompute
        nothing."""
        self._between = Recomputer(tracker=tracker, announce=layers.recomputing)
        self._known: dict[Hashable, Needs] = {}
        """Which kept results the recompute of a block reads, by a key of `_kept_calls`; recorded in
        the first pass and used by all later ones."""

    @property
    def learns(self) -> bool:
        """True if the first forward records which kept results a recompute reads, so that later
        forwards keep only those [Note: Watched]."""
        return bool(self._of_recomputed or self.between_linears)

    def begin(self, left_out: frozenset[str]) -> None:
        """Begin a forward of the model that leaves out the blocks `left_out`."""
        # The first block that runs identifies the stage, whose blocks share a recomputer.
        first = next(block for block in self.recomputed if block not in left_out)
        self._recomputers[first].begin()

    def wrapper(self, block: str, module: nn.Module) -> Wrapper:
        """Return the wrapper `Wrap.BLOCK` of a block."""

        def wrap(inner: ModuleForward) -> ModuleForward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                return self._through(block, module, inner, args, kwargs)

            return forward

        return wrap

    def _through(
        self,
        block: str,
        module: nn.Module,
        forward: ModuleForward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a block's `forward` in a pass of its own, which backward may recompute."""
        around = self._position.current(block)
        around.arrive(Kind.BLOCK, block)
        # The recomputer may shard or offload the first positional argument, the hidden states.
        if not args:
            first, *others = kwargs.items()
            forward, args, kwargs = _by_name(forward, first[0]), first[1:], dict(others)
        form, instead = self._trace.outputs.get(block), around.instead
        if block in instead.left_out:
            # The block is on another pipeline stage: return its input, or what this stage received.
            x = args[0] if instead.received is None else instead.received
            return x if form is None else form.around(x)

        # Read these now: a recompute needs the documents and positions of its own forward, but
        # other micro-batches may run in between.
        masks, where = around.masks, current_positions()
        kept = self._kept_calls(block, module, args)
        calls, recomputed = self._calls[block], self.recomputed[block]

        # Runs once in forward, and again in each recompute.
        def run(*args: Any) -> Any:
            # If only what is between linears is recomputed, the recompute reads no weight, so the
            # prefetch plan does not contain this pass.
            planned = recomputed or not self._layers.communicator.is_recomputing
            own = ForwardPass(block, calls, masks, kept=kept, planned=planned)
            keeping = nullcontext() if kept is None else kept.passing()
            with self._position.passing(own), at_positions(where), keeping:
                return forward(*args, **kwargs)

        if recomputed and torch.is_grad_enabled():
            out = self._recomputers[block](run, *args)
        else:
            out = self._between(run, *args) if self.between_linears else run(*args)
        if block == instead.last_block:
            assert form is not None
            # End the forward here: no code after this block runs on this stage, and its output goes
            # to the next stage.
            raise ForwardEnd(form.hidden_of(out).to(self._layers.dtype))
        return out

    def _kept_calls(self, block: str, module: nn.Module, args: tuple[Any, ...]) -> KeptCalls | None:
        """Return the kept calls of one forward of a block with `args`; None: it keeps none."""
        kinds = self._of_recomputed if self.recomputed[block] else self._of_others
        if not kinds or not torch.is_grad_enabled():
            return None
        # `_known` has a key for each case in which a recompute may read other results: these depend
        # on the block's operations, and so on its mode and on which tensors have gradients.
        tensors = (*args, *module.parameters())
        trained = tuple(x.requires_grad for x in tensors if isinstance(x, Tensor))
        return KeptCalls(kinds, self._known, (block, module.training, trained))


def _by_name(forward: ModuleForward, name: str) -> ModuleForward:
    """Return a function that passes its first positional argument to `forward` as `name`."""
    return lambda x, **kwargs: forward(**{name: x}, **kwargs)
