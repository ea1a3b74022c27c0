"""The buffers of inference layers, and what lies between two of them in one call.

S sequence, B batch, D model size, N tokens at once; p ranks, /p = split over them. A token is a
row: [S, B, ..] stands for any number of dims before the last, the first of which is split.

[Note: Tokens that are not split] Where S does not divide by p, as when few sequences are decoded,
every rank has all of them: the sum over the ranks is all-reduced, and every rank adds and norms
it all. That is the same number of bytes in one collective for two, and the norm of a few tokens
costs nothing. A workspace that never splits is mtp, one that does is msp.

[Note: Static buffers] All that the layers write lies in buffers that are made once, for
`max_tokens`: no call allocates, nothing is read back by the host, and a CUDA graph finds the same
addresses at every replay. So a result is good until the next call that writes there: what a row
linear gives until the next row linear of the workspace, what a column linear gives until the next
one of its slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from isp.core.comm import Channel
from isp.core.comm.channel import check_channel
from isp.core.comm.symmetric_memory import SymmetricRows, why_no_symmetric_rows
from isp.core.comm.tag import Purpose, Tag

__all__ = ["InferenceWorkspace", "Norm", "Residual"]

CPU = torch.device("cpu")


class Norm(Protocol):
    """An RMS norm over the model size: x / sqrt(mean(x^2) + eps) * weight."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, eq=False)
class Residual:
    """The sum that blocks add to."""

    value: Tensor
    """This rank's tokens [S/p, B, D], or all where they are not split."""
    tokens: tuple[int, ...]
    """The sizes [S, B] of all of them."""


class _ByChannel:
    """As `SymmetricRows`, by the channel, with the bits of the training layers'."""

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
    """What the inference layers of a model share: its group, and buffers for `max_tokens` tokens.

    Made by all ranks of the group together. `split_tokens` [Note: Tokens that are not split];
    `symmetric_memory`: None where it serves, or whether it has to.
    Raises ValueError if symmetric memory is wanted and cannot serve.
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
        """Whether each rank has a part of tokens [S, B] between the linears."""
        return self._views_of(tokens).splits

    def residual(self, tokens: Sequence[int]) -> Residual:
        """The place of the residual of tokens [S, B], not filled yet; there is one at a time."""
        return self._views_of(tokens).residual

    def begin(self, x: Tensor) -> Residual:
        """The residual of x [S, B, D], which every rank has whole."""
        residual = self.residual(x.shape[:-1])
        if self.splits(residual.tokens):
            x = x.chunk(self.group.size)[self.group.rank]
        residual.value.copy_(x.detach())
        return residual

    def partial(self, tokens: Sequence[int]) -> Tensor:
        """Where a rank leaves its part of a sum over the ranks: [S B, D]."""
        return self._views_of(tokens).partial

    def reduce(self, tokens: Sequence[int], layer: str) -> Tensor:
        """The sum of the ranks' `partial`, of this rank's tokens [S/p B, D] or of all."""
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
        """residual += sum of the ranks' `partial` + bias; the norm of it, of all tokens [S, B, D].

        Where tokens are split: reduce-scatter, additions, RMS norm and all-gather.
        """
        own = self.reduce(residual.tokens, layer)
        if bias is not None:
            own.add_(bias)
        self._views_of(residual.tokens).rows.add_(own)
        return self.norm(residual, norm, layer=layer)

    def norm(self, residual: Residual, norm: Norm, *, layer: str = "") -> Tensor:
        """The norm of the residual, of all tokens: [S, B, D]."""
        views = self._views_of(residual.tokens)
        self._norm(views, norm)
        if views.splits:
            tag = Tag(Purpose.ACTIVATION, layer, "normed y")
            self._exchange.all_gather(views.normed, views.partial, tag)
        return views.out

    def output(self, slot: object, features: int) -> Tensor:
        """Where the column linears of a slot write: [N, O/p]."""
        key = slot, features
        if key not in self._outputs:
            self._outputs[key] = self.buffer(features)
        return self._outputs[key]

    def buffer(
        self, columns: int, dtype: torch.dtype | None = None, rows: int | None = None
    ) -> Tensor:
        """Memory for [rows, columns], by default of all tokens."""
        rows = self.max_tokens if rows is None else rows
        with _plainly():
            return torch.zeros(rows, columns, device=self.device, dtype=dtype or self.dtype)

    def first(self, buffer: Tensor, tokens: Sequence[int]) -> Tensor:
        """What tokens [S, B] take of a buffer: [S, B, columns]."""
        count = self._count(tokens, len(buffer))
        with _plainly():
            return buffer[:count].view(*tokens, -1)

    def _norm(self, views: _Views, norm: Norm) -> None:
        """`F.rms_norm` of the residual, in float32 at least and, as written, its bits."""
        x, out, scale, weight = views.rows, views.normed, views.scale, norm.weight.detach()
        wide = out if views.wide is None else views.wide
        torch.pow(x if wide is out else wide.copy_(x), 2, out=wide)
        torch.mean(wide, -1, keepdim=True, out=scale)
        scale.add_(norm.eps).rsqrt_()
        torch.mul(x, scale, out=wide).mul_(weight)
        if wide is not out:
            out.copy_(wide)

    def _views_of(self, tokens: Sequence[int]) -> _Views:
        """Those of the last call, if it was of as many tokens."""
        if self._views is None or self._views.tokens != tokens:
            with _plainly():
                self._views = _Views(self, tuple(tokens))
        return self._views

    def _count(self, tokens: Sequence[int], most: int) -> int:
        count = prod(tokens)
        if count > most:
            raise ValueError(
                f"{count} tokens at once are more than max_tokens={most}, for which the buffers"
                " were made: give a larger one, or fewer tokens at a time"
            )
        return count


class _Views:
    """What tokens [S, B] take of a workspace's buffers."""

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
    """Tensors and views made here may be written to in any mode of autograd, and by its rules."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
