"""The tokens of each context rank: a pure plan from the lengths of documents. Loads no torch.

S tokens of a row, c context ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

__all__ = ["ContextPlan", "Slice", "Windows"]

Windows = tuple[tuple[int | None, int], ...]
"""The windows of a model's attention layers, in tokens (None: all), each with how many have it."""

_ALL: Windows = ((None, 1),)


class Slice(NamedTuple):
    """The tokens [begin, end) of a document."""

    document: int
    begin: int
    end: int


@dataclass(frozen=True)
class ContextPlan:
    """The slices of documents that each context rank holds, in the order in which it holds them."""

    lengths: tuple[int, ...]
    """Tokens of each document; they lie one after another in the row."""
    slices: tuple[tuple[Slice, ...], ...]
    """Of each context rank, by document and begin; together every token once."""

    @classmethod
    def of(cls, lengths: Sequence[int], num_ranks: int, windows: Windows = _ALL) -> ContextPlan:
        """The plan for documents of these lengths; S/c tokens for each rank."""
        slices: list[list[Slice]] = [[] for _ in range(num_ranks)]
        for document, length in enumerate(lengths):
            ends = [length * i // (2 * num_ranks) for i in range(2 * num_ranks + 1)]
            for i, (begin, end) in enumerate(pairwise(ends)):
                if begin < end:
                    rank = min(i, 2 * num_ranks - 1 - i)
                    slices[rank].append(Slice(document, begin, end))
        return cls(tuple(lengths), tuple(map(tuple, slices)))
