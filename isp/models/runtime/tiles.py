"""`TiledModule`: run a module that computes each token independently in tiles of tokens.

B batch, S' tokens of this rank, T tokens of a tile, D and E features

    x [B, S', D] -> y [B, S', E]; activations inside exist for one tile [B, T, D] at a time

The weights are whole during all tiles: isp gathers them once in forward and once in backward. Their
gradients are summed over the tiles and delivered once. Only x is kept; backward computes each tile
again. See [Note: Kept input] in docs/design/notes/models.md. If features are split, each tile of
the rank's tokens is gathered from all tensor ranks, which have the same number of tokens and
therefore of tiles. Ranks that share experts exchange tokens in each tile, so all must have the same
number of tiles: a rank with fewer tokens cuts them into smaller ones.

Source: Bekman et al. 2025 (Arctic Long Sequence Training), TiledMLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.autograd import Function, once_differentiable
from isp.core.comm import Purpose, Tag
from isp.core.layers.compiled import widened
from isp.core.layers.linear import NeedsGrad, needs_grad
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh.partition import chunk_range
from isp.core.mesh.phase import Phase
from isp.core.rng import RngStatesTracker
from isp.core.torch_private import tree_leaves
from isp.core.weights.wp_communicator import FullWeights, WPCommunicator
from isp.models.forwards import ModuleForward
from isp.models.moe.whole_weights import ShardedExperts
from isp.models.runtime.fused_linears import FusedLinears
from isp.models.runtime.sharded_modules import ShardedEmbedding, ShardedLinear
from isp.models.tracing.calls import Call, Kind, TokenOutput
from isp.models.tracing.position import ForwardPass, Position

__all__ = ["Holder", "TiledModule"]

Holder = ShardedLinear | ShardedEmbedding | ShardedExperts | FusedLinears
"""A module of a traced model that reads sharded weights."""


class TiledModule:
    """Computes the forward of a module in tiles of tokens."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        output: TokenOutput,
        calls: tuple[Call, ...],
        holders: Sequence[Holder],
        tokens: int,
        layers: RankLayers,
        position: Position,
    ) -> None:
        """`calls`: the traced calls in the module; `holders`: the holders they read, in that order.

        `tokens`: tokens of a tile over all rows of the batch; each tile has at least one token of
        each row. `output`: the tensors that the module returns, and how to pack them as one [B, S',
        E].
        """
        self._name, self._calls, self._position = name, calls, position
        self._forward: ModuleForward
        """The module's forward for one tile; `wrap` sets it."""
        self._stay = [c.module for c in calls if c.kind is Kind.EXPERTS and layers.experts_stay]
        """The experts in the module that stay on one rank each, so that no weight is gathered."""
        self._output = output
        self._dtypes: tuple[torch.dtype, ...] = ()
        """The dtypes of the tensors that the module returns; the packed one has the widest."""
        self.tokens, self.layers = tokens, layers
        of_batches = layers.expert.size > 1 and layers.weight.size > layers.tensor.size
        self._shares_experts = of_batches and any(isinstance(h, ShardedExperts) for h in holders)
        """True if the module shares experts with ranks that may have another number of tokens."""
        # If weights are not gathered, tiles read the parameters, and autograd returns gradients.
        self._holders = holders if layers.communicator.gathers_weights else ()
        self.weights = [weight for holder in self._holders for weight in holder.weights]
        # `_InTiles.backward` returns a gradient for each of these. The shards of fused linears are
        # added, because the module has only views of them.
        own = dict.fromkeys(module.parameters())
        fused = (holder for holder in holders if isinstance(holder, FusedLinears))
        own |= dict.fromkeys(p for f in fused for p in (f.weight, f.bias) if p is not None)
        self.parameters = tuple(own)
        self.tracker = RngStatesTracker(layers.device)

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        """Return the module's forward in tiles of tokens; the wrapper `Wrap.TILES`."""
        self._forward = inner
        return self._through

    def _through(self, x: Tensor) -> Any:
        """Run the forward in tiles: x [B, S', D] -> the module's output.

        In the pass around the module its calls count once; each tile is a pass of its own.
        """
        around = self._position.current(self._name)
        around.skip(self._name, self._calls)
        for experts in self._stay:
            self._position.pass_experts(experts)
        # Read this now: backward runs tiles again, when another micro-batch may be the current one.
        masks = around.masks

        def inside() -> AbstractContextManager[None]:
            return self._position.passing(ForwardPass(self._name, self._calls, masks))

        y = around.keep(Kind.TILED, lambda: self(x, inside), x)
        return self._output.unpacked(y, self._dtypes)

    def __call__(self, x: Tensor, inside: Callable[[], AbstractContextManager[None]]) -> Tensor:
        """Compute all tiles: x [B, S', D] -> [B, S', E], packed; each runs in `inside()`."""
        if not torch.is_grad_enabled():
            with self.unsharded(Phase.FORWARD):
                return self.compute_all(x, self.tiles(x), inside)
        # [Note: Kept input] If x needs no gradient, `_Keep` also takes the parameters: otherwise
        # its output would need no gradient, and the node that saves x would not exist.
        x = _Keep.apply(x, *(() if x.requires_grad else self.parameters))
        out: Tensor = _InTiles.apply(x, *self.parameters, self, inside, x.grad_fn)
        return out

    def tiles(self, x: Tensor) -> list[slice]:
        """Return the tiles of x as slices of S'.

        Ranks that share experts agree on the largest number of tiles among them.
        """
        length = max(1, self.tokens // x.shape[0])
        tiles = [slice(i, i + length) for i in range(0, x.shape[1], length)]
        if self._shares_experts:
            count = torch.tensor([len(tiles)], device=x.device)
            tag = Tag(Purpose.EXPERTS, tensor="tiles")
            # All ranks of the expert group take part in each tile's exchange, or they would hang.
            most = self.layers.expert.all_reduce_(count, op="max", tag=tag).wait()
            if not most.is_meta and (parts := int(most)) > len(tiles):
                ranges = (chunk_range(x.shape[1], parts, i) for i in range(parts))
                tiles = [slice(part.start, part.stop) for part in ranges]
        return tiles

    def compute_tile(self, x: Tensor, inside: Callable[[], AbstractContextManager[None]]) -> Tensor:
        """Compute one tile: [B, T, D] -> [B, T, E], packed."""
        with inside():
            given = self._forward(x)
        self._dtypes = tuple(leaf.dtype for leaf in tree_leaves(given))
        return self._output.packed(given, len(x))

    def compute_all(
        self, x: Tensor, tiles: list[slice], inside: Callable[[], AbstractContextManager[None]]
    ) -> Tensor:
        """Compute all tiles without an autograd graph: [B, S', D] -> [B, S', E]."""
        out: Tensor | None = None
        for tile in self.layers.each_tile(tiles):
            y = self.compute_tile(x[:, tile].contiguous(), inside)
            if out is None:
                out = y.new_empty(*x.shape[:2], y.shape[-1])
            out[:, tile] = y
        assert out is not None
        return out

    @contextmanager
    def unsharded(self, phase: Phase) -> Iterator[_Sums]:
        """Gather the weights of all holders for this context; their gradients are summed.

        The yielded object becomes the holders' communicator: it returns the whole weights and adds
        up the gradients.
        """
        # Backward gathers in the opposite order, because the prefetch plan expects it.
        turn = slice(None, None, 1 if phase is Phase.FORWARD else -1)
        communicator = self.layers.communicator
        with ExitStack() as stack:
            full: dict[int, FullWeights] = {}
            for weight in self.weights[turn]:
                use = communicator.unshard(weight, phase, weight.weight, weight.bias)
                full[id(weight)] = stack.enter_context(use)
            sums = _Sums(communicator, full)
            for holder in self._holders:
                stack.callback(setattr, holder, "communicator", holder.communicator)
                holder.communicator = sums
            yield sums


class _Sums(WPCommunicator):
    """The communicator of the holders during all tiles of one forward or backward.

    It returns weights that are already whole, and sums their gradients over the tiles.
    """

    gathers_weights = True

    def __init__(self, communicator: WPCommunicator, full: dict[int, FullWeights]) -> None:
        self._communicator, self._full = communicator, full
        self._sums: dict[tuple[int, bool], _SummedGradient] = {}

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def unshard(
        self, module: Any, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        return nullcontext(self._full[id(module)])

    def grad_hook(
        self, grad: Tensor, *, module: Any, is_bias: bool = False, returned: bool = False
    ) -> None:
        key = id(module), is_bias
        self._sums.setdefault(key, _SummedGradient()).add(grad)

    def deliver(
        self, weight: Any, dtype: torch.dtype, *, is_bias: bool, needs: NeedsGrad
    ) -> Tensor | None:
        """Pass the sum of a weight's gradients on to the real communicator.

        Returns the gradient of the shard if autograd has to deliver it, else None. `needs`: whether
        autograd needs the gradient.
        """
        found = self._sums.pop((id(weight), is_bias), None)
        gradient = None if found is None else found.sum()
        if gradient is None or not needs:
            return None
        gradient = gradient.to(self._communicator.gradient_dtype(dtype))
        returned = needs is NeedsGrad.VALUE
        return self._communicator.grad_hook(
            gradient, module=weight, is_bias=is_bias, returned=returned
        )


class _SummedGradient:
    """Adds up a gradient's parts in float32 or wider, so that the sum is rounded only once."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._dtype = torch.float32

    def add(self, part: Tensor) -> None:
        """Add what one tile contributes to the gradient."""
        if self._total is None:
            self._total, self._dtype = widened(part), part.dtype
        else:
            self._total += part

    def sum(self) -> Tensor | None:
        """Return the sum in the dtype of its parts; None if there was no part."""
        return None if self._total is None else self._total.to(self._dtype)


class _Keep(Function):
    """The autograd node that saves x for `_InTiles`, which saves nothing [Note: Kept input]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = len(others)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return dx, *[None] * ctx.others


class _InTiles(Function):
    """The tiled module as one autograd node.

    forward    y of each tile
    backward   for each tile: y again, dx, and gradients of all parameters, summed over tiles
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        *_, tiled, inside, node = given
        ctx.tiled, ctx.inside, ctx.node = tiled, inside, node
        # Backward restores the generators to this state, so that it draws the same dropout masks.
        ctx.snapshot = tiled.tracker.snapshot()
        with tiled.unsharded(Phase.FORWARD):
            ctx.tiles = tiled.tiles(x)
            y: Tensor = tiled.compute_all(x, ctx.tiles, inside)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        tiled: TiledModule = ctx.tiled
        need_x, *needs = needs_grad(ctx, 1 + len(tiled.parameters))
        # Read x first, because this may start the block's recompute, which gathers weights itself.
        (x,) = ctx.node.saved_tensors
        trained = [p for p, need in zip(tiled.parameters, needs, strict=True) if need]
        sums = {parameter: _SummedGradient() for parameter in trained}
        dx = torch.empty_like(x) if need_x else None
        with tiled.unsharded(Phase.BACKWARD) as weights, tiled.tracker.replaying(ctx.snapshot):
            for tile in tiled.layers.each_tile(ctx.tiles):
                leaf = x[:, tile].detach().contiguous().requires_grad_()
                with torch.enable_grad():
                    y = tiled.compute_tile(leaf, ctx.inside)
                d_leaf, *found = torch.autograd.grad(
                    y, [leaf, *trained], dy[:, tile].contiguous(), allow_unused=True
                )
                for parameter, gradient in zip(trained, found, strict=True):
                    if gradient is not None:
                        sums[parameter].add(gradient)
                if dx is not None:
                    # `d_leaf` is None if y does not depend on x.
                    dx[:, tile] = 0 if d_leaf is None else d_leaf
        need_of = dict(zip(tiled.parameters, needs, strict=True))
        gradients = {parameter: total.sum() for parameter, total in sums.items()}
        # `_Sums` has the gradients of gathered weights; autograd returned all others above.
        for weight in reversed(tiled.weights):
            for is_bias, p in enumerate((weight.weight, weight.bias)):
                if p in need_of:
                    gradients[p] = weights.deliver(
                        weight, dy.dtype, is_bias=bool(is_bias), needs=need_of[p]
                    )
        return dx, *(gradients.get(p) for p in tiled.parameters), None, None, None
