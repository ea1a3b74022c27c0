"""All-to-all exchanges, which shard one dim of a tensor over the ranks and gather another.

p ranks, B batch, S sequence, H heads, h heads of one rank, d head size, T tokens

Under autograd an exchange is two nodes, so that transfers overlap compute in backward, too.
See [Note: A transfer is two autograd nodes] in docs/design/notes/attention.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from isp.core.autograd import Function, once_differentiable
from isp.core.comm import Channel
from isp.core.comm.channel import check_channel, join_ranks
from isp.core.comm.tag import Purpose, Tag

__all__ = [
    "Arrival",
    "Cut",
    "Exchange",
    "Reversible",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "exchanged",
    "launch",
    "two_dims",
]

_HEADS = Tag(Purpose.HEADS, tensor="all_to_all")

Arrival = Callable[[], tuple[Tensor, ...]]
"""A function that waits for a launched exchange and returns its tensors; it is called once."""


@dataclass(frozen=True)
class Cut:
    """The cut of one dim: rank i has `ranges[i]`; indices in several ranges are replicated."""

    dim: int
    """The dim that is cut."""
    ranges: tuple[range, ...]
    """For each rank, the indices along `dim` that it has."""

    @classmethod
    def even(cls, dim: int, length: int, num_ranks: int) -> Cut:
        """Return the cut of a dim of `length` into one equal slice for each rank.

        Raises ValueError if `num_ranks` does not divide `length`.
        """
        if length % num_ranks:
            raise ValueError(
                f"dim {dim} of {length} is not divisible by {num_ranks} ranks: pad it to"
                f" {-(-length // num_ranks) * num_ranks}"
            )
        size = length // num_ranks
        return cls(dim, tuple(range(i * size, (i + 1) * size) for i in range(num_ranks)))

    @cached_property
    def is_even(self) -> bool:
        """True if the slices are equally long and consecutive."""
        size = len(self.ranges[0])
        return all(
            r.start == i * size and r.stop == (i + 1) * size for i, r in enumerate(self.ranges)
        )

    @cached_property
    def is_partition(self) -> bool:
        """True if the slices are consecutive, without overlap or gap."""
        return all(a.stop == b.start for a, b in zip(self.ranges, self.ranges[1:], strict=False))

    @cached_property
    def length(self) -> int:
        """Length of the whole dim."""
        return max(r.stop for r in self.ranges)


class _Messages(NamedTuple):
    """Sizes of the messages of one all-to-all; each list has one element for each rank."""

    sent: list[list[int]]
    """Shapes of the messages sent, by receiving rank."""
    received: list[list[int]]
    """Shapes of the messages received, by sending rank."""
    num_received: int
    """Number of elements of all messages received, together."""
    rows: tuple[list[int], list[int]] | None
    """Number of elements of each message received, and of each sent; None if all are equal."""


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of several tensors at once, each sharded along one dim and gathered in another.

    Before `go_out`, a rank has tensor t whole in `spread[t].dim` and sharded in `join.dim`; after
    it, the slice `spread[t].ranges[rank]` of the spread dim, and all of `join.dim`. `go_back` is
    the transpose: where ranges overlap, it sums what the ranks send (in rank order, in float32 or
    wider).

    The tensors differ only in the size of the spread dim. The message to a rank contains the slices
    of all tensors, concatenated along that dim, so for batch 1 each received tensor is a view into
    the buffer of received messages.
    """

    channel: Channel
    spread: tuple[Cut, ...]
    """For each tensor, the cut of the dim that `go_out` shards; all cut the same dim."""
    join: Cut
    """The cut of the dim that `go_out` gathers."""
    tag: Tag = _HEADS

    def go_out(self, xs: Sequence[Tensor]) -> Arrival:
        """Launch the transfer that shards xs along the spread dims and gathers `join.dim`."""
        dim, rank, messages = self.spread[0].dim, self.channel.rank, self._messages(xs[0], False)
        send = _pack(xs, self.spread, dim, messages.sent)
        # The joined result has this rank's slice of each tensor, next to each other along `dim`.
        widths = [len(cut.ranges[rank]) for cut in self.spread]

        def unpack(received: Tensor) -> tuple[Tensor, ...]:
            joined = _joined(received, self.join, messages.received)
            return joined.split_with_sizes(widths, dim) if len(widths) > 1 else (joined,)

        return self._launch(send, messages, unpack)

    def go_back(self, ys: Sequence[Tensor]) -> Arrival:
        """Launch the transfer that shards ys along `join.dim` and gathers their spread dims."""
        dim, messages = self.spread[0].dim, self._messages(ys[0], True)
        send = _pack(ys, [self.join] * len(ys), dim, messages.sent)

        def unpack(received: Tensor) -> tuple[Tensor, ...]:
            return _assembled(received, self.spread, messages.received)

        return self._launch(send, messages, unpack)

    @cached_property
    def _known(self) -> dict[tuple[torch.Size, bool], _Messages]:
        return {}

    def _messages(self, x: Tensor, back: bool) -> _Messages:
        """Return the sizes of messages for tensors of x's shape; computed once for all layers."""
        key = x.shape, back
        if key not in self._known:
            rank, ranks = self.channel.rank, range(self.channel.size)
            # `go_out` sends `spread`: messages of this rank's tokens with heads of another rank.
            # It receives `joined`: messages of another rank's tokens with heads of this rank.
            # `go_back` sends `joined` and receives `spread`.
            spread = [self._message_shape(x, other, rank) for other in ranks]
            joined = [self._message_shape(x, rank, other) for other in ranks]
            sent, received = (joined, spread) if back else (spread, joined)
            rows = [prod(s) for s in received], [prod(s) for s in sent]
            equal = len({*rows[0], *rows[1]}) == 1
            found = _Messages(sent, received, sum(rows[0]), None if equal else rows)
            self._known[key] = found
        return self._known[key]

    def _message_shape(self, x: Tensor, spread_rank: int, join_rank: int) -> list[int]:
        """Return the shape of the message that `go_out` sends from `join_rank` to `spread_rank`.

        `go_back` sends a message of this shape the other way. Along the spread dim it has the
        slices of `spread_rank`, of all tensors, concatenated; along the join dim that of
        `join_rank`.
        """
        shape = list(x.shape)
        shape[self.spread[0].dim] = sum(len(cut.ranges[spread_rank]) for cut in self.spread)
        shape[self.join.dim] = len(self.join.ranges[join_rank])
        return shape

    def _launch(
        self, send: Tensor, messages: _Messages, unpack: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> Arrival:
        """Launch the all-to-all, and return a function that waits for it and unpacks the result."""
        # Without sizes, the collective cuts both buffers into equal messages.
        out_rows, in_rows = messages.rows or (None, None)
        pending = self.channel.all_to_all_into(
            send.new_empty(messages.num_received),
            send,
            out_rows=out_rows,
            in_rows=in_rows,
            tag=self.tag,
        )
        return lambda: unpack(pending.wait())


def _pack(xs: Sequence[Tensor], cuts: Sequence[Cut], dim: int, shapes: list[list[int]]) -> Tensor:
    """Return one flat tensor with the messages to rank 0, 1, ..; copies xs once, or not at all.

    Rank i's message is `cuts[t].ranges[i]` of each tensor t, concatenated along `dim`.
    """
    size, cut_dim = len(shapes), cuts[0].dim
    if all(cut.is_even for cut in cuts):
        slices = list(xs)
        # If all dims before the cut dim are 1, memory already has rank 0's slice first, and so on.
        # Concatenation keeps this order only along a dim after the cut dim.
        in_order = prod(xs[0].shape[:cut_dim]) == 1 and (len(xs) == 1 or cut_dim < dim)
        if not in_order:
            slices = [torch.unflatten(x, cut_dim, (size, -1)).movedim(cut_dim, 0) for x in xs]
            dim += 1  # because the dim of ranks was inserted in front
        whole = slices[0] if len(slices) == 1 else torch.cat(slices, dim)
        # `contiguous`: a gradient from `expand` has stride 0, and a collective cannot send that.
        return whole.reshape(-1).contiguous()
    # Uneven cuts: each message is written to its place in one buffer.
    flat = xs[0].new_empty(sum(prod(s) for s in shapes))
    for rank, message in enumerate(_message_views(flat, shapes)):
        parts = [
            x.narrow(cut.dim, cut.ranges[rank].start, len(cut.ranges[rank]))
            for x, cut in zip(xs, cuts, strict=True)
        ]
        torch.cat(parts, dim, out=message)
    return flat


def _message_views(flat: Tensor, shapes: list[list[int]]) -> list[Tensor]:
    """Return a view of each message, of these shapes, in a flat buffer that contains all."""
    parts = flat.split([prod(s) for s in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _joined(received: Tensor, join: Cut, shapes: list[list[int]]) -> Tensor:
    """Return all messages joined along `join.dim`.

    The result is a view if the cut is even and all dims before `join.dim` have size 1.
    """
    if not join.is_even:
        return torch.cat(_message_views(received, shapes), join.dim)
    shape, dim = shapes[0], join.dim
    if prod(shape[:dim]) == 1:
        return received.view(*shape[:dim], len(shapes) * shape[dim], *shape[dim + 1 :])
    return join_ranks(received.view(len(shapes), *shape), dim)


def _assembled(
    received: Tensor, cuts: Sequence[Cut], shapes: list[list[int]]
) -> tuple[Tensor, ...]:
    """Return each tensor, joined along its spread dim from all messages; overlaps are summed."""
    dim = cuts[0].dim
    if all(cut.is_even for cut in cuts):
        whole = received.view(len(shapes), *shapes[0])  # [p, .., slices of all tensors, ..]
        if len(cuts) == 1:
            return (join_ranks(whole, dim),)
        of_each = whole.split_with_sizes([len(cut.ranges[0]) for cut in cuts], dim + 1)
        return tuple(join_ranks(x, dim) for x in of_each)
    messages = _message_views(received, shapes)
    widths = [[len(cut.ranges[rank]) for cut in cuts] for rank in range(len(shapes))]
    parts = [message.split(w, dim) for message, w in zip(messages, widths, strict=True)]
    return tuple(
        torch.cat(slices, dim) if cut.is_partition else _summed(slices, cut)
        for cut, slices in zip(cuts, zip(*parts, strict=True), strict=True)
    )


def _summed(slices: Sequence[Tensor], cut: Cut) -> Tensor:
    """Return the tensor whose slices overlap in the cut dim: their sum at each index.

    Slices are added in rank order, in float32 or wider.
    """
    shape = list(slices[0].shape)
    shape[cut.dim] = cut.length
    dtype = torch.promote_types(slices[0].dtype, torch.float32)
    total = slices[0].new_zeros(shape, dtype=dtype)
    for part, owned in zip(slices, cut.ranges, strict=True):
        total.narrow(cut.dim, owned.start, len(owned)).add_(part)
    return total.to(slices[0].dtype)


class Reversible(Protocol):
    """An exchange that `launch` can differentiate: forward calls `go_out`, backward `go_back`."""

    @property
    def channel(self) -> Channel:
        """Channel of the ranks that take part."""

    def go_out(self, xs: Sequence[Tensor]) -> Arrival:
        """Launch the transfer of xs, and return a function that waits for it."""

    def go_back(self, ys: Sequence[Tensor]) -> Arrival:
        """Launch the transfer back: the transpose of `go_out`, which takes its gradients ys."""


class _Transfer:
    """State shared by the two autograd nodes of an exchange: the transfer that is in flight."""

    def __init__(self, exchange: Reversible, *, reverse: bool) -> None:
        self.there = exchange.go_back if reverse else exchange.go_out
        self.back = exchange.go_out if reverse else exchange.go_back
        self.arrival: Arrival | None = None

    def arrive(self) -> tuple[Tensor, ...]:
        assert self.arrival is not None, "a transfer arrives once for each departure"
        arrival, self.arrival = self.arrival, None
        return arrival()


class _Depart(Function):
    """The first node of an exchange: launches the transfer, in backward waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *xs: Tensor) -> Tensor:
        ctx.transfer = transfer
        transfer.arrival = transfer.there(xs)
        # The ticket: an empty tensor that only connects the two nodes in autograd's graph.
        return xs[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # `_Arrive.backward` launched the transfer of gradients. Autograd runs this node after all
        # nodes that overlap that transfer, so waiting here blocks as late as possible.
        return None, *ctx.transfer.arrive()


class _Arrive(Function):
    """The second node of an exchange: waits for the transfer, in backward sends the gradients."""

    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        return transfer.arrive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[None, Tensor]:
        ctx.transfer.arrival = ctx.transfer.back(dys)
        return None, dys[0].new_empty(0)


def launch(exchange: Reversible, xs: Sequence[Tensor], *, reverse: bool = False) -> Arrival:
    """Launch the transfer of xs (`go_back` if `reverse`), and return a function that waits for it.

    Call that function exactly once. On every rank, backward must reach the tensors that it returns:
    the transfer of their gradients is a collective, and a missing rank blocks the others.
    See [Note: A transfer is two autograd nodes] in docs/design/notes/attention.md.
    """
    if exchange.channel.size == 1:
        return lambda: tuple(xs)
    transfer = _Transfer(exchange, reverse=reverse)
    ticket = _Depart.apply(transfer, *xs)
    return lambda: _Arrive.apply(transfer, ticket)


def exchanged(exchange: Reversible, *xs: Tensor, reverse: bool = False) -> tuple[Tensor, ...]:
    """Exchange xs (by `go_back` if `reverse`) and return what arrived, after waiting for it."""
    return launch(exchange, xs, reverse=reverse)()


def two_dims(channel: Channel, x: Tensor, scatter: int, gather: int) -> Exchange:
    """Return the exchange that shards dim `scatter` of x over the ranks and gathers dim `gather`.

    x [.., N, .., M/p, ..] -> [.., N/p, .., M, ..].  Raises ValueError if N is not a multiple of the
    channel's size, or the dims are the same.
    """
    check_channel("channel", channel)
    scatter, gather = scatter % x.dim(), gather % x.dim()
    if scatter == gather:
        raise ValueError(f"cannot scatter and gather the same dim {scatter}: name two dims")
    size = channel.size
    spread = Cut.even(scatter, x.shape[scatter], size)
    return Exchange(channel, (spread,), Cut.even(gather, x.shape[gather] * size, size), _HEADS)


def all_to_all_sp2hp(x: Tensor, channel: Channel) -> Tensor:
    """Exchange split tokens for a split hidden dim: [T/p, .., H] -> [T, .., H/p]."""
    return exchanged(two_dims(channel, x, -1, 0), x)[0]


def all_to_all_hp2sp(x: Tensor, channel: Channel) -> Tensor:
    """Exchange a split hidden dim for split tokens: [T, .., H/p] -> [T/p, .., H]."""
    return exchanged(two_dims(channel, x, 0, -1), x)[0]
