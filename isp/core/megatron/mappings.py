"""Differentiable collectives on activations: one in forward, and its dual in backward.

p ranks; N length of the sharded dim, n_i the part of rank i

Each mapping is one collective for the tensor and one for its gradient. If ranks use the result in
different computations, the gradient is a sum over the ranks. If all ranks compute the same with it,
each rank has the whole gradient already, and takes its part.

Source: Megatron-LM, core/tensor_parallel/mappings (Shoeybi et al. 2019; Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isp.core.autograd import Function, once_differentiable
from isp.core.comm.channel import Channel, check_channel
from isp.core.comm.tag import MAPPING
from isp.core.mesh.partition import divide
from isp.core.tensors import pad_rows

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


class _Cut(NamedTuple):
    """The dim that a mapping splits or gathers, and the sizes of the ranks' parts along it.

    Sizes are None if all parts are equal.
    """

    dim: int = 0
    sent: Sequence[int] | None = None
    """Size of each rank's part of the input along `dim`."""
    received: Sequence[int] | None = None
    """Size of each rank's part of the result along `dim`."""

    @property
    def back(self) -> _Cut:
        """Return the cut of the backward, which sends what forward received."""
        return _Cut(self.dim, self.received, self.sent)


_Move = Callable[[Tensor, _Cut, Channel], Tensor]
"""A function (x, cut, channel) -> y. The result never shares memory with x, except for `_stay`."""


class _Mapped(Function):
    """The autograd function of all mappings.

    forward   y = move(x)
    backward  dx = back(dy)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: _Move, back: _Move, cut: _Cut, over: Channel) -> Tensor:
        ctx.back, ctx.cut, ctx.channel = back, cut, over
        return move(x, cut, over)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(dy, ctx.cut.back, ctx.channel), None, None, None, None


def _map(x: Tensor, move: _Move, back: _Move, channel: Channel, cut: _Cut) -> Tensor:
    """Apply a mapping to x; return x itself on a channel of one rank."""
    check_channel("channel", channel)
    if channel.size == 1:
        return x
    y: Tensor = _Mapped.apply(x, move, back, cut, channel)
    return y


def _stay(x: Tensor, cut: _Cut, channel: Channel) -> Tensor:
    """Return x itself."""
    return x


def _all_reduce(x: Tensor, cut: _Cut, channel: Channel) -> Tensor:
    """Return the sum of x over the ranks."""
    return channel.all_reduce(x, tag=MAPPING).wait()


def _split(x: Tensor, cut: _Cut, channel: Channel) -> Tensor:
    """Return a copy of this rank's part of x, which is equal on all ranks: N -> n_rank."""
    # A copy, so that writing into the result does not change x.
    part = _parts(x, cut.dim, cut.sent, channel)[channel.rank]
    return part.clone(memory_format=torch.contiguous_format)


def _gather(x: Tensor, cut: _Cut, channel: Channel) -> Tensor:
    """Return the parts of all ranks, joined: [.., n_rank, ..] -> [.., N, ..].

    Collectives send pieces of equal size, so uneven parts are padded to the longest one, and the
    receiver drops the padding.
    """
    dim, sizes = cut.dim, cut.received
    if sizes is None:
        return channel.all_gather(x, dim, tag=MAPPING).wait()
    if len(sizes) != channel.size or sizes[channel.rank] != x.shape[dim]:
        raise ValueError(
            f"split sizes {list(sizes)} do not fit: rank {channel.rank} of {channel.size} has"
            f" {x.shape[dim]} in dim {dim} of shape {tuple(x.shape)}"
        )
    longest = max(sizes)
    padded = pad_rows(x.movedim(dim, 0), longest)
    joined = channel.all_gather(padded, tag=MAPPING).wait()  # [p * longest, ..]
    parts = [part[:size] for part, size in zip(joined.split(longest), sizes, strict=True)]
    return torch.cat(parts).movedim(0, dim)


def _reduce_scatter(x: Tensor, cut: _Cut, channel: Channel) -> Tensor:
    """Return this rank's part of the sum over the ranks: [.., N, ..] -> [.., n_rank, ..].

    Uneven parts are padded to the longest one, as in `_gather`.
    """
    dim, sizes = cut.dim, cut.sent
    if sizes is None:
        return channel.reduce_scatter(x, dim, tag=MAPPING).wait()
    parts, longest = _parts(x, dim, sizes, channel), max(sizes)
    padded = torch.cat([pad_rows(part.movedim(dim, 0), longest) for part in parts])
    summed = channel.reduce_scatter(padded, tag=MAPPING).wait()  # [longest, ..]
    # A clone, so that the result does not keep the padding's memory alive.
    return summed[: sizes[channel.rank]].clone().movedim(0, dim)


def _exchange(x: Tensor, cut: _Cut, channel: Channel) -> Tensor:
    """Send part i of dim 0 to rank i, and return the received parts joined in rank order."""
    _parts(x, 0, cut.sent, channel)  # raises ValueError if the sizes do not add up
    num_rows = x.shape[0] if cut.received is None else sum(cut.received)
    out = x.new_empty(num_rows, *x.shape[1:])
    # The collective needs both lists or none: what a rank sends may be even, and what it receives
    # uneven.
    sent, received = cut.sent, cut.received
    if (sent is None) != (received is None):
        sent = sent or [divide(x.shape[0], channel.size)] * channel.size
        received = received or [divide(num_rows, channel.size)] * channel.size
    return channel.all_to_all_into(
        out, x.contiguous(), in_rows=sent, out_rows=received, tag=MAPPING
    ).wait()


def _parts(
    x: Tensor, dim: int, sizes: Sequence[int] | None, channel: Channel
) -> tuple[Tensor, ...]:
    """Return the ranks' parts of x along `dim`.  Raises ValueError if `sizes` do not sum to it."""
    length = x.shape[dim]
    if sizes is None:
        if length % channel.size:
            raise ValueError(
                f"dim {dim} of shape {tuple(x.shape)} is not divisible by the {channel.size} ranks"
                f" of the {channel.name or 'channel'} group: give the split sizes"
            )
        sizes = [length // channel.size] * channel.size
    if len(sizes) != channel.size or sum(sizes) != length:
        raise ValueError(
            f"split sizes {list(sizes)} do not cut dim {dim} of shape {tuple(x.shape)} into the"
            f" parts of {channel.size} ranks: their sum must be {length}"
        )
    parts: tuple[Tensor, ...] = x.split(list(sizes), dim)
    return parts


def copy_to_tensor_model_parallel_region(x: Tensor, channel: Channel) -> Tensor:
    """Return x, which is equal on all ranks, for different computations on each rank.

    Forward: x itself.  Backward: all-reduce.
    """
    return _map(x, _stay, _all_reduce, channel, _Cut())


def reduce_from_tensor_model_parallel_region(x: Tensor, channel: Channel) -> Tensor:
    """Return the sum of x over the ranks.

    Forward: all-reduce.  Backward: the gradient itself.
    """
    return _map(x, _all_reduce, _stay, channel, _Cut())


def scatter_to_tensor_model_parallel_region(x: Tensor, channel: Channel) -> Tensor:
    """Return this rank's features: [.., N] -> [.., N/p].

    Forward: split.  Backward: all-gather.  Raises ValueError if N is not divisible by p.
    """
    return _map(x, _split, _gather, channel, _Cut(-1))


def gather_from_tensor_model_parallel_region(x: Tensor, channel: Channel) -> Tensor:
    """Return all features, for the same computation on all ranks: [.., N/p] -> [.., N].

    Forward: all-gather.  Backward: split.
    """
    return _map(x, _gather, _split, channel, _Cut(-1))


def scatter_to_sequence_parallel_region(x: Tensor, channel: Channel, *, dim: int = 0) -> Tensor:
    """Return this rank's tokens: [N, ..] -> [N/p, ..].

    `dim` is the dim of the sequence.
    Forward: split.  Backward: all-gather.  Raises ValueError if N is not divisible by p.
    """
    return _map(x, _split, _gather, channel, _Cut(dim))


def gather_from_sequence_parallel_region(
    x: Tensor,
    channel: Channel,
    *,
    tensor_parallel_output_grad: bool = True,
    output_split_sizes: Sequence[int] | None = None,
    dim: int = 0,
) -> Tensor:
    """Return the tokens of all ranks: [n, ..] -> [N, ..].

    `output_split_sizes`: number of tokens of each rank; None: equal parts. `dim` is the dim of the
    sequence. Forward: all-gather.  Backward: reduce-scatter, or with
    `tensor_parallel_output_grad=False`, for the same computation on all ranks, split.
    """
    back = _reduce_scatter if tensor_parallel_output_grad else _split
    return _map(x, _gather, back, channel, _Cut(dim, received=output_split_sizes))


def reduce_scatter_to_sequence_parallel_region(
    x: Tensor,
    channel: Channel,
    *,
    input_split_sizes: Sequence[int] | None = None,
    dim: int = 0,
) -> Tensor:
    """Return this rank's tokens of the sum of x over the ranks: [N, ..] -> [n, ..].

    `input_split_sizes`: number of tokens of each rank; None: equal parts. `dim` is the dim of the
    sequence. Forward: reduce-scatter.  Backward: all-gather.  Raises ValueError if the parts do not
    sum to N.
    """
    return _map(x, _reduce_scatter, _gather, channel, _Cut(dim, sent=input_split_sizes))


def all_gather_last_dim_from_tensor_parallel_region(x: Tensor, channel: Channel) -> Tensor:
    """Return all features, for different computations on each rank: [.., N/p] -> [.., N].

    Forward: all-gather.  Backward: reduce-scatter.
    """
    return _map(x, _gather, _reduce_scatter, channel, _Cut(-1))


def reduce_scatter_last_dim_to_tensor_parallel_region(x: Tensor, channel: Channel) -> Tensor:
    """Return this rank's features of the sum of x over the ranks: [.., N] -> [.., N/p].

    Forward: reduce-scatter.  Backward: all-gather.  Raises ValueError if N is not divisible by p.
    """
    return _map(x, _reduce_scatter, _gather, channel, _Cut(-1))


def all_to_all(
    x: Tensor,
    channel: Channel,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Send some rows of x to each rank, and return the rows received: [sum in] -> [sum out].

    Rank i gets `input_split_sizes[i]` rows and sends `output_split_sizes[i]`; None: equal parts.
    Forward: all-to-all.  Backward: all-to-all with the sizes swapped.  Raises ValueError if the
    sizes do not sum to the rows of x.
    """
    cut = _Cut(0, sent=input_split_sizes, received=output_split_sizes)
    return _map(x, _exchange, _exchange, channel, cut)
