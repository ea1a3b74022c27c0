"""`WPCommunicator`, how a layer comes by its full weight and gives its gradient away.

B batch, S sequence, D hidden size, V vocabulary; /p = split over the ranks of a sequence.
Source: InternEvo, `internlm/core/parallel/comm/isp.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from isp.core.comm import Channel, Pending
from isp.core.comm.tag import UNNAMED, Purpose, Tag
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.phase import Phase
from isp.core.mesh.topology import Axis
from isp.core.weights.declare import WeightHolder
from isp.core.weights.gather_reduce import GradientSink
from isp.core.weights.uses import Action

if TYPE_CHECKING:
    from isp.core.weights.communicator import ISPCommunicator

__all__ = [
    "EmbeddingWeightParallelCommunicator",
    "FullWeights",
    "HeadWeightParallelCommunicator",
    "ISPCommunicatorWrapper",
    "LocalWeights",
    "WPCommunicator",
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
    """The one a layer asks when it needs a weight, and tells of a gradient.

    A parameter never changes identity: `layer.weight` is the shard, always. The full weight is a
    value:

        with communicator.unshard(layer, Phase.FORWARD, layer.weight, layer.bias) as full:
            y = F.linear(x, full.weight, full.bias)
    """

    gathers_weights: bool
    """Whether weights, and so their gradients, travel."""
    is_recomputing = False
    """Whether forward passes compute again what a backward needs: within `recomputing`, if weights
    are gathered."""

    @property
    @abstractmethod
    def communication_mode(self) -> str:
        """`isp` if weights are gathered over a weight group, `tp` if they stay where they are."""

    def recomputing(self) -> AbstractContextManager[None]:
        """Forward passes in this context compute again what a backward is about to need."""
        return nullcontext()

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype for a product of factors of `dtype` that is given to `grad_hook`."""
        return dtype

    @abstractmethod
    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        """The full tensors of which `weight` [n, ..] and `bias` [n] are this rank's parts.

        To be entered when the layer is reached, as far ahead of the first read as there is work
        that needs no weight. They may be read any number of times.
        """

    def weight_hook(self, shard: Tensor, *, module: WeightHolder, is_bias: bool = False) -> Tensor:
        """A copy of the full tensor of `shard`, to keep: [n, ..] -> [N, ..]. Layers `unshard`."""
        weight, bias = (module.weight, shard) if is_bias else (shard, None)
        with self.unshard(module, Phase.FORWARD, weight, bias) as full:
            return (full.weight if full.bias is None else full.bias).detach().clone()

    @abstractmethod
    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        """The gradient of the shard, summed over the weight group: [N, ..] -> [n, ..].

        None if the communicator delivers it later by itself, which it does not if it is `returned`.
        """


class WholeWeights(NamedTuple):
    """Full tensors that are there already."""

    weight: Tensor
    bias: Tensor | None


class LocalWeights(WPCommunicator):
    """Weights used as they lie: the modes that split the computation and not only the weights."""

    gathers_weights = False

    @property
    def communication_mode(self) -> str:
        return "tp"

    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        return nullcontext(WholeWeights(weight, bias))

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor:
        return grad


class _Delegating(WPCommunicator):
    """Hands every weight on to the communicator of the whole model."""

    def __init__(self, communicator: WPCommunicator, weight: Channel) -> None:
        self.communicator = communicator
        self.gathers_weights = communicator.gathers_weights
        self.weight = weight

    @property
    def communication_mode(self) -> str:
        return self.communicator.communication_mode

    def recomputing(self) -> AbstractContextManager[None]:
        return self.communicator.recomputing()

    @property
    def is_recomputing(self) -> bool:  # type: ignore[override]
        return self.communicator.is_recomputing

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.communicator.gradient_dtype(dtype)

    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        return self.communicator.unshard(module, phase, weight, bias)

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        return self.communicator.grad_hook(grad, module=module, is_bias=is_bias, returned=returned)


class EmbeddingWeightParallelCommunicator(_Delegating):
    """The table [V, D], split over the weight group by vocabulary or by hidden features.

    It is gathered ahead for the forward, as the plan says, and not at all in backward, which needs
    no weight; its gradient is reduce-scattered.
    """

    def __init__(
        self, communicator: WPCommunicator, weight: Channel, *, split_hidden: bool = False
    ) -> None:
        super().__init__(communicator, weight)
        self.split_hidden = split_hidden

    def table_layout(self, vocab_size: int, hidden_size: int) -> ParameterLayout:
        """This rank's part of the table."""
        return ParameterLayout(
            global_shape=(vocab_size, hidden_size),
            dim=int(self.split_hidden),
            parts=self.weight.size,
            index=self.weight.rank,
            reduce_over=Axis.WEIGHT_DATA,
        )


class HeadWeightParallelCommunicator(_Delegating):
    """The head: its weight is gathered, and its logits may change hands.

    Each rank computes all logits of its tokens, [B, S/p, V]. With `retain_out_sharded`
    True    an all-to-all brings them to [B, S, V/p], for a vocabulary-parallel loss;
    False   they are gathered along the sequence, [B, S, V], on every rank alike;
    None    they stay as they are.

    The gradient goes the same way back: of logits that all ranks have alike, each takes its part.
    """

    def __init__(
        self,
        communicator: WPCommunicator,
        weight: Channel,
        tensor: Channel,
        *,
        retain_out_sharded: bool | None = None,
    ) -> None:
        super().__init__(communicator, weight)
        self.tensor = tensor
        self.retain_out_sharded = retain_out_sharded

    def output_hook(self, x: Tensor, *, tag: Tag = UNNAMED) -> Pending:
        """The logits: x [B, S/p, V] -> [B, S, V/p], [B, S, V] or as they are."""
        match self.retain_out_sharded:
            case True:
                return self.tensor.all_to_all(x, scatter=2, gather=1, tag=_logits(tag))
            case False:
                return self.tensor.all_gather(x, dim=1, tag=_logits(tag))
            case None:
                return Pending.ready(x)

    def grad_output_hook(self, x: Tensor, *, tag: Tag = UNNAMED) -> Pending:
        """The dual of `output_hook`, back to [B, S/p, V]."""
        match self.retain_out_sharded:
            case True:
                return self.tensor.all_to_all(x, scatter=1, gather=2, tag=_logits(tag))
            case False:
                return Pending.ready(x.chunk(self.tensor.size, dim=1)[self.tensor.rank])
            case None:
                return Pending.ready(x)


def _logits(tag: Tag) -> Tag:
    return tag._replace(purpose=Purpose.LOGITS)


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
