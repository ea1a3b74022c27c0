"""Classes with the names of InternEvo, for its users; the runtime does not use them.

| name | what it is | what the runtime uses instead |
|---|---|---|
| `SeqAllToAll` | all-to-all between two dims of one tensor | `Exchange`, which sends several tensors at once, in `isp.core.attention.all_to_all` |
| `ISPOverlapState` | the gathered weights of one model chunk, for inspection | `DeclaredWeight.gathered` of the communicator's weights |
| `ISPCommunicatorWrapper` | several communicators used as one | one `ISPCommunicator` with channels for dense weights and for experts |
| `EmbeddingWeightParallelCommunicator` | an embedding split by vocabulary or by hidden features | the model's `ISPCommunicator`; an embedding is one more layer of the plan |
| `HeadWeightParallelCommunicator` | a head whose logits are exchanged or gathered | the model's `ISPCommunicator`, and `logit_exchange` |
| `WPCommunicator.communication_mode` | "isp" or "tp" | `gathers_weights` |
| `WPCommunicator.weight_hook` | a copy of a full weight | `unshard`, which lends the full weight and knows the plan |
| `WPCommunicator.grad_hook` | the gradient of a shard, summed | `grad_hook` itself, with the layer in place of a name |

B batch, S sequence, D hidden size, V vocabulary; p ranks, /p = split over them.
Source: InternEvo, `internlm/core/parallel/comm/isp.py`.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isp.core.attention.all_to_all import exchanged, launch, two_dims
from isp.core.comm import Channel, Pending
from isp.core.comm.tag import UNNAMED, Purpose, Tag
from isp.core.layers.rank_layers import logit_exchange
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.phase import Phase
from isp.core.mesh.topology import Axis
from isp.core.weights.communicator import ISPCommunicator
from isp.core.weights.declare import WeightHolder
from isp.core.weights.gather_reduce import DeclaredWeight
from isp.core.weights.gradients import GradientSink, ProductSink
from isp.core.weights.uses import Action
from isp.core.weights.wp_communicator import (
    FullWeights,
    WeightGradientRoute,
    WPCommunicator,
)

__all__ = [
    "EmbeddingWeightParallelCommunicator",
    "HeadWeightParallelCommunicator",
    "ISPCommunicatorWrapper",
    "ISPOverlapState",
    "SeqAllToAll",
]


class SeqAllToAll:
    """An all-to-all that shards dim `scatter` over the ranks and gathers dim `gather`.

    x [.., N, .., M/p, ..] -> [.., N/p, .., M, ..]; backward swaps the two dims.
    Raises ValueError if N is not a multiple of the channel's size.
    Source: Jacobs et al. 2023 (DeepSpeed Ulysses).
    """

    @staticmethod
    def apply(channel: Channel, x: Tensor, scatter: int, gather: int) -> Tensor:
        """Return the exchanged x, after waiting for it."""
        return exchanged(two_dims(channel, x, scatter, gather), x)[0]

    @staticmethod
    def launch(channel: Channel, x: Tensor, scatter: int, gather: int) -> Pending:
        """Launch the exchange of x, and return its result as a `Pending`, bit-equal to `apply`."""
        arrive = launch(two_dims(channel, x, scatter, gather), (x,))
        return Pending(lambda: arrive()[0])


@dataclass(frozen=True, eq=False)
class ISPOverlapState:
    """The weights of one model chunk, each with its gathered tensors, if any."""

    weights: tuple[DeclaredWeight, ...]
    """The chunk's weights; `gathered` of each has its gathered tensors, or is None."""

    @classmethod
    def of_chunks(cls, communicator: ISPCommunicator) -> list[ISPOverlapState]:
        """Return the state of each chunk; a shared weight is listed in its first chunk only."""
        # A weight is popped where it is listed first, so that a shared one is not listed again.
        left = dict(communicator._gatherer.weights)
        return [
            cls(
                tuple(
                    left.pop(use.weight)
                    for block in chunk
                    for use in block.uses
                    if use.weight is not None and use.weight in left
                )
            )
            for chunk in communicator._chunks
        ]


class ISPCommunicatorWrapper:
    """Several communicators, such as for dense and expert weights, with the methods of one.

    Each method calls all communicators in their order; layers call their own communicator directly.
    All follow the same actions, each by the plan of the blocks that were declared to it.
    """

    def __init__(self, communicators: Sequence[ISPCommunicator]) -> None:
        self.communicators = tuple(communicators)

    def deliver_to(self, sink: GradientSink) -> None:
        """Deliver all reduced gradients to `sink`."""
        for communicator in self.communicators:
            communicator.deliver_to(sink)

    def register_prerequisite_for_forward_prefetch_hooks(
        self, fn: Callable[[nn.Module], None]
    ) -> None:
        """Let each communicator call `fn` with a block before it gathers the block's weights.

        Raises TypeError if `fn` is not callable.
        """
        for communicator in self.communicators:
            communicator.register_prerequisite_for_forward_prefetch_hooks(fn)

    def begin(self, actions: Sequence[Action]) -> None:
        """Begin a step that runs `actions`: launch the first gathers of each communicator."""
        for communicator in self.communicators:
            communicator.begin(actions)

    def finish(self) -> None:
        """Deliver all gradients and release all buffers."""
        for communicator in self.communicators:
            communicator.finish()

    def drain(self) -> None:
        """Drop all gathered weights."""
        for communicator in self.communicators:
            communicator.drain()

    def switch_current_model_chunk(self, chunk: int) -> None:
        """Tell all communicators which model chunk runs from now on."""
        for communicator in self.communicators:
            communicator.switch_current_model_chunk(chunk)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Treat forward passes in this context as recomputations."""
        with ExitStack() as stack:
            for communicator in self.communicators:
                stack.enter_context(communicator.recomputing())
            yield


class _Delegating(WPCommunicator):
    """The base of communicators for one layer: forwards calls to the whole model's communicator."""

    def __init__(self, communicator: WPCommunicator, weight: Channel) -> None:
        self.communicator = communicator
        self.gathers_weights = communicator.gathers_weights
        self.weight = weight

    def recomputing(self) -> AbstractContextManager[None]:
        return self.communicator.recomputing()

    @property
    def is_recomputing(self) -> bool:  # type: ignore[override]
        return self.communicator.is_recomputing

    @property
    def route(self) -> WeightGradientRoute | None:
        """Route of weight gradients in the model's communicator, which all layers share."""
        return self.communicator.route

    @route.setter
    def route(self, route: WeightGradientRoute | None) -> None:
        self.communicator.route = route

    @property
    def product_sink(self) -> ProductSink | None:  # type: ignore[override]
        return self.communicator.product_sink

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.communicator.gradient_dtype(dtype)

    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> AbstractContextManager[FullWeights]:
        return self.communicator.unshard(module, phase, weight, bias)

    def pass_by(self, key: Hashable) -> None:
        self.communicator.pass_by(key)

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        return self.communicator.grad_hook(grad, module=module, is_bias=is_bias, returned=returned)


class EmbeddingWeightParallelCommunicator(_Delegating):
    """A communicator for an embedding table [V, D], sharded by vocabulary or by hidden features.

    The table is sharded over the weight group, and the plan prefetches it for forward. Backward
    does not need it, so it is not gathered again; the gradient is reduce-scattered.
    """

    def __init__(
        self, communicator: WPCommunicator, weight: Channel, *, split_hidden: bool = False
    ) -> None:
        super().__init__(communicator, weight)
        self.split_hidden = split_hidden

    def table_layout(self, vocab_size: int, hidden_size: int) -> ParameterLayout:
        """Return how the table is cut over the weight group, and which part this rank has."""
        return ParameterLayout(
            global_shape=(vocab_size, hidden_size),
            dim=int(self.split_hidden),
            parts=self.weight.size,
            index=self.weight.rank,
            reduce_over=Axis.WEIGHT_DATA,
        )


class HeadWeightParallelCommunicator(_Delegating):
    """A communicator for the head, whose weight is gathered and whose logits may be exchanged.

    Each rank computes all logits of its tokens, [B, S/p, V]. With `retain_out_sharded`
    True    an all-to-all exchanges them to [B, S, V/p], for a vocabulary-parallel loss;
    False   they are all-gathered along the sequence to [B, S, V], equal on all ranks;
    None    they remain [B, S/p, V].

    The gradient is exchanged back in the same way; for False, where all ranks have the same logits,
    each rank only takes the gradient of its own tokens.
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
        """Launch the exchange of logits x [B, S/p, V] -> [B, S, V/p], [B, S, V] or x itself."""
        match self.retain_out_sharded:
            case True:
                return logit_exchange(self.tensor).y(x, tag=tag)
            case False:
                tag = tag._replace(purpose=Purpose.LOGITS)
                return self.tensor.all_gather(x, dim=1, tag=tag)
            case None:
                return Pending.ready(x)

    def grad_output_hook(self, x: Tensor, *, tag: Tag = UNNAMED) -> Pending:
        """Launch the exchange of the gradient of `output_hook`'s result back to [B, S/p, V]."""
        match self.retain_out_sharded:
            case True:
                return logit_exchange(self.tensor).dy(x, tag=tag)
            case False:  # all ranks compute the same gradient: no communication
                return Pending.ready(x.chunk(self.tensor.size, dim=1)[self.tensor.rank])
            case None:
                return Pending.ready(x)
