"""An MLP computed in tiles of tokens, so that what lies inside exists for one tile at a time.

B batch, S' the tokens of this rank, T those of a tile, D hidden size, F' features inside

    x [B, S', D] -> x + row(activation(column(norm(x)))); a tile holds [B, T, 2F'] and the like

Both weights are there for all tiles (in isp gathered once forward and once in backward), and their
gradients are sums over the tiles, delivered once. Kept is x alone; backward computes each tile
again, and so needs no recompute around it ([Note: Kept input] in `isp.layers.parts`).

Activations move as in the linears themselves, a tile at a time: in msp and fsp a tile of the rank's
tokens is gathered from all tensor ranks, x again in backward, in msp too. Ranks have as many tokens
each, hence as many tiles; their number depends on nothing else.

Source: Bekman et al. 2025 (Arctic Long Sequence Training), TiledMLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.autograd import Function, once_differentiable
from isp.comm import Pending
from isp.comm.tag import Purpose, Tag
from isp.layers.linear import NeedsGrad, ParallelLinear, needs_grad
from isp.layers.norm import RMSNorm
from isp.layers.parts import SummedGradient, SummedProduct, keep, kept
from isp.parallel.phase import Phase

__all__ = ["TiledMLP"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TiledMLP:
    """x + row(activation(column(norm(x)))) in tiles of `tokens`; the linears have no bias."""

    norm: RMSNorm
    column: ParallelLinear
    activation: Callable[[Tensor], Tensor]
    """Each token for itself."""
    row: ParallelLinear
    tokens: int
    """Of all rows of the batch together; a tile has one of each row at least."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, S', D] -> [B, S', D]."""
        assert self.column.bias is self.row.bias is None, "a tile adds no bias"
        weights = self.norm.weight, self.column.weight, self.row.weight
        x, node = keep(x, *weights)
        out: Tensor = _Tiles.apply(x, *weights, self, node)
        return out

    def tiles(self, x: Tensor) -> Iterator[slice]:
        """The tiles of x [B, S', D], as slices of S'."""
        length = max(1, self.tokens // x.shape[0])
        return (slice(i, i + length) for i in range(0, x.shape[1], length))


class _Tiles(Function):
    """forward   out = x + y, y = move_y(row(activation(column(move_x(norm(x))))))
    backward   of each tile: h again, dW_row += dy^T h, dW_column += da^T n, dx = dout + norm'(dn)
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        column_weight: Tensor,
        row_weight: Tensor,
        mlp: TiledMLP,
        node: Any,
    ) -> Tensor:
        ctx.mlp, ctx.node = mlp, node
        column, row, out = mlp.column, mlp.row, torch.empty_like(x)
        with (
            column.communicator.unshard(column, Phase.FORWARD, column_weight) as up,
            row.communicator.unshard(row, Phase.FORWARD, row_weight) as down,
        ):
            arriving: tuple[slice, Pending] | None = None
            for tile in mlp.tiles(x):
                n = _moved(mlp, mlp.norm(x[:, tile]), Purpose.ACTIVATION).wait()
                y = F.linear(mlp.activation(F.linear(n, up.weight)), down.weight)
                leaving = tile, row.moves.y(y, tag=Tag(Purpose.ACTIVATION, row.name, "y"))
                del n, y
                _settle(out, x, arriving)  # the transfer of a tile hides behind the next one
                arriving = leaving
            _settle(out, x, arriving)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        mlp: TiledMLP = ctx.mlp
        column, row = mlp.column, mlp.row
        needs_x, needs_norm, needs_column, needs_row = needs_grad(ctx, 4)
        x = kept(ctx.node)  # ahead of the uses: what is recomputed for it has uses of its own
        dx = torch.empty_like(x) if needs_x else None
        d_norm = SummedGradient(needs_norm)
        d_column, d_row = SummedProduct(column, needs_column), SummedProduct(row, needs_row)
        with (
            row.communicator.unshard(row, Phase.BACKWARD, row.weight) as down,
            column.communicator.unshard(column, Phase.BACKWARD, column.weight) as up,
        ):
            for tile in mlp.tiles(x):
                backward = _TileBackward(mlp, x[:, tile], up.weight, needs_norm)
                dy = dout[:, tile]
                dn = backward.through_linears(dy, down.weight, d_row, d_column)
                dx_tile, dw_norm = backward.through_norm(dn)
                if dw_norm is not None:
                    d_norm.add(dw_norm)
                if dx is not None:
                    torch.add(dy, dx_tile, out=dx[:, tile])
        return dx, d_norm.take(), d_column.deliver(), d_row.deliver(), None, None


class _TileBackward:
    """A tile computed again, up to its activation, and the way back through it.

    The gradients of norm and activation are autograd's, of graphs that end where they begin: no
    pass of somebody else's ends in them ([Note: Not reentrant] in `isp.recompute`).
    """

    def __init__(self, mlp: TiledMLP, x: Tensor, up: Tensor, needs_norm: NeedsGrad) -> None:
        self._mlp, self._up = mlp, up
        self._leaves = (x.detach().requires_grad_(), *([mlp.norm.weight] if needs_norm else []))
        with torch.enable_grad():
            self._normed = mlp.norm(self._leaves[0])
        self._arriving = _moved(mlp, self._normed.detach(), Purpose.REGATHERED_ACTIVATION)

    def through_linears(
        self, dy: Tensor, down: Tensor, d_row: SummedProduct, d_column: SummedProduct
    ) -> Tensor:
        """The gradient of the norm's output; those of the weights are added to their sums."""
        column, row = self._mlp.column, self._mlp.row
        going = row.moves.dy(dy, tag=Tag(Purpose.OUTPUT_GRADIENT, row.name, "dy"))
        n = self._arriving.wait()
        fused = F.linear(n, self._up).requires_grad_()
        with torch.enable_grad():
            h = self._mlp.activation(fused)
        dy = going.wait()
        d_row.add_product(dy, h.detach())
        (da,) = torch.autograd.grad(h, fused, dy @ down.to(dy.dtype))
        del h, fused
        tag = Tag(Purpose.INPUT_GRADIENT, column.name, "dx")
        dn = column.moves.dx(da @ self._up.to(da.dtype), tag=tag)
        d_column.add_product(da, n)
        return dn.wait()

    def through_norm(self, dn: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradients of the tile's input, by way of the norm, and of the norm's weight."""
        dx, *rest = torch.autograd.grad(self._normed, self._leaves, dn)
        return dx, rest[0] if rest else None


def _moved(mlp: TiledMLP, n: Tensor, purpose: Purpose) -> Pending:
    return mlp.column.moves.x(n, tag=Tag(purpose, mlp.column.name, "x"))


def _settle(out: Tensor, x: Tensor, arriving: tuple[slice, Pending] | None) -> None:
    if arriving is not None:
        tile, y = arriving
        torch.add(x[:, tile], y.wait(), out=out[:, tile])
