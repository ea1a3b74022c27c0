"""The two ends of a model in isp mode: the embedding's table, and the head with its logits.

B batch, S sequence, D hidden size, V vocabulary; /p = split over the ranks of a sequence.
Source: InternEvo, `internlm/core/parallel/comm/isp.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from isp.comm import Channel, Pending
from isp.comm.cargo import UNNAMED, Cargo, Purpose
from isp.parallel.layout import ParameterLayout
from isp.parallel.phase import Phase
from isp.parallel.topology import Axis
from isp.weights.declare import WeightHolder
from isp.weights.wp import FullWeights, WPCommunicator

__all__ = ["EmbeddingWeightParallelCommunicator", "HeadWeightParallelCommunicator"]


class _Delegating(WPCommunicator):
    """Hands every weight on to the communicator of the whole model."""

    def __init__(self, communicator: WPCommunicator, weight: Channel) -> None:
        self.communicator = communicator
        self.gathers_weights = communicator.gathers_weights
        self.weight = weight

    @property
    def communication_mode(self) -> str:
        return self.communicator.communication_mode

    def layout(self, shape: tuple[int, int], *, dim: int = 0) -> ParameterLayout:
        """This rank's part of a table of `shape`."""
        return ParameterLayout(
            global_shape=shape,
            dim=dim,
            parts=self.weight.size,
            index=self.weight.rank,
            reduce_over=Axis.WEIGHT_DATA,
        )

    def recomputing(self) -> AbstractContextManager[None]:
        return self.communicator.recomputing()

    def visit(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        return self.communicator.visit(module, phase, weight, bias)

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
        return self.layout((vocab_size, hidden_size), dim=int(self.split_hidden))


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

    def output_hook(self, x: Tensor, *, cargo: Cargo = UNNAMED) -> Pending:
        """The logits: x [B, S/p, V] -> [B, S, V/p], [B, S, V] or as they are."""
        match self.retain_out_sharded:
            case True:
                return self.tensor.all_to_all(x, scatter=2, gather=1, cargo=_logits(cargo))
            case False:
                return self.tensor.all_gather(x, dim=1, cargo=_logits(cargo))
            case None:
                return Pending.ready(x)

    def grad_output_hook(self, x: Tensor, *, cargo: Cargo = UNNAMED) -> Pending:
        """The dual of `output_hook`, back to [B, S/p, V]."""
        match self.retain_out_sharded:
            case True:
                return self.tensor.all_to_all(x, scatter=1, gather=2, cargo=_logits(cargo))
            case False:
                return Pending.ready(x.chunk(self.tensor.size, dim=1)[self.tensor.rank])
            case None:
                return Pending.ready(x)


def _logits(cargo: Cargo) -> Cargo:
    return cargo._replace(purpose=Purpose.LOGITS)
