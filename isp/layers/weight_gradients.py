"""Routes of a linear's weight gradient: into its main gradient, or later.

N tokens, O out features, I in features; dW [O, I] = dy^T [O, N] x [N, I].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from isp.layers.linear import LinearLayer
from isp.weights.transfers import GradientSink

__all__ = ["DeferredWeightGradients", "IntoMainGradients"]


class ProductSink(GradientSink, Protocol):
    """A sink that can multiply into its buffers (`isp.optim.MainGradients` is one)."""

    def add_product(self, parameter: nn.Parameter, dy: Tensor, x: Tensor) -> None:
        """Add dy^T x; announced by `promise` as an `add` is."""


class IntoMainGradients:
    """Multiplies straight into the main gradient: no dW is ever allocated.

    For weights that stay on their rank; one whose gradient travels needs it in a buffer.
    """

    def __init__(self, gradients: ProductSink) -> None:
        self._gradients = gradients

    def __call__(
        self, layer: LinearLayer, weight: nn.Parameter, dy: Tensor, x: Tensor
    ) -> Tensor | None:
        if layer.communicator.gathers_weights:
            return dy.T @ x
        self._gradients.promise(weight)
        self._gradients.add_product(weight, dy, x)
        return None


class DeferredWeightGradients:
    """Keeps the factors, and multiplies when asked, in the order in which they came.

    `drain` is for the embedding and head of a pipeline, whose weight gradients fill its cool-down,
    `take` for schedules that split the backward. Up to `limit` products are deferred, None: all;
    what comes beyond is computed at once. Gradients end in `sink`, through the communicator where
    they travel.
    """

    def __init__(self, sink: GradientSink, *, limit: int | None = None) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"limit={limit} must be at least 0, or None to defer all")
        self._sink = sink
        self._limit = limit
        self._waiting: deque[tuple[LinearLayer, nn.Parameter, Tensor, Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __call__(
        self, layer: LinearLayer, weight: nn.Parameter, dy: Tensor, x: Tensor
    ) -> Tensor | None:
        if self._limit is not None and len(self._waiting) >= self._limit:
            return dy.T @ x
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
    def _compute(self, layer: LinearLayer, weight: nn.Parameter, dy: Tensor, x: Tensor) -> None:
        grad = layer.communicator.grad_hook(dy.T @ x, module=layer)
        if grad is None:  # on its way, and promised anew by the communicator
            self._sink.withdraw(weight)
        else:
            self._sink.add(weight, grad)
