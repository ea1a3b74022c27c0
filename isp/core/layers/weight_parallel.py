"""Layers for a model of your own whose weights an `ISPCommunicator` gathers.

B batch, S sequence, I in features, O out features, V vocabulary, D model size; p ranks of the
weight group, /p = split over them. A rank computes all features of its own tokens.

    communicator = isp.ISPCommunicator(channel, isp.ISPCommModelConfig(device=device))
    model = ...                                   # of ISPLinear(.., communicator=communicator)
    communicator.declare([isp.weight_blocks(model, [model.embedding, *model.layers, model.head])])

`tools/examples/own_model.py` is a complete script.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from isp.core.layers.embedding import look_up
from isp.core.layers.linear import Moves, ParallelLinear
from isp.core.layers.module import ParallelModule, bind_names
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.topology import Axis
from isp.core.weights.communicator import ISPCommunicator
from isp.core.weights.declare import DeclaredBlock, DeclaredUse
from isp.core.weights.uses import Use
from isp.core.weights.wp_communicator import WPCommunicator

__all__ = ["ISPEmbedding", "ISPLinear", "weight_blocks"]


class ISPLinear(ParallelLinear):
    """`nn.Linear` with its weight [O/p, I] and bias [O/p] sharded over the weight group.

    forward   weight and bias all-gathered, ahead of time as the communicator's plan says
    backward  weight gathered again; gradients reduce-scattered, in `p.grad` after
              `communicator.finish()`: sums over the weight group, never means

    Every rank draws the values of `nn.Linear` from torch's default CPU generator and keeps its
    rows: that generator must be in the same state on all ranks (`torch.manual_seed`). On the meta
    device nothing is drawn. `layouts["weight"].shard(full)` returns a rank's rows of a full weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        communicator: ISPCommunicator,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            _rows(communicator, out_features, in_features),
            bias_layout=_rows(communicator, out_features) if bias else None,
            moves=Moves(),
            communicator=communicator,
            device=torch.device(device or communicator.device),
            dtype=dtype or torch.get_default_dtype(),
        )
        if not self.weight.is_meta:
            _take(self, nn.Linear(in_features, out_features, bias, dtype=dtype, device="cpu"))


class ISPEmbedding(ParallelModule):
    """`nn.Embedding` with its table [V/p, D] sharded over the weight group.

    The table is gathered for forward only; its gradient is reduce-scattered. Initial values: as
    `ISPLinear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None = None
    padding_idx = -1
    deterministic = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        communicator: ISPCommunicator,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layout = _rows(communicator, num_embeddings, embedding_dim)
        self.communicator: WPCommunicator = communicator
        self.moves = Moves()
        self.add_shard(
            "weight",
            layout,
            device=torch.device(device or communicator.device),
            dtype=dtype or torch.get_default_dtype(),
        )
        if not self.weight.is_meta:
            _take(self, nn.Embedding(num_embeddings, embedding_dim, dtype=dtype, device="cpu"))

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows of the table: ids [B, S] -> [B, S, D]."""
        return look_up(ids, self.weight, self)


def weight_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> tuple[DeclaredBlock, ...]:
    """Return the declaration of a model chunk for `ISPCommunicator.declare`.

    `blocks` are modules of `model` in forward order, such as its embedding, its layers and its
    head. The weights of a block are gathered as one unit, while the block before computes. Within
    a block, layers are used in the order in which the module registers them; another order, or a
    layer used twice, gives the same results with less overlap.

    Also names the layers of `model` for errors and logs. Raises ValueError if a layer with weights
    to gather is in no block, or in two.
    """
    bind_names(model)
    names = {id(module): name for name, module in model.named_modules()}
    declared, seen = [], dict[int, str]()
    for number, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise TypeError(f"blocks must be modules of the model, got {type(block).__name__}")
        title = names.get(id(block), str(number))
        layers = _gathered_layers(block)
        for layer in layers:
            if id(layer) in seen:
                raise ValueError(f"{layer.title} is in block {seen[id(layer)]} and in {title}")
            seen[id(layer)] = title
        uses = tuple(
            DeclaredUse(
                Use(layer.name, weight_in_backward=not isinstance(layer, ISPEmbedding)), layer
            )
            for layer in layers
        )
        declared.append(DeclaredBlock(name=title, module=block, uses=uses))
    for layer in _gathered_layers(model):
        if id(layer) not in seen:
            raise ValueError(
                f"{layer.title} is in no block, so no plan gathers its weight ahead: pass it, or"
                " the module that it is part of, in forward order"
            )
    return tuple(declared)


def _gathered_layers(module: nn.Module) -> list[ISPLinear | ISPEmbedding]:
    return [layer for layer in module.modules() if isinstance(layer, ISPLinear | ISPEmbedding)]


def _rows(communicator: ISPCommunicator, *shape: int) -> ParameterLayout:
    """Return the layout of this rank's rows of a parameter."""
    if not isinstance(communicator, ISPCommunicator):
        raise TypeError(
            f"communicator must be an isp.ISPCommunicator, got {type(communicator).__name__}: make"
            " one with isp.ISPCommunicator(channel, isp.ISPCommModelConfig(device=device))"
        )
    channel = communicator.channel
    return ParameterLayout(
        global_shape=shape, parts=channel.size, index=channel.rank, reduce_over=Axis.WEIGHT_DATA
    )


@torch.no_grad()
def _take(layer: ParallelModule, full: nn.Module) -> None:
    """Copy this rank's rows of the parameters of `full`."""
    for name, parameter in full.named_parameters():
        layer.get_parameter(name).copy_(layer.layouts[name].shard(parameter))
