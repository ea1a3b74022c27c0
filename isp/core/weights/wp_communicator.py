"""`WPCommunicator`, the interface by which a layer reads its full weight and delivers its gradient.

Source: InternEvo, `internlm/core/parallel/comm/isp.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from isp.core.mesh.phase import Phase
from isp.core.weights.declare import WeightHolder

__all__ = ["FullWeights", "LocalWeights", "WPCommunicator", "WholeWeights"]


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

    @abstractmethod
    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        """Sum a full gradient over the weight group; return the shard: [N, ..] -> [n, ..].

        Returns None if the communicator delivers it later; with `returned` it never does.
        """


class WholeWeights(NamedTuple):
    """Full tensors that need no gather."""

    weight: Tensor
    bias: Tensor | None


class LocalWeights(WPCommunicator):
    """Weights used without a gather: in modes that split the computation, too."""

    gathers_weights = False

    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        return nullcontext(WholeWeights(weight, bias))

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor:
        return grad
