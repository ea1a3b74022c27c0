"""`Route`, the keys that a context rank sends and receives; `KeyExchange`, their transfer.

c context ranks, T tokens of this rank, R keys that it receives (including its own), L keys as its
kernels get them: for each slice, one after another, the whole range of keys that it sees

    own [T] --send--> [.., c messages] --all-to-all--> [R] --layout--> [L]

A key that several slices of the rank see is received once, and copied for each of them. Backward is
the transpose: a rank sums the gradients of a key's copies and sends the sum back, and the owner of
the key adds up the sums of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isp.core.attention.all_to_all import Arrival
from isp.core.attention.mask import AttentionMask
from isp.core.comm import Channel, Pending, pinned_memory
from isp.core.comm.tag import Tag
from isp.core.mesh.sequence_split import SequenceSplit

__all__ = [
    "KeyExchange",
    "Route",
    "Slices",
    "gather_route",
    "ring_routes",
    "wide",
]

_Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Route:
    """The keys that one rank sends, receives and lays out for its kernels; indices are int32."""

    num_tokens: int
    """T, the number of this rank's tokens."""
    sent: tuple[int, ...]
    """Number of keys sent to each rank, including this one."""
    received: tuple[int, ...]
    """Number of keys received from each rank, including this one; the sum is R."""
    most_received: int
    """Number of keys that the rank with most receives from the others."""
    send: Tensor
    """Indices of the keys to send, among this rank's T tokens: the messages to rank 0, 1, .. one
    after another. The message to one rank has a key at most once."""
    layout: Tensor
    """Indices [L] into the R received keys: which of them is at each place of the keys that the
    kernel gets."""
    first: Tensor
    """Indices [R] into the L keys of the kernel: where the first copy of each received key is."""
    again: tuple[tuple[Tensor, Tensor], ...]
    """Where the further copies of received keys are. An element has two index tensors: keys among
    the R received ones, and the copies of these keys among the L keys of the kernel. Element 0 is
    about the second slice that this rank has of each document, element 1 about the third, and so
    on. An element has a key at most once, so that `index_add_` adds copies in a fixed order."""
    queries: Tensor | None
    """Indices of this rank's tokens that see at least one key of the route; None: all tokens."""
    mask: AttentionMask
    """The mask for the kernel: each slice is a document, with the keys that it sees."""
    is_local: bool = False
    """True if every rank has whole documents only, so that nothing has to be sent."""

    @classmethod
    def of(
        cls,
        sight: _Sight,
        held: _Held,
        rank: int,
        num_ranks: int,
        *,
        causal: bool,
        window: int | None,
    ) -> Self:
        """Return `rank`'s route, by which each slice gets the keys that it sees (`sight`).

        `held`: the rank of each key. `sight` and `held` cover all ranks: every rank computes all
        messages by the same rule, so that senders and receivers agree.
        """
        # A key is sent to a rank once, for the first slice of that rank that sees it. These keys
        # form ranges, which are cut where the owner changes: range i is sent from rank by[i] to
        # rank to[i], and row[i] is the index of its first key in the tokens of rank by[i].
        ends = held.begin + held.size
        of, piece, begin, size = _overlaps(sight.new, sight.high, held.begin, ends)
        to, by = sight.rank[of], held.rank[piece]
        row = held.row[piece] + begin - held.begin[piece]
        sends, mine = by == rank, np.flatnonzero(to == rank)

        # Received ranges are ordered by sending rank, then by place. Range i begins at index at[i]
        # of the R received keys.
        arriving = mine[by[mine].argsort(kind="stable")]
        at = np.zeros(len(size), np.int64)
        at[arriving] = _starts(size[arriving])

        # `layout` lists, slice after slice of this rank, each key that the slice sees, by the index
        # of that key among the received ones.
        own = np.flatnonzero((sight.rank == rank) & (sight.high > sight.low))
        low, high, new = sight.low[own], sight.high[own], sight.new[own]
        here = begin[mine]
        _, piece, seen, sizes = _overlaps(low, high, here, here + size[mine])
        layout = _ranges(at[mine][piece] + seen - here[piece], sizes)

        # Find the copies of each key, whose gradients backward sums. The first copy is in the slice
        # for which the key was sent, the others in later slices of the document on this rank.
        laid = np.zeros(len(sight.rank), np.int64)
        laid[own] = _starts(high - low)
        of = of[arriving]
        first = _ranges(laid[of] + begin[arriving] - sight.low[of], size[arriving])
        again = []
        for number in range(1, 1 + int(sight.number[own].max(initial=0))):
            repeated = np.flatnonzero((sight.number[own] == number) & (new > low))
            rows = _ranges(laid[own][repeated], (new - low)[repeated])
            again.append((_index(layout[rows]), _index(rows)))
        # Count received keys for all ranks, not only this one: from the greatest count all ranks
        # derive the same number of stripes, and skip the same steps of a ring.
        received = np.bincount(to[to != by], size[to != by], num_ranks)
        query_rows = _ranges(sight.row[own], sight.queries[own])
        lengths, num_tokens = sight.queries[own], int(sight.queries[sight.rank == rank].sum())
        return cls(
            num_tokens=num_tokens,
            sent=_counts(to[sends], size[sends], num_ranks),
            received=_counts(by[mine], size[mine], num_ranks),
            most_received=int(received.max()),
            send=_index(_ranges(row[sends], size[sends])),
            layout=_index(layout),
            first=_index(first),
            again=tuple(again),
            queries=_index(query_rows) if len(query_rows) < num_tokens else None,
            mask=AttentionMask.of_documents(
                lengths.tolist() or [0], (high - low).tolist() or [0], causal=causal, window=window
            ),
        )

    @cached_property
    def _on_device(self) -> dict[torch.device, Route]:
        return {}

    def on(self, device: torch.device) -> Route:
        """Return the route with its indices on `device`; copied there once."""
        there = partial(pinned_memory.send, device=device)
        if device not in self._on_device:
            self._on_device[device] = replace(
                self,
                send=there(self.send),
                layout=there(self.layout),
                first=there(self.first),
                again=tuple((there(keys), there(rows)) for keys, rows in self.again),
                queries=None if self.queries is None else there(self.queries),
            )
        return self._on_device[device]


def gather_route(split: SequenceSplit, rank: int, *, causal: bool, window: int | None) -> Route:
    """Return `rank`'s route of all keys that its slices see, for attention in one kernel call."""
    cut = Slices.of(split)
    low = cut.start if window is None else np.maximum(cut.start, cut.begin - window + 1)
    sight = cut.sight(low, cut.end if causal else cut.stop)
    held = _Held(cut.rank, cut.begin, cut.end - cut.begin, cut.row)
    route = Route.of(sight, held, rank, len(split.slices), causal=causal, window=window)
    return replace(route, is_local=cut.are_whole)


def ring_routes(split: SequenceSplit, rank: int, *, causal: bool) -> tuple[Route, ...]:
    """Return a route for each ring step: at step t a rank sees keys of the t-th rank before it.

    With `causal`, keys of another rank in a slice's document are all before the slice, which sees
    them all, or after it. So only the first step, a rank's own keys, needs a causal mask.
    """
    num_ranks, cut = len(split.slices), Slices.of(split)
    # In this function a place is an index into the tokens of all ranks, first those of rank 0, then
    # of rank 1, and so on, so that a rank's tokens are one range of places.
    sizes = np.bincount(cut.rank, cut.end - cut.begin, num_ranks).astype(np.int64)
    held = _Held(np.arange(num_ranks), _starts(sizes), sizes, np.zeros_like(sizes))
    # Place of each slice's first token; then the number of all tokens, as an end.
    places = np.append(_starts(cut.end - cut.begin), sizes.sum())
    row = 1 + sizes.sum()  # rank * row + token is a sort key: by rank, then by token
    routes = []
    # In each step a slice sees keys of one rank, `by`. As the slices of a rank are sorted by token,
    # bisection finds the place of the first key that it sees, and the place after the last.
    for step in range(num_ranks):
        by = (cut.rank - step) % num_ranks
        low, high = (
            places[np.searchsorted(cut.rank * row + cut.begin, by * row + token)]
            for token in (cut.start, cut.end if causal else cut.stop)
        )
        sight = cut.sight(low, high)
        route = Route.of(sight, held, rank, num_ranks, causal=causal and not step, window=None)
        routes.append(replace(route, is_local=cut.are_whole))
    return tuple(routes)


class _Held(NamedTuple):
    """The ranks that have the tokens of a row, for runs of consecutive tokens of one rank.

    Each array has an element for each run.
    """

    rank: _Ints
    """The rank that has the run."""
    begin: _Ints
    """Place of the run's first token in the row."""
    size: _Ints
    """Number of tokens of the run."""
    row: _Ints
    """Index of the run's first token among the tokens of its rank."""


class _Sight(NamedTuple):
    """For each slice of all ranks, the keys that it sees: places from `low` to `high` - 1."""

    rank: _Ints
    """Rank that has the slice."""
    queries: _Ints
    """Number of tokens of the slice, each of which is a query."""
    row: _Ints
    """Index of the slice's first token in its rank's tokens."""
    low: _Ints
    """Place of the first key that the slice sees."""
    high: _Ints
    """Place after the last key that the slice sees."""
    new: _Ints
    """Place of the slice's first key that no earlier slice of its document on the rank sees."""
    number: _Ints
    """Index of the slice among the slices that its rank has of the document."""


class Slices(NamedTuple):
    """All ranks' slices as arrays, rank by rank, with adjacent slices of a rank joined into one.

    A place is the index of a token in the whole row.
    """

    rank: _Ints
    begin: _Ints
    """Place of the slice's first token."""
    end: _Ints
    """Place after the slice's last token."""
    start: _Ints
    """Place of the first token of the slice's document."""
    stop: _Ints
    """Place after the last token of the slice's document."""
    row: _Ints
    """Index of the slice's first token in its rank's tokens."""
    goes_on: NDArray[np.bool_]
    """True if the slice before this one is of the same rank and document."""

    @classmethod
    def of(cls, split: SequenceSplit) -> Self:
        """Return the slices of a split as arrays."""
        table = np.array([s for of_rank in split.slices for s in of_rank], np.int64).reshape(-1, 3)
        counts = np.array([len(of_rank) for of_rank in split.slices])
        rank = np.repeat(np.arange(len(counts)), counts)
        lengths = np.array(split.lengths, np.int64)
        document, begin, end = table.T
        goes_on = np.zeros(len(rank), bool)
        goes_on[1:] = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1])
        # Join adjacent slices of a rank, so that one range of keys serves both.
        touches = goes_on & (begin == np.roll(end, 1))
        first, last = ~touches, ~np.roll(touches, -1)
        rank, document, goes_on = rank[first], document[first], goes_on[first]
        begin, end = begin[first], end[last]
        # `before` counts the tokens of all earlier slices. Without the tokens of earlier ranks, the
        # count is the index of the slice's first token in its own rank's tokens.
        start, before = _starts(lengths)[document], _starts(end - begin)
        return cls(
            rank=rank,
            begin=begin + start,
            end=end + start,
            start=start,
            stop=start + lengths[document],
            row=before - before[np.searchsorted(rank, rank)],
            goes_on=goes_on,
        )

    @property
    def are_whole(self) -> bool:
        """True if all slices are whole documents."""
        return bool(((self.begin == self.start) & (self.end == self.stop)).all())

    def sight(self, low: _Ints, high: _Ints) -> _Sight:
        """Return which keys each slice sees: places from `low` up to, not including, `high`.

        Within a document, `high` must not decrease from one slice of a rank to the next.
        """
        # If the slice before is of the same rank and document, keys before its `high` are not new.
        new = np.where(self.goes_on, np.maximum(low, np.roll(high, 1)), low)
        # Number the slices of a document on a rank: subtract the index of the first of them, which
        # `maximum.accumulate` carries along.
        index = np.arange(len(self.rank))
        number = index - np.maximum.accumulate(np.where(self.goes_on, 0, index))
        return _Sight(self.rank, self.end - self.begin, self.row, low, high, new, number)


def _overlaps(
    low: _Ints, high: _Ints, begin: _Ints, end: _Ints
) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Return where ranges [low, high) of tokens overlap runs [begin, end), which cover all tokens.

    Returns four arrays with an element for each overlap: index of its range, index of its run,
    begin and size. Overlaps are ordered by range, then by the begin of the run.
    """
    # Runs do not overlap each other, so a range overlaps consecutive runs in the order of their
    # begins, from the last run that begins at or before `low`.
    order = begin.argsort(kind="stable")
    first = np.searchsorted(begin[order], low, "right") - 1
    count = np.where(high > low, np.searchsorted(begin[order], high) - first, 0)
    of, piece = np.repeat(np.arange(len(low)), count), order[_ranges(first, count)]
    start = np.maximum(low[of], begin[piece])
    return of, piece, start, np.minimum(high[of], end[piece]) - start


def _starts(sizes: _Ints) -> _Ints:
    """Return the begin of each range, for consecutive ranges of these sizes from 0 on."""
    starts: _Ints = np.cumsum(sizes) - sizes
    return starts


def _ranges(begins: _Ints, sizes: _Ints) -> _Ints:
    """Return all integers of the ranges [begin, begin + size), one range after another.

    `begins` and `sizes` have an element for each range.
    """
    # Element i is i, plus the begin of its range, minus the sizes of all ranges before that.
    return np.repeat(begins - _starts(sizes), sizes) + np.arange(sizes.sum())


def _counts(ranks: _Ints, sizes: _Ints, num_ranks: int) -> tuple[int, ...]:
    """Return for each rank the sum of `sizes[i]` over all i with `ranks[i]` equal to the rank."""
    return tuple(np.bincount(ranks, sizes, num_ranks).astype(int).tolist())


def _index(numbers: _Ints) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))


@dataclass(frozen=True)
class KeyExchange:
    """The transfer of keys and values to the ranks that need them.

    `go_out` takes this rank's keys [T, ..] and returns the keys [L, ..] that its kernel needs.
    `go_back` sums the gradients of a key's copies on each rank, then sends these sums to the rank
    that owns the key, which adds them; both sums are in float32 or wider, in a fixed order.
    """

    channel: Channel
    route: Route
    tag: Tag

    def go_out(self, xs: Sequence[Tensor]) -> Arrival:
        """Launch the transfer of this rank's keys [T, ..] to the ranks that need them."""
        (x,), route = xs, self.route
        pending = self.channel.all_to_all_into(
            x.new_empty(sum(route.received), *x.shape[1:]),
            x.index_select(0, route.send),
            out_rows=route.received,
            in_rows=route.sent,
            tag=self.tag,
        )
        return lambda: (pending.wait().index_select(0, route.layout),)

    def go_back(self, ys: Sequence[Tensor]) -> Arrival:
        """Launch the transfer of gradients [L, ..] to the owners of the keys, which sum them."""
        (y,) = ys
        pending = self.send_back(y)

        def arrive() -> tuple[Tensor]:
            total = y.new_zeros(self.route.num_tokens, *y.shape[1:], dtype=wide(y.dtype))
            self.add_to(total, pending.wait())
            return (total.to(y.dtype),)

        return arrive

    def send_back(self, y: Tensor) -> Pending:
        """Send the gradients `y` [L, ..] of the L keys of this rank's kernel to the keys' owners.

        The kernel has a copy of a received key for each slice that sees it: the gradients of these
        copies are summed before the transfer is launched. On the owner, `add_to` adds what arrived.
        """
        route, dtype = self.route, wide(y.dtype)
        total = y.index_select(0, route.first).to(dtype)
        # An element of `again` has a key at most once, so the copies are added in a fixed order.
        for keys, rows in route.again:
            total.index_add_(0, keys, y.index_select(0, rows).to(dtype))
        return self.channel.all_to_all_into(
            y.new_empty(len(route.send), *y.shape[1:]),
            total.to(y.dtype),
            out_rows=route.sent,
            in_rows=route.received,
            tag=self.tag,
        )

    def add_to(self, total: Tensor, received: Tensor) -> None:
        """Add received gradients to `total` [T, ..], in the order of ranks."""
        sizes = self.route.sent
        messages = zip(self.route.send.split(sizes), received.split(sizes), strict=True)
        # A message has a key at most once, so each key's sum is in the order of ranks.
        for keys, message in messages:
            total.index_add_(0, keys, message.to(total.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of `dtype` are summed: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)
