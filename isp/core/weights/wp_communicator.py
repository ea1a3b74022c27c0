"""`WPCommunicator`, the interface by which a layer reads its full weight and delivers its gradient.

N tokens, O out features, I in features; dy is [N, O], x [N, I], a full weight or gradient [N, ..]
of which a rank's shard is [n, ..].

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
    """The full tensors of a layer, as values that may be read until the use ends."""

    @property
    def weight(self) -> Tensor:
        """[N, ..]; waits for it."""

    @property
    def bias(self) -> Tensor | None:
        """[N], if the use was given one; waits for it."""


class WPCommunicator(ABC):
    """Gathers a layer's weight and takes its gradient.

    A parameter never changes identity: `layer.weight` is always the shard. The full weight is a
    value:

        with communicator.unshard(layer, Phase.FORWARD, layer.weight, layer.bias) as full:
            y = F.linear(x, full.weight, full.bias)
    """

    gathers_weights: bool
    """True if weights are gathered and their gradients reduced."""
    is_recomputing = False
    """True within `recomputing`, if weights are gathered: forward passes are recomputation."""
    route: WeightGradientRoute | None = None
    """The function that takes both factors of weight gradients; None: they are multiplied at once.
    A `DeferredWeightGradients` if a schedule splits the backward."""
    product_sink: ProductSink | None = None
    """The sink that multiplies factors straight into its buffers, for weights that stay on their
    rank; None: products are made here, and delivered by `grad_hook`."""

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
        """Yield the full tensors of the shards `weight` [n, ..] and `bias` [n], in a context.

        Enter it when the layer is reached, before work that needs no weight, which then hides the
        gather. The tensors may be read any number of times.
        """

    def pass_by(self, key: Hashable) -> None:  # noqa: B027  # only plans have launch points
        """Report that a forward has reached the launch point without a weight declared as `key`.

        Gathers that the plan launches there are launched. Does nothing if weights are not gathered.
        """

    def weight_hook(self, shard: Tensor, *, module: WeightHolder, is_bias: bool = False) -> Tensor:
        """Return a copy of the full tensor of `shard`, to keep: [n, ..] -> [N, ..].

        See `isp.core.internevo`; layers call `unshard`, which does not copy.
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
        """Compute and deliver the weight gradient dy^T x of a layer, at once or by the `route`.

        `parameter` is the one that the layer multiplied by; None if it was given another tensor,
        whose gradient only autograd can deliver. Returns what autograd has to deliver, or None, as
        `grad_hook`.
        """
        dw: Tensor | None = None
        # What `torch.autograd.grad` returns must exist now.
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
        """Sum a full gradient over the weight group; return the shard: [N, ..] -> [n, ..].

        Returns None if the communicator delivers it later; with `returned` it never does.
        """


class ShardedLayer(WeightHolder, Protocol):
    """A layer that reads its weight and delivers its gradient through a communicator."""

    communicator: WPCommunicator


WeightGradientRoute: TypeAlias = (
    "Callable[[ShardedLayer, nn.Parameter, OutputGradient, Tensor], Tensor | None]"
)
"""A function that takes the factors of a weight gradient: a layer, the parameter that it multiplied
by, dy and x. It returns dW = dy^T x for its caller to deliver, or None if it delivers dW itself."""


class WholeWeights(NamedTuple):
    """Full tensors that need no gather."""

    weight: Tensor
    bias: Tensor | None


class LocalWeights(WPCommunicator):
    """Weights used without a gather: in modes that split the computation, too.

    Autograd delivers gradients to `parameter.grad`. With a sink, products dy^T x go straight into
    the sink's buffers, without a dW in between.
    """

    gathers_weights = False

    def deliver_to(self, sink: ProductSink | None) -> None:
        """Add products dy^T x straight into `sink`; None: autograd accumulates them.

        It accumulates all other gradients in either case.
        """
        self.product_sink = sink

    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        return nullcontext(WholeWeights(weight, bias))

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor:
        return grad


class DeferredWeightGradients:
    """The route that keeps both factors and multiplies later, in the order of the backward passes.

    `drain` is for the embedding and the head of a pipeline, whose weight gradients fill the
    cool-down; `take` is for schedules that split the backward. At most `limit` products wait
    (None: no limit); beyond it, a product is computed at once. Gradients are added to `sink`, by
    the communicator where they are reduced over the weight group.
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
        self._sink.promise(weight)  # else the sink reduces its bucket before this product
        self._waiting.append((layer, weight, dy, x))
        return None

    def drain(self, count: int | None = None) -> None:
        """Compute the oldest `count` deferred products; None: all."""
        for _ in range(len(self._waiting) if count is None else min(count, len(self._waiting))):
            self._compute(*self._waiting.popleft())

    def take(self) -> Callable[[], None]:
        """Return a function that computes all products deferred so far, and forget them here."""
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
        # Kept: the gradient is added, or promised once more for its reduction.
        self._sink.withdraw(weight)
