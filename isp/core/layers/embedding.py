"""Token embedding from a table that is split over the vocabulary, or sharded and gathered.

B batch, S sequence, V vocabulary, D model size; ids are [B, S], the table [V, D], y is [B, S, D].
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.autograd import Function, once_differentiable, writable
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.linear import Moves, NeedsGrad, needs_grad
from isp.core.mesh.phase import Phase
from isp.core.weights.declare import WeightHolder
from isp.core.weights.wp_communicator import WPCommunicator

__all__ = ["TableLayer", "look_up"]


class TableLayer(WeightHolder, Protocol):
    """A layer that looks up rows of its table: `ISPEmbedding`, or a wrapper of a user's table."""

    communicator: WPCommunicator
    moves: Moves
    """The collectives of its output and of the output's gradient."""
    deterministic: bool
    """True if backward adds gradients in a fixed order, which is slower on CUDA."""

    @property
    def padding_idx(self) -> int:
        """The row without a gradient, as an index into the table that forward reads; -1: none."""


class _Embedding(Function):
    """The autograd function of a look-up in a table.

    forward   y = move_y(rows of the table, 0 for ids that other ranks hold)
    backward  dW = the rows of move_dy(dy), summed by id; to the communicator
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, layer: TableLayer) -> Tensor:
        foreign = None  # a mask of the ids whose rows other ranks hold; None: this rank has all
        if not layer.communicator.gathers_weights and layer.layouts["weight"].sharded:
            ((start, stop),) = layer.layouts["weight"].intervals()
            foreign = (ids < start) | (ids >= stop)
            # Other ranks' ids read row 0, so that the look-up is valid; its result is zeroed below.
            ids = (ids - start).masked_fill(foreign, 0)
        with layer.communicator.unshard(layer, Phase.FORWARD, weight) as full:
            table = full.weight
            ctx.layer, ctx.num_rows = layer, table.shape[0]
            y = F.embedding(ids, table)
        if foreign is not None:
            y = y.masked_fill(foreign.unsqueeze(-1), 0)
        ctx.save_for_backward(ids, foreign)
        y = layer.moves.y(y, tag=Tag(Purpose.ACTIVATION, layer.name, "y")).wait()
        return writable(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: TableLayer = ctx.layer
        _, needs = needs_grad(ctx, 2)
        if not needs:
            return None, None, None
        ids, foreign = ctx.saved_tensors
        dy = layer.moves.dy(dy, tag=Tag(Purpose.OUTPUT_GRADIENT, layer.name, "dy")).wait()
        # Ids whose rows other ranks hold: those ranks add the gradients, so here they are 0.
        if foreign is not None:
            dy = dy.masked_fill(foreign.unsqueeze(-1), 0)
        padding = layer.padding_idx
        if layer.deterministic:
            dw = dy.new_zeros(ctx.num_rows, dy.shape[-1])
            # On CUDA this sorts the ids first, so gradients are added in a fixed order.
            dw.index_put_((ids,), dy, accumulate=True)
            if padding >= 0:
                dw[padding] = 0
        else:
            # On CUDA this adds with atomics: the order, and so the rounding, differs between runs.
            dw = torch.ops.aten.embedding_dense_backward(dy, ids, ctx.num_rows, padding, False)
        returned = needs is NeedsGrad.VALUE
        return None, layer.communicator.grad_hook(dw, module=layer, returned=returned), None


def look_up(ids: Tensor, weight: Tensor, layer: TableLayer) -> Tensor:
    """Return the rows of a table for ids [B, S]: [B, S, D]. `weight` is this rank's shard."""
    y: Tensor = _Embedding.apply(ids, weight, layer)
    return y
