"""The product that a weight gradient is: dW = dy^T x, in the dtype and the place asked for.

N tokens, O out features, I in features; dy [N, O], x [N, I], dW [O, I]. Where several linears of
one input are computed as one, each has a dy [N, Oi] and its own rows of dW, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["OutputGradient", "weight_gradient"]

OutputGradient = Tensor | tuple[Tensor, ...]
"""Output gradient dy [N, O] of one linear, or one [N, Oi] for each of several."""


def weight_gradient(
    dy: OutputGradient,
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    into: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Return dW = dy^T x in `dtype` (None: that of the factors), or written or added to `into`.

    If `into` has the dtype of the factors, or is float32 on CUDA, one kernel does it and no memory
    is allocated [Note: Wide products].

    [Note: Wide products] CUDA multiplies bfloat16 or float16 factors into float32 without rounding
    the sums to the factors' dtype (torch 2.10 or newer, to add to `into`). Other devices have no
    such kernel: there a product is rounded to the factors' dtype before it is widened. Meta tensors
    take the path of CUDA, for which the planner uses them.
    """
    if isinstance(dy, tuple):
        return _row_by_row(dy, x, dtype=dtype, into=into, add=add)
    left = dy.T
    found = dy.dtype if dtype is None else dtype
    wide = into.dtype if into is not None else found
    if wide != dy.dtype and not (dy.device.type in ("cuda", "meta") and wide is torch.float32):
        product = left @ x
        if into is None:
            return product.to(wide)
        return into.add_(product) if add else into.copy_(product)
    if into is None:
        return left @ x if wide == dy.dtype else torch.mm(left, x, out_dtype=wide)
    if wide == dy.dtype:
        return torch.addmm(into, left, x, beta=int(add), out=into)
    if add and not dy.is_meta:  # torch 2.11 may not know the shape of this addmm
        return torch.addmm(into, left, x, out_dtype=wide, out=into)
    return torch.mm(left, x, out_dtype=wide, out=into)


def _row_by_row(
    dys: Sequence[Tensor], x: Tensor, *, dtype: torch.dtype | None, into: Tensor | None, add: bool
) -> Tensor:
    """Compute the rows of dW of each linear, one product for each, into one tensor."""
    sizes = [dy.shape[1] for dy in dys]
    if into is None:
        into = x.new_empty(sum(sizes), x.shape[1], dtype=dtype or x.dtype)
    for dy, rows in zip(dys, into.split(sizes), strict=True):
        weight_gradient(dy, x, into=rows, add=add)
    return into
