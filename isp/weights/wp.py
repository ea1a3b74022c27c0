"""`WPCommunicator`, how a layer comes by its full weight and gives its gradient away."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor, nn

from isp.parallel.phase import Phase
from isp.weights.declare import WeightHolder
from isp.weights.reductions import GradientSink
from isp.weights.trace import Action

if TYPE_CHECKING:
    from isp.weights.communicator import ISPCommunicator

__all__ = ["FullWeights", "ISPCommunicatorWrapper", "LocalWeights", "WPCommunicator"]


class FullWeights(Protocol):
    """The full tensors of a layer, as values that may be read until the visit ends."""

    @property
    def weight(self) -> Tensor:
        """[N, ..]; waits for it."""

    @property
    def bias(self) -> Tensor | None:
        """[N], if the visit was given one; waits for it."""


class WPCommunicator(ABC):
    """The one a layer asks when it needs a weight, and tells of a gradient.

    A parameter never changes identity: `layer.weight` is the shard, always. The full weight is a
    value:

        with communicator.visit(layer, Phase.FORWARD, layer.weight, layer.bias) as full:
            y = F.linear(x, full.weight, full.bias)
    """

    gathers_weights: bool
    """Whether weights, and so their gradients, travel."""

    @property
    @abstractmethod
    def communication_mode(self) -> str:
        """`isp` if weights are gathered over a weight group, `tp` if they stay where they are."""

    def recomputing(self) -> AbstractContextManager[None]:
        """Forward passes in this context compute again what a backward is about to need."""
        return nullcontext()

    @abstractmethod
    def visit(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        """The full tensors of which `weight` [n, ..] and `bias` [n] are this rank's parts.

        To be entered when the layer is reached, as far ahead of the first read as there is work
        that needs no weight. They may be read any number of times.
        """

    def weight_hook(self, shard: Tensor, *, module: WeightHolder, is_bias: bool = False) -> Tensor:
        """A copy of the full tensor of `shard`, to keep: [n, ..] -> [N, ..]. Layers `visit`."""
        weight, bias = (module.weight, shard) if is_bias else (shard, None)
        with self.visit(module, Phase.FORWARD, weight, bias) as full:
            return (full.weight if full.bias is None else full.bias).detach().clone()

    @abstractmethod
    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        """The gradient of the shard, summed over the weight group: [N, ..] -> [n, ..].

        None if the communicator delivers it later by itself, which it does not if it is `returned`.
        """


class _Local(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class LocalWeights(WPCommunicator):
    """Weights used as they lie: the modes that split the computation and not only the weights."""

    gathers_weights = False

    @property
    def communication_mode(self) -> str:
        return "tp"

    def visit(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        return nullcontext(_Local(weight, bias))

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor:
        return grad


class ISPCommunicatorWrapper:
    """Several communicators, e.g. of dense and expert weights, behind one, in their order.

    Layers talk to their own communicator directly. All of them follow the same actions, each along
    a plan of the blocks that were declared to it.
    """

    def __init__(self, communicators: Sequence[ISPCommunicator]) -> None:
        self.communicators = tuple(communicators)

    def deliver_to(self, sink: GradientSink) -> None:
        """Give all reduced gradients to `sink`."""
        for communicator in self.communicators:
            communicator.deliver_to(sink)

    def register_prerequisite_for_forward_prefetch_hooks(
        self, fn: Callable[[nn.Module], None]
    ) -> None:
        """As of `ISPCommunicator`, for each.  Raises TypeError if `fn` is not callable."""
        for communicator in self.communicators:
            communicator.register_prerequisite_for_forward_prefetch_hooks(fn)

    def begin(self, actions: Sequence[Action]) -> None:
        """Follow the plans of `actions`, and launch their first gathers."""
        for communicator in self.communicators:
            communicator.begin(actions)

    def finish(self) -> None:
        """Deliver all gradients and give all buffers back."""
        for communicator in self.communicators:
            communicator.finish()

    def drain(self) -> None:
        """Drop what was gathered."""
        for communicator in self.communicators:
            communicator.drain()

    def switch_current_model_chunk(self, chunk: int) -> None:
        """Say which chunk runs from here on."""
        for communicator in self.communicators:
            communicator.switch_current_model_chunk(chunk)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Forward passes in this context are recomputes."""
        with ExitStack() as stack:
            for communicator in self.communicators:
                stack.enter_context(communicator.recomputing())
            yield
