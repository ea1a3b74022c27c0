"""Layers for a user's own model, with sharded weights that an `ISPCommunicator` gathers.

B batch, S sequence, I in features, O out features, V vocabulary, D model size; p ranks of the
weight group, `/p` means split over them. A rank computes all features of its own tokens.

    communicator = isp.ISPCommunicator(channel, isp.ISPCommModelConfig(device=device))
    model = ...                                   # of ISPLinear(.., communicator=communicator)
    communicator.declare([isp.weight_blocks(model, [model.embedding, *model.layers, model.head])])

`tools/examples/own_model.py` is a complete script.

Parameters of other layers (norms) are whole on each rank: after backward, `sum_gradients` sums
their gradients over the group. `p.grad` of a sharded weight has this rank's rows, so the squares
for the global norm are summed over ranks; `state_dict` has this rank's rows, too. With activation
checkpointing, the recompute must run in `communicator.recomputing()`, and its blocks must be
declared `recomputed`:

    checkpoint(layer, x, use_reentrant=False,
               context_fn=lambda: (nullcontext(), communicator.recomputing()))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from isp.core.comm import Channel
from isp.core.comm.channel import check_channel
from isp.core.layers.embedding import look_up
from isp.core.layers.linear import Moves, ParallelLinear
from isp.core.layers.module import ParallelModule, bind_names
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.topology import Axis
from isp.core.weights.communicator import ISPCommunicator
from isp.core.weights.declare import DeclaredBlock, DeclaredUse
from isp.core.weights.uses import Use
from isp.core.weights.wp_communicator import WPCommunicator

__all__ = ["ISPEmbedding", "ISPLinear", "sum_gradients", "weight_blocks"]


class ISPLinear(ParallelLinear):
    """`nn.Linear` with its weight [O/p, I] and bias [O/p] sharded over the weight group.

    forward   weight and bias are all-gathered, ahead of time if the communicator has a plan
    backward  the weight is gathered again; gradients are reduce-scattered and in `p.grad` after
              `communicator.finish()`: sums over the weight group, not means

    Every rank draws the values of `nn.Linear` from torch's default CPU generator and keeps its
    rows, so that generator must be in the same state on all ranks (`torch.manual_seed`). On the
    meta device nothing is drawn: call `to_empty` and `reset_parameters` before `declare`.
    `layouts["weight"].shard(full)` returns a rank's rows of a full weight.
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
            device=_device(device, communicator),
            dtype=dtype or torch.get_default_dtype(),
        )
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values of `nn.Linear` again, on the CPU, and keep this rank's rows."""
        out_features, in_features = self.layouts["weight"].global_shape
        bias, dtype = self.bias is not None, self.weight.dtype
        _take(self, nn.Linear(in_features, out_features, bias, dtype=dtype, device="cpu"))


class ISPEmbedding(ParallelModule):
    """`nn.Embedding` with its table [V/p, D] sharded over the weight group.

    The table is gathered for forward only; its gradient is reduce-scattered. Initial values are
    drawn as in `ISPLinear`.
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
            device=_device(device, communicator),
            dtype=dtype or torch.get_default_dtype(),
        )
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values of `nn.Embedding` again, on the CPU; keep this rank's rows."""
        vocabulary, size = self.layouts["weight"].global_shape
        _take(self, nn.Embedding(vocabulary, size, dtype=self.weight.dtype, device="cpu"))

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows of the table: ids [B, S] -> [B, S, D]."""
        return look_up(ids, self.weight, self)


def weight_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], *, recomputed: Collection[nn.Module] = ()
) -> tuple[DeclaredBlock, ...]:
    """Return the declaration of a model chunk for `ISPCommunicator.declare`.

    `blocks` are modules of `model` in forward order, such as its embedding, its layers and its
    head. The weights of a block are gathered together, while the block before it computes. In a
    block, layers are expected in the order in which the module registers them; another order, or a
    layer called twice, gives the same results with less overlap. `recomputed`: the blocks whose
    activations are recomputed in backward.

    Also gives the layers of `model` their names, for errors and logs. Raises ValueError if a layer
    with a sharded weight is in no block, or in two.
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
        again = any(block is one for one in recomputed)
        declared.append(DeclaredBlock(name=title, module=block, uses=uses, recomputed=again))
    for layer in _gathered_layers(model):
        if id(layer) not in seen:
            raise ValueError(
                f"{layer.title} is in no block, so no plan gathers its weight ahead: pass it, or"
                " the module that it is part of, in forward order"
            )
    return tuple(declared)


def sum_gradients(model: nn.Module, channel: Channel) -> None:
    """Sum over `channel` the gradients of the parameters of `model` that are not sharded.

    Call this after backward on all ranks; a parameter without a gradient counts as zeros. The
    gradients of `ISPLinear` and `ISPEmbedding` are summed by `communicator.finish()`.
    """
    check_channel("channel", channel)
    sharded = {id(p) for layer in _gathered_layers(model) for p in layer.parameters()}
    whole = [p for p in model.parameters() if p.requires_grad and id(p) not in sharded]
    for p in whole:  # a parameter may have a gradient on some ranks only: all must join the sum
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    sums = [channel.all_reduce(p.grad) for p in whole if p.grad is not None]
    for p, total in zip(whole, sums, strict=True):
        p.grad = total.wait()


def _device(given: torch.device | str | None, communicator: ISPCommunicator) -> torch.device:
    """Return the device of a new layer: `given`, else meta in `torch.device("meta")`, else the
    communicator's.
    """
    default = torch.get_default_device()
    if given is not None or default.type == "meta":
        return torch.device(default if given is None else given)
    return communicator.device


def _gathered_layers(module: nn.Module) -> list[ISPLinear | ISPEmbedding]:
    return [layer for layer in module.modules() if isinstance(layer, ISPLinear | ISPEmbedding)]


def _rows(communicator: ISPCommunicator, *shape: int) -> ParameterLayout:
    """Return the `ParameterLayout` of a parameter that is cut by rows over the weight group."""
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
    """Copy this rank's rows of the parameters of `full` into `layer`."""
    for name, parameter in full.named_parameters():
        layer.get_parameter(name).copy_(layer.layouts[name].shard(parameter))
