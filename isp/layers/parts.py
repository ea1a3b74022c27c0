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
from isp.layers.compiled import widened
from isp.layers.linear import NeedsGrad

__all__ = ["SummedGradient", "keep", "kept"]


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
            self._total, self._dtype = widened(part), part.dtype
        else:
            self._total += part

    def take(self) -> Tensor | None:
        """The sum, in the dtype of its parts."""
        total, self._total = self._total, None
        return None if total is None else total.to(self._dtype)
