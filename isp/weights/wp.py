"""`WPCommunicator`, how a layer comes by its full weight and gives its gradient away."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from isp.weights.declare import WeightHolder
from isp.weights.phase import Phase

__all__ = ["LocalWeights", "WPCommunicator"]


class WPCommunicator(ABC):
    """What a layer asks when it needs a weight, and tells when it has a gradient.

    A parameter never changes identity: `layer.weight` is the shard, always. The full weight is a
    value that the layer may read between `weight_hook` and `release_hook`.
    """

    gathers_weights: bool
    """Whether weights, and so their gradients, travel."""

    @property
    @abstractmethod
    def communication_mode(self) -> str:
        """`isp` if weights are gathered over a weight group, `tp` if they stay where they are."""

    def prefetch_hook(self, *, module: WeightHolder, phase: Phase) -> None:
        """The layer has been reached; it will ask for its weight after some work of its own."""
        return

    def recomputing(self) -> AbstractContextManager[None]:
        """Forward passes in this context compute again what a backward is about to need."""
        return nullcontext()

    @abstractmethod
    def weight_hook(
        self, shard: Tensor, *, module: WeightHolder, phase: Phase, is_bias: bool = False
    ) -> Tensor:
        """The full tensor of which `shard` is this rank's part: [n, ..] -> [N, ..].

        The weight is asked for before the bias.
        """

    @abstractmethod
    def release_hook(self, *, module: WeightHolder, phase: Phase) -> None:
        """The layer has issued its last read of weight and bias in this visit."""

    @abstractmethod
    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        """The gradient of the shard, summed over the weight group: [N, ..] -> [n, ..].

        None if the communicator delivers it later by itself, which it does not if it is `returned`.
        """


class LocalWeights(WPCommunicator):
    """Weights used as they lie: the modes that split the computation and not only the weights."""

    gathers_weights = False

    @property
    def communication_mode(self) -> str:
        return "tp"

    def weight_hook(
        self, shard: Tensor, *, module: WeightHolder, phase: Phase, is_bias: bool = False
    ) -> Tensor:
        return shard

    def release_hook(self, *, module: WeightHolder, phase: Phase) -> None:
        pass

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor:
        return grad
