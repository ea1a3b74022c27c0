"""Attention's heads in groups, one after the other: arithmetic. Loads no torch."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from isp.parallel.partition import any_of

__all__ = ["HeadGroup", "HeadGroups"]


class HeadGroup(NamedTuple):
    """A group: part `kv` of the KV heads, and of the query heads of each of them part `share`."""

    kv: int
    share: int
    is_first: bool
    """Whether no group before has these KV heads."""
    is_last: bool
    """Whether none behind has."""


class HeadGroups(NamedTuple):
    """`kv` parts of the KV heads, and `shares` parts of the query heads that share one of them.

    Groups with the same KV heads follow one another, so that those are computed and exchanged once.
    Each group has as many heads for each of the ranks it is exchanged between, and a KV head goes
    to no more ranks than it would without groups: the bytes that travel stay the same.

        8 query heads, 4 KV heads, 2 ranks, 4 groups = 2 x 2
        kv     0 1 | 0 1 | 2 3 | 2 3
        query  0 2 | 1 3 | 4 6 | 5 7
    """

    kv: int
    shares: int

    @classmethod
    def of(cls, number: int, num_query_heads: int, num_kv_heads: int, num_ranks: int) -> HeadGroups:
        """So many groups.  Raises ValueError, with the numbers that do, if heads do not divide."""
        found = cls._fitting(number, num_query_heads, num_kv_heads, num_ranks)
        if found is None:
            usable = [
                n
                for n in range(1, num_query_heads + 1)
                if cls._fitting(n, num_query_heads, num_kv_heads, num_ranks) is not None
            ]
            among = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
            raise ValueError(
                f"model.attention_head_groups={number} does not cut {num_query_heads} query and"
                f" {num_kv_heads} KV heads into groups with equally many{among}: use"
                f" {any_of(usable)}"
            )
        return found

    @classmethod
    def _fitting(cls, number: int, query: int, kv: int, ranks: int) -> HeadGroups | None:
        parts = gcd(number, 1 if kv % ranks else kv // ranks)
        shares, of_kv_head = number // parts, query // kv
        fits = of_kv_head % shares == 0 and (number == 1 or query // number % ranks == 0)
        return cls(parts, shares) if fits else None

    def in_order(self) -> tuple[HeadGroup, ...]:
        """The groups, one after the other."""
        last = self.shares - 1
        return tuple(
            HeadGroup(kv, share, share == 0, share == last)
            for kv in range(self.kv)
            for share in range(self.shares)
        )
