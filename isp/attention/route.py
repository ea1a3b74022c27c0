"""Which keys a context rank sends, receives, and lays out for its queries: index arithmetic.

c context ranks, T tokens of this rank, R keys that it receives (its own among them), L keys as its
kernels see them: those of each slice's whole visible range, one slice after another

    own [T] --send--> [.., c messages] --all-to-all--> [R] --layout--> [L]

A key that several slices of the rank see is received once, and laid out once for each. Backward is
the transpose: copies are summed, travel back, and are summed by the rank that has the key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isp.attention.mask import AttentionMask
from isp.parallel.context import ContextPlan

__all__ = ["Route"]

_Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Route:
    """The way of keys between the ranks, as rank `rank` sees it; indices are int32."""

    sent: tuple[int, ...]
    """Keys to each rank; itself gets what it has."""
    received: tuple[int, ...]
    """Keys from each rank, together R."""
    most_received: int
    """By any rank from the others."""
    stays: bool
    """Whether every rank has whole documents alone, so that nothing has to travel."""
    send: Tensor
    """The own key of each row sent; each key once in the message to a rank."""
    layout: Tensor
    """[L], the received key of each row."""
    first: Tensor
    """[R], a row where each received key is laid out."""
    again: tuple[tuple[Tensor, Tensor], ...]
    """Keys and the rows where they are laid out again; each key once in such a layer."""
    mask: AttentionMask
    """Of slices as documents, with the keys that each sees."""

    @classmethod
    def of(cls, plan: ContextPlan, rank: int, *, causal: bool, window: int | None) -> Self:
        """The route of `plan` for layers with such masks, for rank `rank`."""
        slices = _Slices.of(plan, causal=causal, window=window)
        part = _overlaps(slices.new, slices.high, slices.begin, slices.end)
        size, to, by = part.size, slices.rank[part.of], slices.rank[part.piece]
        row = slices.row[part.piece] + part.begin - slices.begin[part.piece]
        num_ranks = len(plan.slices)
        sends, mine = by == rank, np.flatnonzero(to == rank)

        # What arrives is in the order of ranks, and of one rank's keys in that of the sequence.
        arriving = mine[by[mine].argsort(kind="stable")]
        at = np.zeros(len(size), np.int64)
        at[arriving] = _starts(size[arriving])
        own = np.flatnonzero(slices.rank == rank)
        low, high, new = slices.low[own], slices.high[own], slices.new[own]
        begin = part.begin[mine]
        seen = _overlaps(low, high, begin, begin + size[mine])
        layout = _ranges(at[mine][seen.piece] + seen.begin - begin[seen.piece], seen.size)

        laid = np.zeros(len(slices.rank), np.int64)
        laid[own] = _starts(high - low)
        of = part.of[arriving]
        first = _ranges(laid[of] + part.begin[arriving] - slices.low[of], size[arriving])
        again = []
        for number in range(1, 1 + int(slices.number[own].max(initial=0))):
            repeated = np.flatnonzero((slices.number[own] == number) & (new > low))
            rows = _ranges(laid[own][repeated], (new - low)[repeated])
            again.append((_index(layout[rows]), _index(rows)))
        travels = np.bincount(to[to != by], size[to != by], num_ranks)
        lengths = (slices.end - slices.begin)[own]
        return cls(
            sent=_counts(to[sends], size[sends], num_ranks),
            received=_counts(by[mine], size[mine], num_ranks),
            most_received=int(travels.max()),
            stays=bool(slices.whole.all()),
            send=_index(_ranges(row[sends], size[sends])),
            layout=_index(layout),
            first=_index(first),
            again=tuple(again),
            mask=AttentionMask.of_documents(
                lengths.tolist() or [0], (high - low).tolist() or [0], causal=causal, window=window
            ),
        )

    @cached_property
    def _on_device(self) -> dict[torch.device, Route]:
        return {}

    def on(self, device: torch.device) -> Route:
        """The same with its indices on `device`, copied there once."""
        if device not in self._on_device:
            self._on_device[device] = replace(
                self,
                send=self.send.to(device, non_blocking=True),
                layout=self.layout.to(device, non_blocking=True),
                first=self.first.to(device, non_blocking=True),
                again=tuple(
                    (keys.to(device, non_blocking=True), rows.to(device, non_blocking=True))
                    for keys, rows in self.again
                ),
            )
        return self._on_device[device]


class _Slices(NamedTuple):
    """All ranks' slices, one rank's after another's; places are counted over the whole row."""

    rank: _Ints
    begin: _Ints
    end: _Ints
    row: _Ints
    """Of its first token, of those of its rank."""
    low: _Ints
    """First key that is seen."""
    high: _Ints
    """End of the keys that are seen."""
    new: _Ints
    """First key that the slices of its rank before it do not see."""
    number: _Ints
    """Of the slice, of those of its document that its rank has."""
    whole: NDArray[np.bool_]
    """Whether it is a whole document."""

    @classmethod
    def of(cls, plan: ContextPlan, *, causal: bool, window: int | None) -> Self:
        table = np.array([s for of_rank in plan.slices for s in of_rank], np.int64).reshape(-1, 3)
        counts = np.array([len(of_rank) for of_rank in plan.slices])
        rank = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(np.array(plan.lengths, np.int64))
        document, begin, end = table.T
        start, stop = (ends - plan.lengths)[document], ends[document]
        begin, end = begin + start, end + start
        before = _starts(end - begin)
        row = before - before[np.searchsorted(rank, rank)]
        low: _Ints = start if window is None else np.maximum(start, begin - window + 1)
        high = end if causal else stop
        goes_on = np.zeros(len(rank), bool)
        goes_on[1:] = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1])
        new = np.where(goes_on, np.maximum(low, np.roll(high, 1)), low)
        index = np.arange(len(rank))
        number = index - np.maximum.accumulate(np.where(goes_on, 0, index))
        whole = (begin == start) & (end == stop)
        return cls(rank, begin, end, row, low, high, new, number, whole)


class _Overlaps(NamedTuple):
    of: _Ints
    """Which range."""
    piece: _Ints
    begin: _Ints
    size: _Ints


def _overlaps(low: _Ints, high: _Ints, begin: _Ints, end: _Ints) -> _Overlaps:
    """What ranges [low, high) have in common with pieces [begin, end), which cover them.

    In the order of the ranges, and for each in that of the row.
    """
    order = begin.argsort(kind="stable")
    first = np.searchsorted(begin[order], low, "right") - 1
    count = np.where(high > low, np.searchsorted(begin[order], high) - first, 0)
    of, piece = np.repeat(np.arange(len(low)), count), order[_ranges(first, count)]
    start = np.maximum(low[of], begin[piece])
    return _Overlaps(of, piece, start, np.minimum(high[of], end[piece]) - start)


def _starts(sizes: _Ints) -> _Ints:
    """Where each begins, one after another."""
    starts: _Ints = np.cumsum(sizes) - sizes
    return starts


def _ranges(begins: _Ints, sizes: _Ints) -> _Ints:
    """`size` numbers from each `begin` on, one range after another."""
    return np.repeat(begins - _starts(sizes), sizes) + np.arange(sizes.sum())


def _counts(ranks: _Ints, sizes: _Ints, num_ranks: int) -> tuple[int, ...]:
    return tuple(np.bincount(ranks, sizes, num_ranks).astype(int).tolist())


def _index(numbers: _Ints) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))
