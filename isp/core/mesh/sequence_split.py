"""`SequenceSplit`, the tokens of each context rank, from the lengths of documents. Loads no torch.

S tokens of a row, c context ranks

Documents form a line, cheapest tokens first, and each rank takes tokens from both ends of the line,
so that all ranks have equal costs. See [Note: From both ends] in docs/design/notes/mesh.md.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, islice, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_WINDOWS", "SequenceSplit", "Slice", "Windows"]

Windows = tuple[tuple[int | None, int], ...]
"""Pairs (window in tokens, number of attention layers with this window); None: no window."""

NO_WINDOWS: Windows = ((None, 1),)
"""The value of `Windows` for a model whose layers see all earlier tokens."""

_Ints = NDArray[np.int64]


class Slice(NamedTuple):
    """The tokens [begin, end) of a document."""

    document: int
    """Index of the document in the row."""
    begin: int
    """Index of the slice's first token in its document."""
    end: int
    """Index after the slice's last token in its document."""


@dataclass(frozen=True)
class SequenceSplit:
    """The slices of documents that each context rank has, in the order of its tokens."""

    lengths: tuple[int, ...]
    """Number of tokens of each document, in the order of the row."""
    slices: tuple[tuple[Slice, ...], ...]
    """Slices of each context rank, sorted by document and begin; each token is in one slice."""
    windows: Windows = NO_WINDOWS
    """Windows of the model's layers, whose cost is balanced."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], num_ranks: int, windows: Windows = NO_WINDOWS
    ) -> SequenceSplit:
        """Return a split of documents of these lengths: S/c tokens for each rank, at even costs.

        If c does not divide S, the first ranks have one token more. Results are cached.
        Source: ours; see [Note: From both ends] in docs/design/notes/mesh.md.
        """
        return _split(tuple(lengths), num_ranks, windows)

    @cached_property
    def costs(self) -> tuple[int, ...]:
        """Cost of each rank: the number of keys that its queries see, summed over all layers."""
        cost = _prefix_cost(self.windows)
        return tuple(sum(cost(end) - cost(begin) for _, begin, end in held) for held in self.slices)

    @property
    def imbalance(self) -> float:
        """Greatest cost of a rank divided by the mean cost, minus 1."""
        return max(self.costs) * len(self.costs) / sum(self.costs) - 1

    @property
    def order(self) -> _Ints:
        """Index in the row of each token of rank 0, slice by slice, then of rank 1, and so on: [S].

        It is computed at each access, because splits stay in a cache for long and this takes 8
        bytes a token.
        """
        table = np.array([one for held in self.slices for one in held], np.int64).reshape(-1, 3)
        sizes = table[:, 2] - table[:, 1]
        starts = np.cumsum([0, *self.lengths])[table[:, 0]] + table[:, 1]
        return np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())

    def repeated(self, rows: int) -> SequenceSplit:
        """Return the split of `rows` rows that are each split like this one, as one split."""
        number = len(self.lengths)
        slices = tuple(
            tuple(
                Slice(row * number + document, begin, end)
                for row in range(rows)
                for document, begin, end in held
            )
            for held in self.slices
        )
        return SequenceSplit(self.lengths * rows, slices, self.windows)


def _prefix_cost(windows: Windows) -> Callable[[Any], Any]:
    """Return a function of n: how many keys a document's first n queries see, over all layers.

    n may be an array.
    """
    layers = sum(number for _, number in windows)
    limited = [(window, number) for window, number in windows if window is not None]

    def cost(n: Any) -> Any:
        seen = layers * (n * (n + 1) // 2)
        for window, number in limited:  # subtract the keys that the window hides
            beyond = (n > window) * (n - window)
            seen -= number * (beyond * (beyond + 1) // 2)
        return seen

    return cost


@lru_cache(maxsize=64)
def _split(lengths: tuple[int, ...], num_ranks: int, windows: Windows) -> SequenceSplit:
    """Return the result of `SequenceSplit.of`; cached by all arguments."""
    line = _Line(lengths, windows)
    held = [line.take(num_ranks - rank) for rank in range(num_ranks)]
    return SequenceSplit(lengths, line.slices(held), windows)


_Range = tuple[int, int]  # places [begin, end) in a line


class _Line:
    """All tokens, document after document, lowest mean cost first; ranks take them from both ends.

    A place is the index of a token in this order. Sorting documents by length sorts them by mean
    cost. See [Note: From both ends] in docs/design/notes/mesh.md.
    """

    def __init__(self, lengths: tuple[int, ...], windows: Windows) -> None:
        self.lengths = np.array(lengths, np.int64)
        order = np.argsort(self.lengths, kind="stable")
        self.order = order = order[self.lengths[order] > 0]
        sizes = self.lengths[order]
        prefix_cost = _prefix_cost(windows)
        costs = prefix_cost(sizes)
        costs_before = [0, *np.cumsum(costs).tolist()]
        starts = [0, *np.cumsum(sizes).tolist()]

        @cache
        def cost(place: int) -> int:
            i = bisect_right(starts, place) - 1
            before: int = costs_before[i] + prefix_cost(place - starts[i])
            return before

        self.cost = cost
        """Function that returns the cost of all tokens before a place."""
        self.starts = starts
        """Place of each document's first token, then the number of tokens."""
        self.means: list[float] = (costs / sizes).tolist()
        """Mean cost of a token of each document."""
        self.whole = (0, len(order))
        """Range of the documents of which no token has been taken."""
        self.rests: list[_Range] = []
        """What is left of documents that were cut."""

    def cost_of(self, ranges: Iterable[_Range]) -> int:
        """Return the cost of all tokens in these ranges of places."""
        return sum(self.cost(end) - self.cost(begin) for begin, end in ranges)

    def left(self) -> list[_Range]:
        """Return the ranges of tokens that have not been taken, lowest mean cost first."""
        first, last = (self.starts[i] for i in self.whole)
        ranges = []
        for mean, rest in sorted((self.cost_of([p]) / (p[1] - p[0]), p) for p in self.rests):
            # Insert the rest of a cut document by its mean cost: before the first whole document
            # whose mean cost is as high or higher.
            place = max(first, min(self.starts[bisect_left(self.means, mean)], last))
            ranges += [(first, place), rest]
            first = place
        return [(begin, end) for begin, end in [*ranges, (first, last)] if begin < end]

    def take(self, num_ranks: int) -> list[_Range]:
        """Take the tokens of the next rank, with `num_ranks` left, and return their ranges."""
        left = self.left()
        sizes = list(accumulate((end - begin for begin, end in left), initial=0))
        costs = [self.cost(end) - self.cost(begin) for begin, end in left]
        costs = list(accumulate(costs, initial=0))
        size, total = sizes[-1], costs[-1]
        tokens = -(-size // num_ranks)
        if tokens == size:  # the last rank takes all
            self.whole, self.rests = (0, 0), []
            return left
        # Of the tokens that are left, let token n be in range i. Then its place is places[i] + n,
        # and the n tokens before it cost costs[i] + self.cost(places[i] + n).
        places = [begin - n for (begin, _), n in zip(left, sizes, strict=False)]
        costs = [cost - self.cost(begin) for (begin, _), cost in zip(left, costs, strict=False)]

        def before(n: int) -> int:
            """Return the cost of the first n tokens that are left."""
            i = bisect_right(sizes, n, hi=len(left)) - 1
            return costs[i] + self.cost(places[i] + n)

        def between(first: int, last: int) -> list[_Range]:
            """Return ranges of places: the tokens first to last - 1 of those that are left."""
            ranges = zip(left, places, strict=True)
            cut = ((max(begin, p + first), min(end, p + last)) for (begin, end), p in ranges)
            return [(begin, end) for begin, end in cut if begin < end]

        def excess(y: int) -> int:
            """Return by how much the cost of a rank with y tokens from the back exceeds its share.

            The result is multiplied by `num_ranks`, to be an integer. It rises with y, so bisection
            works.
            """
            return num_ranks * (before(tokens - y) + total - before(size - y)) - total

        y = bisect_left(range(tokens), 0, key=excess)
        # The exact share is between y - 1 and y: use the nearer one.
        y = min(max(0, y - 1), y, key=lambda y: abs(excess(y)))
        self.keep(between(tokens - y, size - y))
        return between(0, tokens - y) + between(size - y, size)

    def keep(self, ranges: list[_Range]) -> None:
        """Record that only these ranges of tokens are left."""
        self.whole, self.rests = (0, 0), []
        for begin, end in ranges:
            first, last, rests = self.documents_in(begin, end)
            self.rests += rests
            # Whole documents of several ranges are consecutive, because tokens are taken from both
            # ends of the line: extend the range of documents.
            if first < last:
                self.whole = (self.whole[0] if self.whole[1] else first, last)

    def documents_in(self, begin: int, end: int) -> tuple[int, int, list[_Range]]:
        """Return the documents [first, last) that are whole in a range, and the rest of it."""
        first, last = bisect_left(self.starts, begin), bisect_right(self.starts, end) - 1
        if first > last:
            return first, first, [(begin, end)]
        edges = ((begin, self.starts[first]), (self.starts[last], end))
        return first, last, [(a, b) for a, b in edges if a < b]

    def slices(self, held: list[list[_Range]]) -> tuple[tuple[Slice, ...], ...]:
        """Return each rank's slices, sorted by document and begin, given the ranges that it has."""
        # The rank of each whole document. Cut and empty documents keep the value len(held), which
        # sorts them last, so that they are left out below.
        ranks = np.full(len(self.lengths), len(held), np.int16)
        cut: list[tuple[int, Slice]] = []
        for rank, ranges in enumerate(held):
            for begin, end in ranges:
                first, last, parts = self.documents_in(begin, end)
                ranks[self.order[first:last]] = rank
                for a, b in parts:
                    i = bisect_right(self.starts, a) - 1
                    start = self.starts[i]
                    cut.append((rank, Slice(int(self.order[i]), a - start, b - start)))
        by_rank = np.argsort(ranks, kind="stable")
        fields = zip(by_rank.tolist(), repeat(0), self.lengths[by_rank].tolist(), strict=False)
        # `tuple.__new__` takes half the time of `Slice._make`.
        whole = map(partial(tuple.__new__, Slice), fields)
        counts = np.bincount(ranks, minlength=len(held))
        slices: list[list[Slice]] = [list(islice(whole, count)) for count in counts[: len(held)]]
        for rank, one in cut:
            insort(slices[rank], one)
        return tuple(map(tuple, slices))
