"""Column and row linears for inference over a tensor group, tokens split between them.

S sequence, B batch, I in features, O out features, D model size, V vocabulary; p ranks, /p = split
over them. [S, B, ..] stands for any number of dims before the last, the first of which is split.

    norm + column    y = norm(residual) W^T + b          [S/p, B, D] -> [S, B, O/p]
    row + norm       residual += x W^T + b; norm of it   [S, B, I/p] -> [S, B, D]

Between a row and the next column linear a rank has its tokens alone: what the row gives is
reduce-scattered, added to the residual, normed and all-gathered, in one call of the workspace
(`isp.core.megatron.workspace`), by symmetric memory where the device has it, by the channel
elsewhere. Weights are those of the training layers, which stay as they are.

Source: Megatron-LM, core/tensor_parallel/inference_layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from isp.core.layers.linear import ParallelLinear
from isp.core.megatron.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from isp.core.megatron.workspace import InferenceWorkspace, Norm, Residual

__all__ = [
    "InferenceLayerNormColumnParallelLinear",
    "InferenceRowParallelLinear",
    "InferenceVocabParallelEmbedding",
]


class InferenceLayerNormColumnParallelLinear(nn.Module):
    """y = norm(x) W^T + b with the outputs split: W [O/p, I], b [O/p] of a trained layer.

    x is the residual, which is normed and gathered first, or [S, B, I], which a row linear has
    normed and gathered; y is [S, B, O/p], good until the next call of a layer of the same `slot`
    (by default its own) and O/p.
    Raises ValueError if the layer is not one of mtp, msp or fsp over the workspace's group, or has
    options that inference has not.
    """

    def __init__(
        self,
        linear: ParallelLinear,
        workspace: InferenceWorkspace,
        *,
        norm: Norm | None = None,
        slot: str = "",
    ) -> None:
        super().__init__()
        _check(linear, workspace, dim=0)
        self.linear, self.norm, self.workspace = linear, norm, workspace
        self._buffer = workspace.output(slot or self, linear.weight.shape[0])
        self._weight, self._bias = _own(linear)
        self._out: Tensor | None = None

    def forward(self, x: Residual | Tensor) -> Tensor:
        """The residual or its norm [S, B, I] -> y [S, B, O/p]."""
        if isinstance(x, Residual):
            if self.norm is None:
                raise ValueError(f"{self.linear.title} was made without a norm: give it one")
            x = self.workspace.norm(x, self.norm, layer=self.linear.name)
        out, tokens = self._out, x.shape[:-1]
        if out is None or out.shape[:-1] != tokens:
            out = self._out = self.workspace.first(self._buffer, tokens)
        _multiply(x, self._weight, self._bias, out)
        return out


class InferenceRowParallelLinear(nn.Module):
    """y = x W^T + b with the inputs split: x [S, B, I/p], W [O, I/p], b [O] of a trained layer.

    Raises ValueError as the column linear does.
    """

    def __init__(self, linear: ParallelLinear, workspace: InferenceWorkspace) -> None:
        super().__init__()
        _check(linear, workspace, dim=1)
        self.linear, self.workspace = linear, workspace
        self._weight, self._bias = _own(linear)

    def forward(self, x: Tensor) -> Tensor:
        """x [S, B, I/p] -> y of this rank's tokens [S/p, B, O], or of all; until the next call."""
        tokens = self._partial(x)
        y = self.workspace.reduce(tokens, self.linear.name)
        if self._bias is not None:
            y.add_(self._bias)
        return y.view(-1, *tokens[1:], y.shape[-1])

    def add_norm(self, x: Tensor, residual: Residual, norm: Norm) -> Tensor:
        """Add y to the residual: x [S, B, I/p] -> the norm of the sum, of all tokens [S, B, O]."""
        self._partial(x)
        layer = self.linear.name
        return self.workspace.add_norm(residual, norm, bias=self._bias, layer=layer)

    def _partial(self, x: Tensor) -> Sequence[int]:
        tokens = x.shape[:-1]
        _multiply(x, self._weight, None, self.workspace.partial(tokens))
        return tokens


class InferenceVocabParallelEmbedding(nn.Module):
    """Rows of a trained table [V/p, D], split by vocabulary: the beginning of a residual.

    Raises ValueError as the column linear does.
    """

    def __init__(self, table: VocabParallelEmbedding, workspace: InferenceWorkspace) -> None:
        super().__init__()
        _check(table, workspace, dim=0)
        self.table, self.workspace = table, workspace
        self._wanted, self._row = (workspace.buffer(1, torch.long).view(-1) for _ in range(2))
        self._foreign = workspace.buffer(1, torch.bool)

    def forward(self, ids: Tensor) -> Residual:
        """Ids [S, B] -> the residual of their rows."""
        workspace, weight, tokens = self.workspace, self.table.weight.detach(), ids.shape
        partial = workspace.partial(tokens)
        count = len(partial)
        ((start, stop),) = self.table.layouts["weight"].intervals()
        wanted, row, foreign = self._wanted[:count], self._row[:count], self._foreign[:count]
        torch.sub(ids.view(-1), start, out=wanted)
        torch.clamp(wanted, 0, stop - start - 1, out=row)
        torch.ne(wanted, row, out=foreign.view(-1))
        torch.index_select(weight, 0, row, out=partial)
        partial.masked_fill_(foreign, 0)
        residual = workspace.residual(tokens)
        own = workspace.reduce(tokens, self.table.name)
        residual.value.copy_(own.view_as(residual.value))
        return residual


def _own(linear: ParallelLinear) -> tuple[Tensor, Tensor | None]:
    """This rank's part of a linear, where it lies, without gradients; the weight as [I, O]."""
    return linear.weight.detach().t(), None if linear.bias is None else linear.bias.detach()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x W^T + b of x [.., I] and W^T [I, O] into `out` [.., O], with the bits of `F.linear`."""
    if x.dim() != 2:
        x, out = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def _check(
    layer: ParallelLinear | VocabParallelEmbedding, workspace: InferenceWorkspace, *, dim: int
) -> None:
    """Refuse a layer whose weight is not cut along `dim` over the group, or is used otherwise."""
    title, weight, group = layer.title, layer.weight, workspace.group
    if layer.communicator.gathers_weights:
        raise ValueError(f"{title} gathers its weight, as in isp mode: build it in mtp or msp")
    if weight is None:
        raise ValueError(f"{title} has no weight of its own")
    layout = layer.layouts["weight"]
    parts, index = (layout.parts, layout.index) if layout.sharded else (1, 0)
    if (parts, index) != (group.size, group.rank) or (layout.sharded and layout.dim != dim):
        raise ValueError(
            f"{title} has part {index} of {parts} of dim {layout.dim}, and the workspace's group is"
            f" rank {group.rank} of {group.size}: build both over the same ranks"
        )
    if (weight.dtype, weight.device.type) != (workspace.dtype, workspace.device.type):
        raise ValueError(
            f"{title} is {weight.dtype} on {weight.device}, the workspace {workspace.dtype} on"
            f" {workspace.device}: make them alike"
        )
    if isinstance(layer, ColumnParallelLinear) and layer.gather_output:
        raise ValueError(f"{title} gathers its output, which inference leaves split")
    if isinstance(layer, RowParallelLinear) and not layer.input_is_parallel:
        raise ValueError(f"{title} splits its input itself: make it with input_is_parallel=True")
    if isinstance(layer, ParallelLinear) and layer.skip_bias_add:
        raise ValueError(f"{title} leaves its bias to others (skip_bias_add)")
