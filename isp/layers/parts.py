"""For layers that compute tokens in parts, and each part again in backward.

[Note: Kept input] Only the input is kept, by a node of its own ahead of the layer's, and the layer
itself saves nothing. Inside what is recomputed (`isp.recompute`) the recompute then ends at that
node, before the layer: its parts are computed once forward and once in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isp.autograd import Function
from isp.layers.linear import NeedsGrad, ParallelLinear
from isp.layers.weight_gradients import weight_gradient

__all__ = ["SummedGradient", "SummedProduct", "keep", "kept"]


class _Keep(Function):
    """Hands x through and saves it; the others only say that there is a backward to come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = len(others)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return dx, *[None] * ctx.others


def keep(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Any]:
    """x, and the node whose backward has it: `kept` reads it there.

    The node is None where neither x nor any of `parameters` requires a gradient.
    """
    others = () if x.requires_grad else (p for p in parameters if p is not None)
    out: Tensor = _Keep.apply(x, *others)
    return out, out.grad_fn


def kept(node: Any) -> Tensor:
    """What the node keeps; where it lies in a recomputed part, that is computed again first."""
    (x,) = node.saved_tensors
    found: Tensor = x
    return found


class SummedGradient:
    """A gradient that comes in parts: summed in float32 at least, and rounded once."""

    def __init__(self, want: NeedsGrad) -> None:
        self.want = want
        self._total: Tensor | None = None
        self._dtype = torch.float32

    def add(self, part: Tensor) -> None:
        """Add a part, if the gradient is wanted."""
        if not self.want:
            return
        if self._total is None:
            self._total, self._dtype = part.to(_wide(part)), part.dtype
        else:
            self._total += part

    def take(self) -> Tensor | None:
        """The sum, in the dtype of its parts."""
        total, self._total = self._total, None
        return None if total is None else total.to(self._dtype)


class SummedProduct(SummedGradient):
    """The weight gradient dy^T x of a linear: N tokens in parts, dW [O, I] delivered once.

    [Note: At once] No route of weight gradients is taken: one that puts the product off would keep
    the factors of all parts.
    """

    def __init__(self, layer: ParallelLinear, want: NeedsGrad) -> None:
        super().__init__(want)
        self._layer = layer

    def add_product(self, dy: Tensor, x: Tensor) -> None:
        """Add dy^T x: dy [.., O], x [.., I]."""
        if not self.want:
            return
        left, right = dy.flatten(0, -2), x.flatten(0, -2).to(dy.dtype)
        if self._total is None:
            self._total, self._dtype = weight_gradient(left, right, dtype=_wide(dy)), dy.dtype
        else:
            weight_gradient(left, right, into=self._total, add=True)

    def deliver(self) -> Tensor | None:
        """The gradient of the shard for autograd, or None if the communicator brings it."""
        communicator = self._layer.communicator
        self._dtype = communicator.gradient_dtype(self._dtype)
        if (gradient := self.take()) is None:
            return None
        returned = self.want is NeedsGrad.VALUE
        return communicator.grad_hook(gradient, module=self._layer, returned=returned)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
