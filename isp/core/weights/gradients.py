"""Weight gradients: the matmul dW = dy^T x, and the sinks that accumulate dW.

N tokens, O out features, I in features; dy [N, O], x [N, I], dW [O, I]. If several linears of one
input are computed as one, linear i has dy [N, Oi], and the rows of dW are concatenated.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["GradientSink", "OutputGradient", "ParameterGradients", "weight_gradient"]

OutputGradient = Tensor | tuple[Tensor, ...]
"""The output gradient dy [N, O] of a linear, or a tuple [N, Oi] of several with one input."""


def weight_gradient(
    dy: OutputGradient,
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    into: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Return dW = dy^T x in `dtype`; None: in the dtype of dy and x.

    With `into`, dW is written into this tensor or, with `add`, added to it. If `into` has the dtype
    of dy and x, or is float32 on CUDA, this is one kernel that allocates nothing. See
    [Note: Wide products] in docs/design/notes/weights.md.
    """
    # Several linears of the same x: dW consists of their weight gradients, one below the other.
    if isinstance(dy, tuple):
        sizes = [part.shape[1] for part in dy]
        if into is None:
            into = x.new_empty(sum(sizes), x.shape[1], dtype=dtype or x.dtype)
        # `split` is a Python function, which takes as long as a product; this is C++.
        for part, rows in zip(dy, into.split_with_sizes(sizes), strict=True):
            weight_gradient(part, x, into=rows, add=add)
        return into
    left, narrow = dy.T, dy.dtype
    wide = into.dtype if into is not None else narrow if dtype is None else dtype
    if wide == narrow:
        return left @ x if into is None else torch.addmm(into, left, x, beta=int(add), out=into)
    # Only CUDA multiplies narrow factors into a float32 result. On other devices the product is
    # rounded to the factors' dtype and then widened [Note: Wide products].
    if not (dy.device.type in ("cuda", "meta") and wide is torch.float32):
        product = left @ x
        if into is None:
            return product.to(wide)
        return into.add_(product) if add else into.copy_(product)
    if into is None:
        return torch.mm(left, x, out_dtype=wide)
    if add and not dy.is_meta:  # torch 2.11 may fail to infer this addmm's shape on meta
        return torch.addmm(into, left, x, out_dtype=wide, out=into)
    return torch.mm(left, x, out_dtype=wide, out=into)


class GradientSink(Protocol):
    """A receiver that accumulates this rank's gradients of parameters, such as `MainGradients`."""

    def promise(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        """Announce that `add` will be called once for `parameter`.

        Until then its gradient is not final. If the gradient has `dtype`, this may return a tensor
        to receive it in, which is then passed to `add`. Raises RuntimeError if the gradient is
        final already.
        """

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient, promised or not; an implementation must not keep the tensor."""

    def withdraw(self, parameter: nn.Parameter) -> None:
        """Cancel one promise for `parameter`."""


class ProductSink(GradientSink, Protocol):
    """A sink that multiplies a weight gradient straight into its buffer."""

    def add_product(self, parameter: nn.Parameter, dy: OutputGradient, x: Tensor) -> None:
        """Add the weight gradient dy^T x; this does not count as the `add` of a promise."""


class ParameterGradients:
    """The default sink: adds into `parameter.grad`, as autograd would."""

    def promise(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        return None

    def withdraw(self, parameter: nn.Parameter) -> None:
        pass

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        gradient = gradient.to(parameter.dtype)
        # Copy the gradient, because the caller reuses its memory. The copy is contiguous, as the
        # parameter is: torch's fused optimizers need the same strides for both.
        if parameter.grad is None:
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        else:
            parameter.grad += gradient
