"""RMSNorm with a weight that every rank holds whole.

D features; compiled, a norm and the sum ahead of it are one kernel ([Note: Compiled] in
`isp.layers.compiled`), which keeps what torch's own keeps on CUDA: x, the weight and, in float32 at
least, 1 / sqrt(mean(x^2) + eps) of each row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.autograd import Function, once_differentiable
from isp.layers.compiled import lazily_compiled, widened
from isp.layers.module import MasterStream, ParallelModule
from isp.parallel.layout import ParameterLayout

__all__ = ["RMSNorm", "norm_into"]


class RMSNorm(ParallelModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Source: Zhang & Sennrich 2019.
    """

    weight: nn.Parameter

    def __init__(
        self,
        layout: ParameterLayout,
        *,
        eps: float,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.compiled = compiled
        self.add_shard("weight", layout, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., D] -> [.., D]."""
        if self.compiled:
            out: Tensor = _Norm.apply(x, self.weight, self.eps)
            return out
        weight = self.weight
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and the norm of it: x and y [.., D] -> twice [.., D]."""
        if self.compiled:
            total, out = _NormOfSum.apply(x, y, self.weight, self.eps)
            return total, out
        x = x + y
        del y  # gone before there is the norm
        return x, self(x)

    def initial_shard(self, name: str, stream: MasterStream) -> Tensor:
        return torch.ones(self.layouts[name].local_shape)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *_norm_gradients(dout, *ctx.saved_tensors), None


class _NormOfSum(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, out, inverse = _norm_of_sum(x, y, weight, eps)
        ctx.save_for_backward(total, weight, inverse)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, dout: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = _norm_of_sum_gradients(dtotal, dout, *ctx.saved_tensors)
        return dx, dx, dweight, None


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = widened(x)
    inverse = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * inverse.unsqueeze(-1) * weight).to(x.dtype), inverse


def _gradients(dout: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Those of x, wide, and of the weight."""
    normed, dout = widened(x) * inverse.unsqueeze(-1), widened(dout)
    dnormed = dout * weight
    along = (dnormed * normed).mean(-1, keepdim=True)
    dweight = (dout * normed).flatten(0, -2).sum(0)
    return (dnormed - normed * along) * inverse.unsqueeze(-1), dweight.to(weight.dtype)


@lazily_compiled
def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _normed(x, weight, eps)


@lazily_compiled
def _norm_gradients(
    dout: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    dx, dweight = _gradients(dout, x, weight, inverse)
    return dx.to(x.dtype), dweight


@lazily_compiled
def _norm_of_sum(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x + y
    return total, *_normed(total, weight, eps)


@lazily_compiled
def _norm_of_sum_gradients(
    dtotal: Tensor, dout: Tensor, total: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    dx, dweight = _gradients(dout, total, weight, inverse)
    return (widened(dtotal) + dx).to(total.dtype), dweight


@lazily_compiled
def norm_into(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write the norm of x [N, D] into `out` [N, D]."""
    out.copy_(_normed(x, weight, eps)[0])
