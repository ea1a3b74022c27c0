"""Layers of a small model for any mode, built from the classes of `isp.core.layers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isp.core.comm import Channel, Mesh
from isp.core.internevo import EmbeddingWeightParallelCommunicator
from isp.core.layers.embedding import look_up
from isp.core.layers.head import HeadLoss
from isp.core.layers.linear import Moves, ParallelLinear, Role, moves_for
from isp.core.layers.module import MasterStream, ParallelModule, named_parameters
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh import Mode, ParallelConfig, TensorConfig, Topology, WeightConfig
from isp.core.mesh.config import PipelineConfig, Sequence2DConfig, Zero1Config
from isp.core.mesh.layout import ParameterLayout
from isp.core.weights.declare import DeclaredBlock, DeclaredUse, WeightHolder
from isp.core.weights.uses import Use
from isp.core.weights.wp_communicator import LocalWeights, WPCommunicator

__all__ = [
    "CPU",
    "Operations",
    "RMSNorm",
    "Table",
    "ToolkitLayers",
    "blocks_of",
    "init_weights",
    "topology",
    "weight_mesh",
]

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class ToolkitLayers(RankLayers):
    """Builds layers so that a model's code is the same in every mode; by default isp on one
    rank.
    """

    mode: Mode = Mode.ISP
    tensor: Channel = field(default_factory=lambda: Channel.solo("tensor"))
    weight: Channel = field(default_factory=lambda: Channel.solo("weight"))
    communicator: WPCommunicator = field(default_factory=LocalWeights)
    device: torch.device = CPU
    dtype: torch.dtype = torch.float64

    @property
    def feature_parts(self) -> int:
        """The number of ranks over which features are split."""
        return self.tensor.size if self.splits_features else 1

    def column(
        self, in_features: int, out_features: tuple[int, ...], *, bias: bool = False, std: float
    ) -> ParallelLinear:
        """Return a linear to the fused `out_features`, of which each rank computes its share."""
        total = sum(out_features)
        assert all(n % self.feature_parts == 0 for n in out_features), (out_features, self.tensor)
        segments = out_features if self.splits_features else (total,)
        layer = ParallelLinear(
            self.sharded_layout((total, in_features), dim=0, segments=segments),
            bias_layout=self.sharded_layout((total,), dim=0, segments=segments) if bias else None,
            moves=moves_for(self.mode, Role.COLUMN, self.tensor),
            communicator=self.communicator,
            device=self.device,
            dtype=self.dtype,
        )
        return _with_std(layer, std)

    def row(
        self, in_features: int, out_features: int, *, bias: bool = False, std: float
    ) -> ParallelLinear:
        """Return a linear from split `in_features`, the counterpart of `column`."""
        assert in_features % self.feature_parts == 0, (in_features, self.tensor)
        bias_layout = None
        if bias and self.splits_features:
            bias_layout = self.replicated_layout((out_features,))
        elif bias:
            bias_layout = self.sharded_layout((out_features,), dim=0)
        layer = ParallelLinear(
            self.sharded_layout((out_features, in_features), dim=int(self.splits_features)),
            bias_layout=bias_layout,
            bias_after_move=self.splits_features,
            moves=moves_for(self.mode, Role.ROW, self.tensor),
            communicator=self.communicator,
            device=self.device,
            dtype=self.dtype,
        )
        return _with_std(layer, std)

    def embedding(self, vocab_size: int, hidden_size: int, *, std: float) -> Table:
        """Return the token embedding, split by vocabulary (in isp mode optionally by hidden
        size).
        """
        layout, communicator = self.sharded_layout((vocab_size, hidden_size), dim=0), None
        if not self.splits_features:
            communicator = EmbeddingWeightParallelCommunicator(
                self.communicator, self.weight, split_hidden=self.embed_split_hidden
            )
            layout = communicator.table_layout(vocab_size, hidden_size)
        # As in a row linear, each rank has a partial sum.
        moves = moves_for(self.mode, Role.ROW, self.tensor)
        table = Table(communicator or self.communicator, moves)
        table.add_shard("weight", layout, device=self.device, dtype=self.dtype)
        return _with_std(table, std)

    def head(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        std: float,
        tied_to: Table | None = None,
        loss_chunk_tokens: int = 0,
    ) -> Head:
        """Return the linear to the logits, split by vocabulary; it may share the embedding's table.

        Its loss is computed `loss_chunk_tokens` tokens at a time, or with 0 all at once.
        """
        layout = self.sharded_layout((vocab_size, hidden_size), dim=0)
        if tied_to is not None:
            layout = tied_to.layouts["weight"]
        column = moves_for(self.mode, Role.COLUMN, self.tensor)
        head = Head(
            layout,
            moves=column if self.splits_features else self.logit_moves,
            communicator=self.communicator,
            has_weight=tied_to is None,
            device=self.device,
            dtype=self.dtype,
        )
        if tied_to is not None:
            head.weight = tied_to.weight
        head.losses = self.head_loss(head, vocab_size, chunk_tokens=loss_chunk_tokens)
        return _with_std(head, std)

    def rms_norm(self, size: int, *, eps: float, per_head: bool = False) -> RMSNorm:
        """Return a norm over the hidden size of a token or (`per_head`) over each head."""
        layout = self.replicated_layout((size,), sees_part=True if per_head else None)
        return RMSNorm(layout, eps=eps, device=self.device, dtype=self.dtype)


class Head(ParallelLinear):
    """The linear to the logits, split by vocabulary, and their loss."""

    losses: HeadLoss

    def forward(
        self, x: Tensor, labels: Tensor | None = None, expected: Tensor | None = None
    ) -> Tensor:
        """Return the logits, [B, S, D] -> [B, S, V'], or with `labels` the sum of their losses."""
        return super().forward(x) if labels is None else self.losses.total(x, labels, expected)


class RMSNorm(ParallelModule):
    """torch's RMSNorm with a weight that every rank holds whole."""

    weight: nn.Parameter

    def __init__(
        self, layout: ParameterLayout, *, eps: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps = eps
        self.add_shard("weight", layout, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Table(ParallelModule):
    """Token embeddings with any communicator and transfers."""

    weight: nn.Parameter
    bias: nn.Parameter | None = None
    padding_idx = -1
    deterministic = False

    def __init__(self, communicator: WPCommunicator, moves: Moves) -> None:
        super().__init__()
        self.communicator, self.moves = communicator, moves

    def forward(self, ids: Tensor) -> Tensor:
        return look_up(ids, self.weight, self)


class Operations(TorchDispatchMode):
    """Calls `note(name, args, out)` after every torch operation, such as `mm`; `args` are all
    arguments, positional or by name.
    """

    def __init__(self, note: Callable[[str, tuple[Any, ...], Any], object]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._note(func.overloadpacket.__name__, (*args, *kwargs.values()), out)
        return out


def topology(
    world: int = 1,
    *,
    mode: Mode = Mode.ISP,
    tensor: int = 1,
    weight: int = 1,
    pipeline: int = 1,
    zero1: int = -1,
    context: int = 1,
    **keys: bool,
) -> Topology:
    """Return the topology of groups of these sizes; `keys` are others of `parallel.weight`."""
    parallel = ParallelConfig(
        tensor=TensorConfig(size=tensor, mode=mode),
        weight=WeightConfig(size=weight, **keys),
        pipeline=PipelineConfig(size=pipeline),
        zero1=Zero1Config(size=zero1),
        sequence_2D=Sequence2DConfig(enable=context > 1, context_size=context),
    )
    return Topology.create(world, parallel)


def weight_mesh(rank: int, world: int) -> Mesh:
    """Return the channels of a rank where all ranks share one copy of the weights."""
    return Mesh(topology(world, weight=world), rank)


def blocks_of(*layers: WeightHolder) -> tuple[DeclaredBlock, ...]:
    """Return each layer as a block of its own, in this order."""
    return tuple(
        DeclaredBlock(name=f"{i}", module=layer, uses=(DeclaredUse(Use("use"), layer),))
        for i, layer in enumerate(layers)
    )


M = TypeVar("M", bound=ParallelModule)


def _with_std(layer: M, std: float) -> M:
    """Return the layer after setting the standard deviation of its initial weight."""
    layer.init_std = std
    return layer


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Set every parameter to its part of the weights of `seed`; norms are 1, biases 0."""
    for item in named_parameters(model):
        owner, _, local = item.name.rpartition(".")
        std = getattr(model.get_submodule(owner), "init_std", None)
        if local == "bias" or std is None:
            item.parameter.fill_(local != "bias")
            continue
        stream = MasterStream(seed, item.name)
        shard = stream.drawn(item.layout, lambda x, g, std=std: x.normal_(0.0, std, generator=g))
        item.parameter.copy_(shard)
