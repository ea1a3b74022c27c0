"""`WPCommunicator`, the interface by which a layer reads its full weight and delivers its gradient.

T tokens, O out features, I in features; dy is [T, O], x [T, I]. A full weight or gradient is
[N, ..], and a rank's shard of it [n, ..].

Source: InternEvo, `internlm/core/parallel/comm/isp.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from isp.core.mesh.phase import Phase
from isp.core.weights.declare import WeightHolder
from isp.core.weights.gradients import OutputGradient, ProductSink, weight_gradient

__all__ = [
    "DeferredWeightGradients",
    "FullWeights",
    "LocalWeights",
    "ShardedLayer",
    "WPCommunicator",
    "WeightGradientRoute",
    "WholeWeights",
]


class FullWeights(Protocol):
    """The full tensors of a layer, which may be read until the context of `unshard` ends."""

    @property
    def weight(self) -> Tensor:
        """Wait for the full weight [N, ..] and return it."""

    @property
    def bias(self) -> Tensor | None:
        """Wait for the full bias [N] and return it; None if `unshard` was called without one."""


class WPCommunicator(ABC):
    """Gathers a layer's weight and takes its gradient.

    `layer.weight` is always the shard, the same parameter throughout a run. The full weight exists
    only inside a context:

        with communicator.unshard(layer, Phase.FORWARD, layer.weight, layer.bias) as full:
            y = F.linear(x, full.weight, full.bias)
    """

    gathers_weights: bool
    """True if weights are gathered and their gradients reduced over the weight group."""
    is_recomputing = False
    """True inside `recomputing`, if weights are gathered: a forward is a recomputation."""
    route: WeightGradientRoute | None = None
    """A function that takes both factors of each weight gradient, to multiply them later; it is a
    `DeferredWeightGradients` if a schedule splits the backward. None: they are multiplied at
    once."""
    product_sink: ProductSink | None = None
    """A sink that multiplies the factors straight into its buffer, for weights that are not
    gathered. None: `add_product` multiplies, and delivers by `grad_hook`."""

    @property
    def communication_mode(self) -> str:
        """`isp` if weights are gathered, else `tp`; see `isp.core.internevo`."""
        return "isp" if self.gathers_weights else "tp"

    def recomputing(self) -> AbstractContextManager[None]:
        """Mark forward passes in this context as recomputation."""
        return nullcontext()

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which `grad_hook` takes the gradient of a weight of `dtype`."""
        return dtype

    @abstractmethod
    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        """Return a context that yields the full tensors of the shards `weight` [n, ..], `bias` [n].

        Call this when the layer is reached, before work that needs no weight, which then hides the
        gather. The tensors may be read any number of times until the context ends.
        """

    def pass_by(self, key: Hashable) -> None:  # noqa: B027  # only plans have launch points
        """Report that a forward has reached the launch point declared as `key`, e.g. attention.

        Launches the gathers that the plan has there. Does nothing if weights are not gathered.
        """

    def weight_hook(self, shard: Tensor, *, module: WeightHolder, is_bias: bool = False) -> Tensor:
        """Return a copy of the full tensor of `shard`: [n, ..] -> [N, ..].

        Not a hook of torch, but a method to call; InternEvo's name. The layers of ISP call
        `unshard`, which does not copy.
        """
        weight, bias = (module.weight, shard) if is_bias else (shard, None)
        with self.unshard(module, Phase.FORWARD, weight, bias) as full:
            return (full.weight if full.bias is None else full.bias).detach().clone()

    def add_product(
        self,
        dy: OutputGradient,
        x: Tensor,
        *,
        module: ShardedLayer,
        parameter: nn.Parameter | None,
        returned: bool = False,
    ) -> Tensor | None:
        """Compute the weight gradient dy^T x of a layer and deliver it, at once or by the `route`.

        `parameter` is the parameter that the layer multiplied by; None: it multiplied by another
        tensor, whose gradient only autograd can deliver. With `returned`, `torch.autograd.grad`
        returns the gradient. Returns the gradient that the layer's backward must return, or None
        if it is delivered in another way.
        """
        dw: Tensor | None = None
        # If `torch.autograd.grad` returns the gradient, it must be computed now, so neither the
        # route nor the sink gets its factors.
        if parameter is not None and not returned:
            if self.route is not None:
                if (dw := self.route(module, parameter, dy, x)) is None:
                    return None
            elif self.product_sink is not None:
                self.product_sink.add_product(parameter, dy, x)
                return None
        if dw is None:
            dw = weight_gradient(dy, x, dtype=self.gradient_dtype(x.dtype))
        return self.grad_hook(dw, module=module, returned=returned)

    @abstractmethod
    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        """Sum a full gradient over the weight group and return this rank's shard.

        [N, ..] -> [n, ..]. Not a hook of torch: a layer calls this in its backward, and its
        backward returns the result; the name is InternEvo's. Returns None if the communicator adds
        the shard to the gradient itself when it has arrived. With `returned` it waits, because
        `torch.autograd.grad` returns the shard.
        """


class ShardedLayer(WeightHolder, Protocol):
    """A layer that reads its weight and delivers its gradient through a communicator."""

    communicator: WPCommunicator


WeightGradientRoute: TypeAlias = (
    "Callable[[ShardedLayer, nn.Parameter, OutputGradient, Tensor], Tensor | None]"
)
"""A function of a layer, the parameter that it multiplied by, dy and x, the factors of dW = dy^T x.
It returns dW, which its caller delivers, or None if it keeps the factors and delivers dW itself."""


class WholeWeights(NamedTuple):
    """The full tensors of a layer whose weight is not gathered: a `FullWeights`."""

    weight: Tensor
    bias: Tensor | None


class LocalWeights(WPCommunicator):
    """The communicator of weights that are not gathered: on one rank, and in mtp, msp and fsp.

    Autograd delivers gradients to `parameter.grad`. With a sink, products dy^T x are added straight
    to the sink's buffers, without a dW in between.
    """

    gathers_weights = False

    def deliver_to(self, sink: ProductSink | None) -> None:
        """Add products dy^T x straight to buffers of `sink`; None: autograd accumulates them.

        Autograd accumulates all other gradients in either case.
        """
        self.product_sink = sink

    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        return nullcontext(WholeWeights(weight, bias))

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor:
        """Return `grad`, for autograd to deliver: there is no weight group to reduce it over."""
        return grad


class DeferredWeightGradients:
    """Keeps the factors of weight gradients and multiplies them later, in the order of backward.

    It is a `WeightGradientRoute`. `drain` multiplies the oldest factors now: the embedding and the
    head of a pipeline use it, whose weight gradients fill the cool-down. `take` returns a function
    that multiplies all factors kept so far: schedules that split the backward use it. At most
    `limit` products wait (None: no limit); beyond it, a product is computed at once.

    If weights are gathered, a product is passed to the communicator, which reduces it over the
    weight group and delivers it. Otherwise it is added to `sink`.
    """

    def __init__(self, sink: ProductSink, *, limit: int | None = None) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"limit={limit} must be at least 0, or None to defer all")
        self._sink = sink
        self._limit = limit
        self._waiting: deque[tuple[ShardedLayer, nn.Parameter, OutputGradient, Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __call__(
        self, layer: ShardedLayer, weight: nn.Parameter, dy: OutputGradient, x: Tensor
    ) -> Tensor | None:
        if self._limit is not None and len(self._waiting) >= self._limit:
            return weight_gradient(dy, x, dtype=layer.communicator.gradient_dtype(x.dtype))
        # Promise the gradient, so that the sink does not reduce its bucket without this product.
        self._sink.promise(weight)
        self._waiting.append((layer, weight, dy, x))
        return None

    def drain(self, count: int | None = None) -> None:
        """Compute the oldest `count` deferred products; None: all."""
        for _ in range(len(self._waiting) if count is None else min(count, len(self._waiting))):
            self._compute(*self._waiting.popleft())

    def take(self) -> Callable[[], None]:
        """Remove all products deferred so far and return a function that computes them."""
        taken = self._waiting
        self._waiting = deque()

        def compute() -> None:
            while taken:
                self._compute(*taken.popleft())

        return compute

    @torch.no_grad()
    def _compute(
        self, layer: ShardedLayer, weight: nn.Parameter, dy: OutputGradient, x: Tensor
    ) -> None:
        communicator = layer.communicator
        if communicator.gathers_weights:
            dw = weight_gradient(dy, x, dtype=communicator.gradient_dtype(x.dtype))
            communicator.grad_hook(dw, module=layer)
        else:
            self._sink.add_product(weight, dy, x)
        # Close the promise only now, when the gradient is added or `grad_hook` has made a promise
        # of its own. If it were closed before, the sink could take the gradient as final and reduce
        # it without this product.
        self._sink.withdraw(weight)
