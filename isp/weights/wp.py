"""`WPCommunicator`, how a layer comes by its full weight and gives its gradient away."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from isp.comm import Channel
from isp.parallel.layout import ParameterLayout
from isp.weights.phase import Phase
from isp.weights.rows import gather_rows, reduce_rows

__all__ = ["GatheredWeights", "LocalWeights", "WPCommunicator", "WeightHolder"]


class WeightHolder(Protocol):
    """A layer as the communicator sees it."""

    name: str
    layouts: dict[str, ParameterLayout]


class WPCommunicator(ABC):
    """What a layer asks when it needs a weight, and tells when it has a gradient.

    A parameter never changes identity: `module.weight` is the shard, always. The full weight is a
    value that the layer may read between `weight_hook` and `release_hook`.
    """

    reduces_gradients: bool
    """Whether gradients travel: then a layer computes dw before dx, which hides its trip."""

    @property
    @abstractmethod
    def communication_mode(self) -> str:
        """`wp` if weights are gathered over a weight group, `tp` if they stay where they are."""

    @abstractmethod
    def weight_hook(
        self, shard: Tensor, *, module: WeightHolder, phase: Phase, is_bias: bool = False
    ) -> Tensor:
        """The full tensor of which `shard` is this rank's part: [n, ..] -> [N, ..]."""

    @abstractmethod
    def release_hook(self, *, module: WeightHolder, phase: Phase) -> None:
        """The layer has issued its last read of the full weight in this phase."""

    @abstractmethod
    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False
    ) -> Tensor | None:
        """The gradient of the shard, summed over the weight group: [N, ..] -> [n, ..].

        None if the communicator delivers it later by itself.
        """


class LocalWeights(WPCommunicator):
    """Weights used as they lie: the modes that split the computation and not only the weights."""

    reduces_gradients = False

    @property
    def communication_mode(self) -> str:
        return "tp"

    def weight_hook(
        self, shard: Tensor, *, module: WeightHolder, phase: Phase, is_bias: bool = False
    ) -> Tensor:
        return shard

    def release_hook(self, *, module: WeightHolder, phase: Phase) -> None:
        pass

    def grad_hook(self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False) -> Tensor:
        return grad


class GatheredWeights(WPCommunicator):
    """Weights gathered at the moment of use and gradients reduced at once: nothing overlaps."""

    reduces_gradients = True

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    @property
    def communication_mode(self) -> str:
        return "wp"

    def weight_hook(
        self, shard: Tensor, *, module: WeightHolder, phase: Phase, is_bias: bool = False
    ) -> Tensor:
        name = "bias" if is_bias else "weight"
        rows = module.layouts[name].global_shape[0]
        return gather_rows(self.channel, shard, rows, label=f"{module.name}.{name}").wait()

    def release_hook(self, *, module: WeightHolder, phase: Phase) -> None:
        pass

    def grad_hook(self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False) -> Tensor:
        name = "bias" if is_bias else "weight"
        return reduce_rows(self.channel, grad, label=f"{module.name}.{name}.grad").wait()
