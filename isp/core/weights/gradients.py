"""Weight gradients: the product that one is, dW = dy^T x, and the sinks that add it up.

N tokens, O out features, I in features; dy [N, O], x [N, I], dW [O, I]. Where several linears of
one input are computed as one, each has a dy [N, Oi] and its own rows of dW, one after another.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["GradientSink", "OutputGradient", "ParameterGradients", "weight_gradient"]

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
    if isinstance(dy, tuple):  # the rows of dW of each linear, one product for each
        sizes = [part.shape[1] for part in dy]
        if into is None:
            into = x.new_empty(sum(sizes), x.shape[1], dtype=dtype or x.dtype)
        # The method of C++: `split` is a Python function that takes as long as a product.
        for part, rows in zip(dy, into.split_with_sizes(sizes), strict=True):
            weight_gradient(part, x, into=rows, add=add)
        return into
    left, narrow = dy.T, dy.dtype
    wide = into.dtype if into is not None else narrow if dtype is None else dtype
    if wide == narrow:
        return left @ x if into is None else torch.addmm(into, left, x, beta=int(add), out=into)
    if not (dy.device.type in ("cuda", "meta") and wide is torch.float32):
        product = left @ x
        if into is None:
            return product.to(wide)
        return into.add_(product) if add else into.copy_(product)
    if into is None:
        return torch.mm(left, x, out_dtype=wide)
    if add and not dy.is_meta:  # torch 2.11 may not know the shape of this addmm
        return torch.addmm(into, left, x, out_dtype=wide, out=into)
    return torch.mm(left, x, out_dtype=wide, out=into)


class GradientSink(Protocol):
    """A receiver of this rank's gradients of parameters, such as `MainGradients`."""

    def promise(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        """Announce one `add`.  Raises RuntimeError if no more are expected.

        May return a tensor in which to receive the gradient, if that has dtype `dtype`; the same
        tensor is then passed to `add`.
        """

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient, promised or not; the tensor must not be kept."""

    def withdraw(self, parameter: nn.Parameter) -> None:
        """Take a promise back."""


class ProductSink(GradientSink, Protocol):
    """A sink that multiplies a weight gradient straight into its buffer."""

    def add_product(self, parameter: nn.Parameter, dy: OutputGradient, x: Tensor) -> None:
        """Add the weight gradient dy^T x; it keeps no promise."""


class ParameterGradients:
    """The default sink: adds into `parameter.grad`, as autograd would."""

    def promise(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        return None

    def withdraw(self, parameter: nn.Parameter) -> None:
        pass

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        gradient = gradient.to(parameter.dtype)
        if parameter.grad is None:  # contiguous as shards are: fused optimizers rely on it
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        else:
            parameter.grad += gradient
