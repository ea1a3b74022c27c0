"""The weight gradient of a linear, and its routes: into its main gradient, or later.

N tokens, O out features, I in features; dW [O, I] = dy^T [O, N] x [N, I]. Of linears that are
computed as one, dy is that of each, [N, Oi], whose rows of dW lie one behind the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from isp.core.weights.gather_reduce import GradientSink, WriteGradient

if TYPE_CHECKING:
    from isp.core.layers.linear import LinearLayer

__all__ = [
    "DeferredWeightGradients",
    "IntoMainGradients",
    "OutputGradient",
    "gradient_of",
    "weight_gradient",
]

OutputGradient = Tensor | tuple[Tensor, ...]
"""dy [N, O], or those of several linears, [N, Oi]."""


def weight_gradient(
    dy: OutputGradient,
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    into: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """dW = dy^T x in `dtype`, None: that of the factors; or in the place of `into`, or added to it.

    Where `into` has the dtype of the factors, and on CUDA where it is float32, that is one kernel
    and takes no memory, [Note: Wide products].

    [Note: Wide products] Of narrow factors CUDA gives the float32 sums as they are (torch 2.10 or
    newer, to add to them); elsewhere there is no such kernel, and a product is rounded to the dtype
    of its factors before it is widened. Tensors on meta stand for CUDA's.
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
    sizes = [dy.shape[1] for dy in dys]
    if into is None:
        into = x.new_empty(sum(sizes), x.shape[1], dtype=dtype or x.dtype)
    for dy, rows in zip(dys, into.split(sizes), strict=True):
        weight_gradient(dy, x, into=rows, add=add)
    return into


def gradient_of(layer: LinearLayer, dy: OutputGradient, x: Tensor) -> Tensor:
    """The whole weight gradient of a layer, in the dtype in which it travels."""
    return weight_gradient(dy, x, dtype=layer.communicator.gradient_dtype(x.dtype))


class ProductSink(GradientSink, Protocol):
    """A sink that lets products be written into its buffers, such as `MainGradients`."""

    def add_by(self, parameter: nn.Parameter, write: WriteGradient) -> None:
        """Let `write` add a gradient there; announced by `promise` as an `add` is."""


class IntoMainGradients:
    """Multiplies straight into the main gradient: no dW is kept, and none made if it can be.

    For weights that stay on their rank; one whose gradient travels needs it in a buffer.
    """

    def __init__(self, gradients: ProductSink) -> None:
        self._gradients = gradients

    def __call__(
        self, layer: LinearLayer, weight: nn.Parameter, dy: OutputGradient, x: Tensor
    ) -> Tensor | None:
        if layer.communicator.gathers_weights:
            return gradient_of(layer, dy, x)
        self._gradients.promise(weight)
        self._gradients.add_by(weight, partial(weight_gradient, dy, x))
        return None


class DeferredWeightGradients:
    """Keeps the factors, and multiplies when asked, in the order in which they came.

    `drain` is for the embedding and head of a pipeline, whose weight gradients fill its cool-down,
    `take` for schedules that split the backward. Up to `limit` products are deferred, None: all;
    what comes beyond is computed at once. Gradients end in `sink`, through the communicator where
    they travel.
    """

    def __init__(self, sink: ProductSink, *, limit: int | None = None) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"limit={limit} must be at least 0, or None to defer all")
        self._sink = sink
        self._limit = limit
        self._waiting: deque[tuple[LinearLayer, nn.Parameter, OutputGradient, Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __call__(
        self, layer: LinearLayer, weight: nn.Parameter, dy: OutputGradient, x: Tensor
    ) -> Tensor | None:
        if self._limit is not None and len(self._waiting) >= self._limit:
            return gradient_of(layer, dy, x)
        self._sink.promise(weight)
        self._waiting.append((layer, weight, dy, x))
        return None

    def drain(self, count: int | None = None) -> None:
        """Compute the oldest `count` of what was deferred; None: all."""
        for _ in range(len(self._waiting) if count is None else min(count, len(self._waiting))):
            self._compute(*self._waiting.popleft())

    def take(self) -> Callable[[], None]:
        """Take what waits, no longer counted here, as a function that computes it."""
        taken = self._waiting
        self._waiting = deque()

        def compute() -> None:
            while taken:
                self._compute(*taken.popleft())

        return compute

    @torch.no_grad()
    def _compute(
        self, layer: LinearLayer, weight: nn.Parameter, dy: OutputGradient, x: Tensor
    ) -> None:
        if not layer.communicator.gathers_weights:
            self._sink.add_by(weight, partial(weight_gradient, dy, x))
            return
        layer.communicator.grad_hook(gradient_of(layer, dy, x), module=layer)
        self._sink.withdraw(weight)  # on its way, and promised anew by the communicator
