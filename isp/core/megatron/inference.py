"""Column and row linears for inference over a tensor group, and the buffers that they share.

S sequence, B batch, I in features, O out features, D model size, V vocabulary, N tokens at once; p
ranks, /p = split over them. A token is a row: [S, B, ..] is any number of dims before the last, the
first of which is split.

    norm + column    y = norm(residual) W^T + b          [S/p, B, D] -> [S, B, O/p]
    row + norm       residual += x W^T + b; norm of it   [S, B, I/p] -> [S, B, D]

Between a row linear and the next column linear a rank has its own tokens only. The output of the
row linear is reduce-scattered, added to the residual, normed and all-gathered in one call of the
workspace: by symmetric memory where the device has it, by the channel elsewhere. The layers use the
weights of trained layers, which stay as they are.

[Note: Tokens that are not split] Where S does not divide by p, as when few sequences are decoded,
every rank has all tokens: the sum over the ranks is all-reduced, and every rank adds and norms all
of it. That is the same number of bytes in one collective instead of two, and the norm of a few
tokens costs nothing. A workspace that never splits is mtp, one that does is msp.

[Note: Static buffers] The results of the layers lie in buffers that are made once, for
`max_tokens`: no call allocates, the host reads nothing back, and a CUDA graph finds the same
addresses at every replay. So a result is valid until the next call that writes there: that of a row
linear until the next row linear of the workspace, that of a column linear until the next one of its
slot.

Source: Megatron-LM, core/tensor_parallel/inference_layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from isp.core.comm import Channel
from isp.core.comm.channel import check_channel
from isp.core.comm.symmetric_memory import SymmetricRows, why_no_symmetric_rows
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.linear import ParallelLinear
from isp.core.megatron.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = [
    "InferenceLayerNormColumnParallelLinear",
    "InferenceRowParallelLinear",
    "InferenceVocabParallelEmbedding",
    "InferenceWorkspace",
    "Norm",
    "Residual",
]

CPU = torch.device("cpu")


class InferenceLayerNormColumnParallelLinear(nn.Module):
    """y = norm(x) W^T + b with the outputs split: W [O/p, I], b [O/p] of a trained layer.

        y = layer(x)      # one value, not (y, bias): the bias is added

    x    the residual, which is normed and gathered first; or [S, B, I], which a row linear has
         normed and gathered
    y    [S, B, O/p], valid until the next call of a layer of the same `slot` (by default its own)
         and O/p

    Raises ValueError if the layer is not one of mtp, msp or fsp over the workspace's group, has
    options that inference has not, or norms another size than the workspace's.
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
        if norm is not None:
            _check_size(linear, "input", linear.weight.shape[1], workspace)
        self.linear, self.norm, self.workspace = linear, norm, workspace
        self._buffer = workspace.output(slot or self, linear.weight.shape[0])
        self._weight, self._bias = _own(linear)
        self._out: Tensor | None = None

    def forward(self, x: Residual | Tensor) -> Tensor:
        """Return y [S, B, O/p] of the residual or of its norm [S, B, I]."""
        if isinstance(x, Residual):
            if self.norm is None:
                raise ValueError(f"{self.linear.title} was made without a norm: give it one")
            x = self.workspace.norm(x, self.norm, layer=self.linear.name)
        _check_features(self.linear, x, self._weight)
        out, tokens = self._out, x.shape[:-1]
        if out is None or out.shape[:-1] != tokens:
            out = self._out = self.workspace.first(self._buffer, tokens)
        _multiply(x, self._weight, self._bias, out)
        return out


class InferenceRowParallelLinear(nn.Module):
    """y = x W^T + b with the inputs split: W [O, I/p], b [O] of a trained layer.

        y = layer(x)                                 # one value, not (y, bias)
        normed = layer.add_norm(x, residual, norm)   # residual += y, and its norm

    x         [S, B, I/p]
    y         [S/p, B, O], or [S, B, O] where tokens are not split; valid until the next call of a
              row linear of the workspace
    normed    [S, B, O] on every rank

    Raises ValueError as the column linear does, or if O is not the size of the workspace.
    """

    def __init__(self, linear: ParallelLinear, workspace: InferenceWorkspace) -> None:
        super().__init__()
        _check(linear, workspace, dim=1)
        _check_size(linear, "output", linear.weight.shape[0], workspace)
        self.linear, self.workspace = linear, workspace
        self._weight, self._bias = _own(linear)

    def forward(self, x: Tensor) -> Tensor:
        """Return y of this rank's tokens: x [S, B, I/p] -> [S/p, B, O], or [S, B, O]."""
        tokens = self._partial(x)
        y = self.workspace.reduce(tokens, self.linear.name)
        if self._bias is not None:
            y.add_(self._bias)
        return y.view(-1, *tokens[1:], y.shape[-1])

    def add_norm(self, x: Tensor, residual: Residual, norm: Norm) -> Tensor:
        """Add y to the residual, and return the norm of the sum: x [S, B, I/p] -> [S, B, O]."""
        self._partial(x)
        layer = self.linear.name
        return self.workspace.add_norm(residual, norm, bias=self._bias, layer=layer)

    def _partial(self, x: Tensor) -> Sequence[int]:
        _check_features(self.linear, x, self._weight)
        tokens = x.shape[:-1]
        _multiply(x, self._weight, None, self.workspace.partial(tokens))
        return tokens


class InferenceVocabParallelEmbedding(nn.Module):
    """Embedding with a trained table [V/p, D] split by vocabulary: ids [S, B] -> a `Residual`.

    Raises ValueError as the column linear does, or if D is not the size of the workspace.
    """

    def __init__(self, table: VocabParallelEmbedding, workspace: InferenceWorkspace) -> None:
        super().__init__()
        _check(table, workspace, dim=0)
        _check_size(table, "output", table.weight.shape[1], workspace)
        self.table, self.workspace = table, workspace
        self._wanted, self._row = (workspace.buffer(1, torch.long).view(-1) for _ in range(2))
        self._foreign = workspace.buffer(1, torch.bool)

    def forward(self, ids: Tensor) -> Residual:
        """Return the residual that begins with the rows of ids [S, B]."""
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
    """Return this rank's weight, transposed to [I, O], and bias, as views without gradients."""
    return linear.weight.detach().t(), None if linear.bias is None else linear.bias.detach()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x W^T + b of x [.., I] and W^T [I, O] to `out` [.., O], with the bits of `F.linear`."""
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


def _check_size(
    layer: ParallelLinear | VocabParallelEmbedding,
    side: str,
    size: int,
    workspace: InferenceWorkspace,
) -> None:
    """Refuse a layer whose features on one side are not those of the residual."""
    if size != workspace.size:
        raise ValueError(
            f"{layer.title} has {size} {side} features, and the residual of the workspace"
            f" {workspace.size}: make the workspace with size={size}"
        )


def _check_features(layer: ParallelLinear, x: Tensor, weight: Tensor) -> None:
    """Refuse x [.., I] that cannot be multiplied by this rank's W^T [I, O]."""
    if x.shape[-1] != weight.shape[0]:
        whole = layer.layouts["weight"].global_shape[1]
        split = "" if weight.shape[0] == whole else f", this rank's part of {whole}"
        raise ValueError(
            f"{layer.title}: x of shape {list(x.shape)} has {x.shape[-1]} features, expected"
            f" {weight.shape[0]}{split}"
        )


class Norm(Protocol):
    """An RMS norm over the model size: x / sqrt(mean(x^2) + eps) * weight."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, eq=False)
class Residual:
    """The residual stream of a model: the sum that blocks add to."""

    value: Tensor
    """The tokens of this rank [S/p, B, D], or all where they are not split."""
    tokens: tuple[int, ...]
    """The sizes [S, B] of the tokens of all ranks."""


class _ByChannel:
    """The collectives of `SymmetricRows` over a channel, with the bits of the training layers."""

    def __init__(self, channel: Channel, rows: Tensor, received: Tensor | None) -> None:
        self.channel, self.rows, self._received = channel, rows, received

    def reduce_scatter(self, x: Tensor, out: Tensor, tag: Tag) -> None:
        received = None if self._received is None else self._received[: len(x)]
        self.channel.reduce_scatter_into(out, x, received=received, tag=tag).wait()

    def all_gather(self, x: Tensor, out: Tensor, tag: Tag) -> None:
        self.channel.all_gather_into(out, x, tag=tag).wait()

    def all_reduce(self, x: Tensor, tag: Tag) -> None:
        self.channel.all_reduce_(x, tag=tag).wait()


class InferenceWorkspace:
    """The group of a model's inference layers, and their buffers for `max_tokens` tokens.

    All ranks of the group make it together. `size` is D. `split_tokens` is about [Note: Tokens that
    are not split]. `symmetric_memory`: True demands it, False uses the channel, None takes it where
    the device has it. Raises ValueError if symmetric memory is demanded and unavailable.
    """

    def __init__(
        self,
        group: Channel,
        size: int,
        *,
        max_tokens: int,
        split_tokens: bool = True,
        symmetric_memory: bool | None = None,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_channel("group", group)
        self.group, self.size, self.max_tokens = group, size, max_tokens
        self.split_tokens = split_tokens and group.size > 1
        self.device, self.dtype = device, dtype
        reason = why_no_symmetric_rows(group, size, device=device, dtype=dtype)
        if reason and symmetric_memory:
            raise ValueError(f"symmetric_memory=True cannot serve: {reason}")
        self._exchange: SymmetricRows | _ByChannel
        if reason or symmetric_memory is False:
            received = self.buffer(size) if self.split_tokens and group.sums_locally else None
            self._exchange = _ByChannel(group, self.buffer(size), received)
        else:
            self._exchange = SymmetricRows(group, max_tokens, size, device=device, dtype=dtype)
        self._residual = self.buffer(size)
        self._part = self.buffer(size, rows=max_tokens // group.size * self.split_tokens)
        wide = torch.promote_types(dtype, torch.float32)
        self._wide = None if wide == dtype else self.buffer(size, wide)
        self._scale = self.buffer(1, wide)
        self._outputs: dict[object, Tensor] = {}
        self._views: _Views | None = None

    def splits(self, tokens: Sequence[int]) -> bool:
        """Return whether each rank has a part of tokens [S, B] between the linears."""
        return self._views_of(tokens).splits

    def residual(self, tokens: Sequence[int]) -> Residual:
        """Return the buffer for the residual of tokens [S, B], not filled; a workspace has one."""
        return self._views_of(tokens).residual

    def begin(self, x: Tensor) -> Residual:
        """Return the residual that begins with x [S, B, D], which is the same on every rank."""
        residual = self.residual(x.shape[:-1])
        if self.splits(residual.tokens):
            x = x.chunk(self.group.size)[self.group.rank]
        residual.value.copy_(x.detach())
        return residual

    def partial(self, tokens: Sequence[int]) -> Tensor:
        """Return the buffer for this rank's part of a sum over the ranks: [S B, D]."""
        return self._views_of(tokens).partial

    def reduce(self, tokens: Sequence[int], layer: str) -> Tensor:
        """Return the sum of the ranks' `partial`: this rank's tokens [S/p B, D], or all."""
        views = self._views_of(tokens)
        if self.group.size > 1:
            tag = Tag(Purpose.ACTIVATION, layer, "y")
            if views.splits:
                self._exchange.reduce_scatter(views.partial, views.summed, tag)
            else:
                self._exchange.all_reduce(views.partial, tag)
        return views.summed

    def add_norm(
        self, residual: Residual, norm: Norm, *, bias: Tensor | None = None, layer: str = ""
    ) -> Tensor:
        """Add the sum of the ranks' `partial` and `bias` to the residual, and return its norm.

        The norm is that of all tokens, [S, B, D]. Where tokens are split: reduce-scatter,
        additions, RMS norm and all-gather.
        """
        own = self.reduce(residual.tokens, layer)
        if bias is not None:
            own.add_(bias)
        self._views_of(residual.tokens).rows.add_(own)
        return self.norm(residual, norm, layer=layer)

    def norm(self, residual: Residual, norm: Norm, *, layer: str = "") -> Tensor:
        """Return the norm of the residual, of all tokens: [S, B, D]."""
        views = self._views_of(residual.tokens)
        self._norm(views, norm)
        if views.splits:
            tag = Tag(Purpose.ACTIVATION, layer, "normed y")
            self._exchange.all_gather(views.normed, views.partial, tag)
        return views.out

    def output(self, slot: object, features: int) -> Tensor:
        """Return the buffer that the column linears of a slot write to: [N, O/p]."""
        key = slot, features
        if key not in self._outputs:
            self._outputs[key] = self.buffer(features)
        return self._outputs[key]

    def buffer(
        self, columns: int, dtype: torch.dtype | None = None, rows: int | None = None
    ) -> Tensor:
        """Return new memory for [rows, columns], by default for `max_tokens` rows."""
        rows = self.max_tokens if rows is None else rows
        with _plainly():
            return torch.zeros(rows, columns, device=self.device, dtype=dtype or self.dtype)

    def first(self, buffer: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return the first rows of a buffer, as many as tokens [S, B] need: [S, B, columns]."""
        count = self._count(tokens, len(buffer))
        with _plainly():
            return buffer[:count].view(*tokens, -1)

    def _norm(self, views: _Views, norm: Norm) -> None:
        """Write `F.rms_norm` of the residual, in float32 at least and with the same bits."""
        x, out, scale, weight = views.rows, views.normed, views.scale, norm.weight.detach()
        wide = out if views.wide is None else views.wide
        torch.pow(x if wide is out else wide.copy_(x), 2, out=wide)
        torch.mean(wide, -1, keepdim=True, out=scale)
        scale.add_(norm.eps).rsqrt_()
        torch.mul(x, scale, out=wide).mul_(weight)
        if wide is not out:
            out.copy_(wide)

    def _views_of(self, tokens: Sequence[int]) -> _Views:
        """Return the views of tokens [S, B], made anew where the last call had other sizes."""
        if self._views is None or self._views.tokens != tokens:
            with _plainly():
                self._views = _Views(self, tuple(tokens))
        return self._views

    def _count(self, tokens: Sequence[int], most: int) -> int:
        count = prod(tokens)
        if count > most:
            raise ValueError(
                f"{count} tokens at once are more than max_tokens={most}, for which the buffers"
                " were made: raise max_tokens, or pass fewer tokens at a time"
            )
        return count


class _Views:
    """The views of a workspace's buffers for tokens [S, B]."""

    def __init__(self, workspace: InferenceWorkspace, tokens: tuple[int, ...]) -> None:
        group, size = workspace.group, workspace.size
        count = workspace._count(tokens, workspace.max_tokens)
        self.tokens = tokens
        self.splits = workspace.split_tokens and tokens[0] % group.size == 0
        self.partial = self.summed = self.normed = workspace._exchange.rows[:count]
        self.out = self.partial.view(*tokens, size)
        own = list(tokens)
        if self.splits:
            own[0] //= group.size
            count //= group.size
            self.summed = workspace._part[:count]
            self.normed = self.partial.chunk(group.size)[group.rank]  # which no other rank reads
        self.rows = workspace._residual[:count]
        """The residual."""
        self.residual = Residual(self.rows.view(*own, size), tokens)
        self.scale = workspace._scale[:count]
        self.wide = None if workspace._wide is None else workspace._wide[:count]


@contextmanager
def _plainly() -> Iterator[None]:
    """Make tensors and views that may be written to in any mode of autograd."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
