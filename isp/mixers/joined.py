"""`joined`: a result whose backward reaches what it was not computed from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isp.autograd import Function, once_differentiable

__all__ = ["joined"]


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in others]
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=at) for shape, dtype, at in ctx.like)
        return d_out, *zeros


def joined(out: Tensor, *others: Tensor | None) -> Tensor:
    """`out`, whose backward gives `others` a gradient of zeros.

    A rank without tokens, heads or earlier states computes nothing from an exchange. Its backward
    has to reach that exchange all the same: the other ranks wait for it there.
    """
    y: Tensor = _Joined.apply(out, *(x for x in others if x is not None and x.requires_grad))
    return y
