"""`Placement`: the tokens of a micro-batch on each rank, and the routes by which mixers send them.

p ranks share the sequences, with T tokens in all and T/p on each rank; documents are numbered over
all sequences of the micro-batch

Attention has its own exchange. A convolution needs the tokens before each slice of a document (a
halo); a scan needs the states before it, or all tokens of some heads. The indices are computed on
the host, once for a micro-batch, and used by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isp.core.attention.context_parallel.route import Route, Slices, gather_route
from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel
from isp.core.mesh.sequence_split import SequenceSplit, Slice

__all__ = ["Placement", "rank_slices"]


@dataclass(frozen=True, eq=False)
class Placement:
    """The tokens of a micro-batch on each rank of `channel`, and routes that send what mixers need.

    Routes and indices are computed from a `SequenceSplit` at first use, and serve all layers.
    """

    channel: Channel
    split: SequenceSplit
    """The slices of documents on each of the p ranks, in the order of the rank's tokens."""

    @classmethod
    def of(
        cls, sequence: SequenceRanks, channel: Channel, rows: tuple[int, int], bounds: Sequence[int]
    ) -> Placement:
        """Return the placement of `rows` (number of sequences, tokens of each) over `channel`.

        Ranks take tokens in the order of `sequence.order`. `bounds`: a 0, then the ends of the
        documents, counted over all sequences; empty: each sequence is one document.
        """
        return cls(channel, rank_slices(sequence, channel.size, rows, tuple(bounds)))

    @cached_property
    def segments(self) -> tuple[int, ...]:
        """Number of tokens of each of this rank's slices; adjacent slices are joined into one."""
        return tuple((self._slices.end - self._slices.begin)[self._own].tolist())

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens on each rank."""
        return tuple(sum(end - begin for _, begin, end in held) for held in self.split.slices)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """A 0, then the end of each rank's tokens, counted over rank 0, rank 1, and so on."""
        return tuple(accumulate(self.sizes, initial=0))

    @cached_property
    def is_whole(self) -> bool:
        """True if every rank has whole documents only, so that nothing is sent."""
        return self._slices.are_whole

    def halo(self, reach: int) -> Route:
        """Return the route by which each slice gets the `reach` tokens before it, and its own."""
        window = reach + 1
        if window not in self._routes:
            route = gather_route(self.split, self.channel.rank, causal=True, window=window)
            self._routes[window] = route
        return self._routes[window]

    @cached_property
    def earlier(self) -> Route:
        """The route by which each slice gets all tokens of its document up to the slice's end."""
        return gather_route(self.split, self.channel.rank, causal=True, window=None)

    @cached_property
    def whole_lengths(self) -> tuple[int, ...]:
        """Number of tokens of the document of each of this rank's slices."""
        return tuple((self._slices.stop - self._slices.start)[self._own].tolist())

    @cached_property
    def states(self) -> Route:
        """The route by which each slice gets the states of its document's slices up to itself.

        States are sent like keys of a causal mask over documents with one token for each slice:
        slice i sees tokens 0 to i.
        """
        # Number the slices of each document, over all ranks, in the order of tokens: subtract from
        # a slice's index that of its document's first slice, carried on by `maximum.accumulate`.
        number = np.zeros(len(self._slices.rank), np.int64)
        order = np.argsort(self._slices.begin, kind="stable")
        firsts = self._slices.begin[order] == self._slices.start[order]
        index = np.arange(len(order))
        number[order] = index - np.maximum.accumulate(np.where(firsts, index, 0))
        document = np.zeros_like(number)
        document[order] = np.cumsum(firsts) - 1
        lengths = np.bincount(document)
        slices = tuple(
            tuple(
                Slice(d, i, i + 1)
                for d, i in zip(document[mine].tolist(), number[mine].tolist(), strict=True)
            )
            for mine in (np.flatnonzero(self._slices.rank == r) for r in range(self.channel.size))
        )
        split = SequenceSplit(tuple(lengths.tolist()), slices)
        return gather_route(split, self.channel.rank, causal=True, window=None)

    @cached_property
    def continued(self) -> tuple[int, ...]:
        """Indices of this rank's slices whose document continues after them."""
        return tuple(np.flatnonzero((self._slices.end < self._slices.stop)[self._own]).tolist())

    @cached_property
    def order(self) -> Tensor | None:
        """Index of each token of rank 0, then of rank 1, and so on, in the order of documents: [T].

        None if this is 0 to T - 1.
        """
        order = self.split.order
        return None if (order == np.arange(len(order))).all() else torch.from_numpy(order)

    @cached_property
    def inverse(self) -> Tensor | None:
        """The inverse permutation of `order` [T]: from the order of documents to that of ranks."""
        return None if self.order is None else self.order.argsort()

    @cached_property
    def _slices(self) -> Slices:
        return Slices.of(self.split)

    @cached_property
    def _own(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._slices.rank == self.channel.rank)

    @cached_property
    def layouts(self) -> dict[Any, Any]:
        """Cache for index tensors that layers compute from this placement."""
        return {}

    @cached_property
    def _routes(self) -> dict[int, Route]:
        return {}


def rank_slices(
    sequence: SequenceRanks, num_ranks: int, rows: tuple[int, int], bounds: tuple[int, ...]
) -> SequenceSplit:
    """Return the split of `rows` (number of sequences, tokens of each) over the ranks.

    `bounds`: a 0, then the ends of the documents, counted over all sequences; empty: each sequence
    is one document.
    """
    batch, length = rows
    ends = np.array(bounds or [length * i for i in range(batch + 1)], np.int64)
    lengths = tuple(np.diff(ends).tolist())
    # `order` [rows, tokens] has the index of each token, in the order in which ranks take tokens.
    if sequence.context.size > 1 and bounds:  # sequences are joined to one row
        order = sequence.order(lengths).numpy()[None]
    elif sequence.context.size > 1:
        order = sequence.order((length,)).numpy() + length * np.arange(batch)[:, None]
    else:
        order = np.arange(batch * length).reshape(batch, length)
    # Each row is cut evenly over the ranks, and a rank has its parts row after row.
    parts = order.reshape(len(order), num_ranks, -1).swapaxes(0, 1).reshape(num_ranks, -1)
    return SequenceSplit(lengths, tuple(_slices_of(part, ends) for part in parts))


def _slices_of(places: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[Slice, ...]:
    """Return the slices of documents that consist of the tokens at `places`, indices in all tokens.

    `ends`: a 0, then the ends of the documents.
    """
    document = np.searchsorted(ends, places, "right") - 1
    # A slice ends where the next position is not consecutive or in another document.
    breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(document) != 0)) + 1
    first = np.array([0, *breaks])
    begins, sizes = (places - ends[document])[first], np.diff([*first, len(places)])
    found = zip(document[first].tolist(), begins.tolist(), sizes.tolist(), strict=True)
    return tuple(Slice(of, begin, begin + size) for of, begin, size in found)
