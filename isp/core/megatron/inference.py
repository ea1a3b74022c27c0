"""Column and row linears for inference over a tensor group, and the buffers that they share.

S sequence, B batch, I in features, O out features, D model size, V vocabulary, N = `max_tokens`; p
ranks, /p = sharded over them. A token is a row: [S, B, ..] stands for any number of dims before the
last, of which the first is sharded.

    norm + column    y = norm(residual) W^T + b          [S/p, B, D] -> [S, B, O/p]
    row + norm       residual += x W^T + b; norm of it   [S, B, I/p] -> [S, B, D]

Between a row linear and the next column linear a rank has only its own tokens. One call of the
workspace reduce-scatters the output of the row linear, adds it to the residual, computes the norm
and all-gathers it: by symmetric memory if the device has it, else by the channel. The layers read
the weights of trained layers, and do not change them.

If S is not divisible by p, all ranks have all tokens. See [Note: Tokens that are not split] in
docs/design/notes/megatron.md. A result is valid only until another layer writes to the same buffer.
See [Note: Static buffers] there.

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
    """A column linear for inference: y = norm(x) W^T + b, with W [O/p, I], b [O/p] of `linear`.

        y = layer(x)      # one value, not (y, bias): the bias is added

    x    a `Residual`, which is normed and gathered first; or a tensor [S, B, I] that a row linear
         has normed and gathered
    y    [S, B, O/p], valid until the next call of a layer with the same `slot` (by default the
         layer itself) and the same O/p

    `linear` is a trained layer. Raises ValueError if it is not one of mtp, msp or fsp over the
    workspace's group, has options that inference does not support, or has a norm and another input
    size than the workspace.
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
        """Return y [S, B, O/p] for a residual, which is normed here, or for normed x [S, B, I]."""
        if isinstance(x, Residual):
            if self.norm is None:
                raise ValueError(
                    f"{self.linear.title} was made without a norm, which a Residual needs: make it"
                    " with norm="
                )
            x = self.workspace.norm(x, self.norm, layer=self.linear.name)
        _check_features(self.linear, x, self._weight)
        # The view is kept until the number of tokens changes: making one takes the host's time.
        out, tokens = self._out, x.shape[:-1]
        if out is None or out.shape[:-1] != tokens:
            out = self._out = self.workspace.first(self._buffer, tokens)
        _multiply(x, self._weight, self._bias, out)
        return out


class InferenceRowParallelLinear(nn.Module):
    """A row linear for inference: y = x W^T + b, with W [O, I/p], b [O] of a trained layer.

        y = layer(x)                                 # one value, not (y, bias)
        normed = layer.add_norm(x, residual, norm)   # residual += y, then the norm of residual

    x         [S, B, I/p]
    y         [S/p, B, O], or [S, B, O] if tokens are not split; valid as in [Note: Static buffers]
    normed    [S, B, O] on all ranks

    Raises ValueError like the column linear, and if O is not the size of the workspace.
    """

    def __init__(self, linear: ParallelLinear, workspace: InferenceWorkspace) -> None:
        super().__init__()
        _check(linear, workspace, dim=1)
        _check_size(linear, "output", linear.weight.shape[0], workspace)
        self.linear, self.workspace = linear, workspace
        self._weight, self._bias = _own(linear)

    def forward(self, x: Tensor) -> Tensor:
        """Return y of this rank's tokens: x [S, B, I/p] -> [S/p, B, O]; [S, B, O] if not split."""
        tokens = self._partial(x)
        y = self.workspace.reduce(tokens, self.linear.name)
        if self._bias is not None:
            y.add_(self._bias)
        return y.view(-1, *tokens[1:], y.shape[-1])

    def add_norm(self, x: Tensor, residual: Residual, norm: Norm) -> Tensor:
        """Add y of x [S, B, I/p] to the residual, and return the norm of the sum, [S, B, O]."""
        self._partial(x)
        # The bias is added after the sum over the ranks, once.
        layer = self.linear.name
        return self.workspace.add_norm(residual, norm, bias=self._bias, layer=layer)

    def _partial(self, x: Tensor) -> Sequence[int]:
        """Write x W^T, this rank's part of the sum, to the workspace; return the sizes [S, B]."""
        _check_features(self.linear, x, self._weight)
        tokens = x.shape[:-1]
        _multiply(x, self._weight, None, self.workspace.partial(tokens))
        return tokens


class InferenceVocabParallelEmbedding(nn.Module):
    """An embedding for inference, with a trained table [V/p, D]: ids [S, B] -> `Residual`.

    Raises ValueError like the column linear, and if D is not the size of the workspace.
    """

    def __init__(self, table: VocabParallelEmbedding, workspace: InferenceWorkspace) -> None:
        super().__init__()
        _check(table, workspace, dim=0)
        _check_size(table, "output", table.weight.shape[1], workspace)
        self.table, self.workspace = table, workspace
        self._wanted, self._row = (workspace.buffer(1, torch.long).view(-1) for _ in range(2))
        self._foreign = workspace.buffer(1, torch.bool)

    def forward(self, ids: Tensor) -> Residual:
        """Return the residual, filled with the embeddings of ids [S, B]."""
        workspace, weight, tokens = self.workspace, self.table.weight.detach(), ids.shape
        partial = workspace.partial(tokens)
        count = len(partial)
        ((start, stop),) = self.table.layouts["weight"].intervals()
        # An id of another rank looks up some row of this rank, which is then replaced by zeros.
        # So shapes are fixed, and the host reads nothing from the device.
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
    """Return this rank's weight, transposed to [I, O], and its bias, as views without gradients."""
    return linear.weight.detach().t(), None if linear.bias is None else linear.bias.detach()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x W^T + b for x [.., I] and W^T [I, O] to `out` [.., O], bit-equal to `F.linear`."""
    if x.dim() != 2:
        x, out = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def _check(
    layer: ParallelLinear | VocabParallelEmbedding, workspace: InferenceWorkspace, *, dim: int
) -> None:
    """Raise ValueError unless the layer's weight is sharded along `dim` over the workspace's group.

    Also raises ValueError for another dtype or device than the workspace's, and for options that
    inference does not support.
    """
    title, weight, group = layer.title, layer.weight, workspace.group
    if layer.communicator.gathers_weights:
        raise ValueError(f"{title} gathers its weight, as in isp mode: build it in mtp or msp")
    if weight is None:
        raise ValueError(f"{title} has no weight of its own: make it with its weight")
    # A weight that is not sharded fits a group of one rank.
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
            f" {workspace.device}: use the same for both"
        )
    if isinstance(layer, ColumnParallelLinear) and layer.gather_output:
        raise ValueError(
            f"{title} gathers its output, which inference leaves split: make it with"
            " gather_output=False"
        )
    if isinstance(layer, RowParallelLinear) and not layer.input_is_parallel:
        raise ValueError(f"{title} splits its input itself: make it with input_is_parallel=True")
    if isinstance(layer, ParallelLinear) and layer.skip_bias_add:
        raise ValueError(f"{title} leaves its bias to the caller: make it with skip_bias_add=False")


def _check_size(
    layer: ParallelLinear | VocabParallelEmbedding,
    side: str,
    size: int,
    workspace: InferenceWorkspace,
) -> None:
    """Raise ValueError if `size`, the layer's input or output features (`side`), is not D."""
    if size != workspace.size:
        raise ValueError(
            f"{layer.title} has {size} {side} features, and the residual of the workspace"
            f" {workspace.size}: make the workspace with size={size}"
        )


def _check_features(layer: ParallelLinear, x: Tensor, weight: Tensor) -> None:
    """Raise ValueError if x [.., I] cannot be multiplied by this rank's W^T [I, O]."""
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
    """The residual stream of a model, to which blocks add their results."""

    value: Tensor
    """Residual of this rank's tokens [S/p, B, D], or of all tokens if they are not split."""
    tokens: tuple[int, ...]
    """(S, B): tokens of a sequence, of all ranks together, and number of sequences."""


class _ByChannel:
    """The methods of `SymmetricRows`, by collectives of a channel; bit-equal to training."""

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
    """The ranks over which a model's inference layers are sharded, and the buffers of these layers.

    Buffers are for up to `max_tokens` tokens in one forward. `group`: the channel of these ranks;
    the constructor is a collective over it. `size` is D, the model's hidden size. With
    `split_tokens=False`, each rank always has all tokens between the linears: see
    [Note: Tokens that are not split]. `symmetric_memory`: True requires it, None uses it if the
    devices have it, False uses collectives of the channel. Raises ValueError if it is required and
    unavailable.
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
            raise ValueError(
                f"symmetric_memory=True is not possible: {reason}: use None, which then uses"
                " collectives"
            )
        self._exchange: SymmetricRows | _ByChannel
        if reason or symmetric_memory is False:
            # If the channel sums locally, its reduce-scatter receives parts in a buffer, which must
            # not be allocated in each call [Note: Static buffers].
            received = self.buffer(size) if self.split_tokens and group.sums_locally else None
            self._exchange = _ByChannel(group, self.buffer(size), received)
        else:
            self._exchange = SymmetricRows(group, max_tokens, size, device=device, dtype=dtype)
        self._residual = self.buffer(size)
        # This rank's slice of a sum; it has no rows if tokens are never split.
        self._part = self.buffer(size, rows=max_tokens // group.size * self.split_tokens)
        wide = torch.promote_types(dtype, torch.float32)
        # Norms of 16-bit models are computed in float32, in a buffer of their own.
        self._wide = None if wide == dtype else self.buffer(size, wide)
        self._scale = self.buffer(1, wide)
        self._outputs: dict[object, Tensor] = {}
        self._views: _Views | None = None

    def splits(self, tokens: Sequence[int]) -> bool:
        """Return whether tokens [S, B] are sharded over the ranks between the linears."""
        return self._views_of(tokens).splits

    def residual(self, tokens: Sequence[int]) -> Residual:
        """Return the residual for tokens [S, B]; its values are not set yet.

        A workspace has one residual buffer, which each call uses again.
        """
        return self._views_of(tokens).residual

    def begin(self, x: Tensor) -> Residual:
        """Return the residual filled with x [S, B, D], which must be equal on all ranks."""
        residual = self.residual(x.shape[:-1])
        if self.splits(residual.tokens):
            x = x.chunk(self.group.size)[self.group.rank]
        residual.value.copy_(x.detach())
        return residual

    def partial(self, tokens: Sequence[int]) -> Tensor:
        """Return the buffer for this rank's part of a sum over the ranks: [S B, D]."""
        return self._views_of(tokens).partial

    def reduce(self, tokens: Sequence[int], layer: str) -> Tensor:
        """Sum `partial` over the ranks; return this rank's tokens [S/p B, D], all if not split."""
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
        """Add the sum of the ranks' `partial`, and `bias`, to the residual, and return its norm.

        The result has all tokens, [S, B, D]. If tokens are split, this is a reduce-scatter, the
        additions, the RMS norm, and an all-gather.
        """
        own = self.reduce(residual.tokens, layer)
        if bias is not None:
            own.add_(bias)
        self._views_of(residual.tokens).rows.add_(own)
        return self.norm(residual, norm, layer=layer)

    def norm(self, residual: Residual, norm: Norm, *, layer: str = "") -> Tensor:
        """Return the norm of the residual for all tokens: [S, B, D]."""
        views = self._views_of(residual.tokens)
        self._norm(views, norm)
        if views.splits:
            tag = Tag(Purpose.ACTIVATION, layer, "normed y")
            self._exchange.all_gather(views.normed, views.partial, tag)
        return views.out

    def output(self, slot: object, features: int) -> Tensor:
        """Return the output buffer [max_tokens, features] of column linears.

        It is shared by all linears with the same `slot` and the same number of features.
        """
        key = slot, features
        if key not in self._outputs:
            self._outputs[key] = self.buffer(features)
        return self._outputs[key]

    def buffer(
        self, columns: int, dtype: torch.dtype | None = None, rows: int | None = None
    ) -> Tensor:
        """Return a new buffer [rows, columns] of zeros, by default with `max_tokens` rows."""
        rows = self.max_tokens if rows is None else rows
        with _plainly():
            return torch.zeros(rows, columns, device=self.device, dtype=dtype or self.dtype)

    def first(self, buffer: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return the first rows of a buffer, as many as tokens [S, B] need: [S, B, columns]."""
        count = self._count(tokens, len(buffer))
        with _plainly():
            return buffer[:count].view(*tokens, -1)

    def _norm(self, views: _Views, norm: Norm) -> None:
        """Write the residual's RMS norm to `views.normed`, bit-equal to `F.rms_norm` in float32.

        float64 stays float64. `F.rms_norm` itself would allocate its result.
        """
        x, out, scale, weight = views.rows, views.normed, views.scale, norm.weight.detach()
        # In float32 and float64 the result's own buffer is wide enough for intermediate values.
        wide = out if views.wide is None else views.wide
        torch.pow(x if wide is out else wide.copy_(x), 2, out=wide)
        torch.mean(wide, -1, keepdim=True, out=scale)
        scale.add_(norm.eps).rsqrt_()
        torch.mul(x, scale, out=wide).mul_(weight)
        if wide is not out:
            out.copy_(wide)

    def _views_of(self, tokens: Sequence[int]) -> _Views:
        """Return the views for tokens [S, B]; they are cached until other sizes are asked for."""
        if self._views is None or self._views.tokens != tokens:
            with _plainly():
                self._views = _Views(self, tuple(tokens))
        return self._views

    def _count(self, tokens: Sequence[int], most: int) -> int:
        """Return S * B. Raises ValueError if it is above `most`, the rows of a buffer."""
        count = prod(tokens)
        if count > most:
            raise ValueError(
                f"{count} tokens at once are more than max_tokens={most}, for which the buffers"
                " were made: raise max_tokens, or pass fewer tokens at a time"
            )
        return count


class _Views:
    """The views into a workspace's buffers for tokens [S, B]."""

    def __init__(self, workspace: InferenceWorkspace, tokens: tuple[int, ...]) -> None:
        group, size = workspace.group, workspace.size
        count = workspace._count(tokens, workspace.max_tokens)
        self.tokens = tokens
        self.splits = workspace.split_tokens and tokens[0] % group.size == 0
        # If tokens are not split, sum and norm are in the buffer of the partial sums.
        self.partial = self.summed = self.normed = workspace._exchange.rows[:count]
        self.out = self.partial.view(*tokens, size)
        own = list(tokens)
        if self.splits:
            own[0] //= group.size
            count //= group.size
            self.summed = workspace._part[:count]
            # The all-gather is in place: this rank's norm is its slice of the result.
            self.normed = self.partial.chunk(group.size)[group.rank]
        self.rows = workspace._residual[:count]
        """The residual of this rank's tokens, a token in each row: a view of the workspace."""
        self.residual = Residual(self.rows.view(*own, size), tokens)
        self.scale = workspace._scale[:count]
        self.wide = None if workspace._wide is None else workspace._wide[:count]


@contextmanager
def _plainly() -> Iterator[None]:
    """Return a context that makes tensors and views which any autograd mode may write to later."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
