"""`HeadSplit`, the heads that each rank attends with, for any numbers of heads and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import gcd

__all__ = ["HeadSplit"]


@dataclass(frozen=True)
class HeadSplit:
    """The query heads and KV heads with which each rank attends.

    Each rank gets a run of consecutive query heads; the runs' lengths differ by at most one, and a
    rank may get none. No run crosses the end of a KV head's group if the number of ranks divides
    the number of KV heads, or the reverse. A rank gets the KV heads that its query heads read, so a
    KV head is replicated only if the query heads that share it are on several ranks.

        7 query heads, 7 KV heads, 4 ranks    12 query heads, 3 KV heads, 2 ranks
        query  0 1 | 2 3 | 4 5 | 6            query  0 1 2 3 4 5 | 6 7 8 9 10 11
        kv     0 1 | 2 3 | 4 5 | 6            kv     0       1   | 1   2
    """

    query: tuple[range, ...]
    """Query heads of each rank."""
    kv: tuple[range, ...]
    """KV heads of each rank; the ranges of neighboring ranks may overlap."""
    group: int
    """Number of query heads that share a KV head."""

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, num_query_heads: int, num_kv_heads: int, num_ranks: int) -> HeadSplit:
        """Return the split of these heads over the ranks.

        Raises ValueError if `num_kv_heads` does not divide `num_query_heads`.
        """
        if num_kv_heads < 1 or num_query_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads={num_kv_heads} must divide num_heads={num_query_heads}: each KV head"
                f" is shared by equally many query heads"
            )
        group = num_query_heads // num_kv_heads
        # ceil(rank H / p): the runs' lengths differ by at most one, and with p > H some are empty.
        ends = (-(-rank * num_query_heads // num_ranks) for rank in range(num_ranks + 1))
        query = tuple(range(a, b) for a, b in pairwise(ends))
        return cls(query, tuple(_seen(heads, group) for heads in query), group)

    def repeated_kv(self, rank: int) -> tuple[int, ...] | None:
        """Return indices of the rank's KV heads, repeated for local attention; None: not repeated.

        In local attention each KV head is shared by equally many query heads. A rank that has only
        some query heads of a group breaks this rule, so it repeats KV heads until each copy is
        shared by equally many.
        """
        owners = [head // self.group - self.kv[rank].start for head in self.query[rank]]
        shares = [len(list(run)) for _, run in groupby(owners)]
        if len(set(shares)) <= 1:
            return None
        # Every gcd-th query head's KV head: each copy then serves gcd query heads.
        return tuple(owners[:: gcd(*shares)])


def _seen(query: range, group: int) -> range:
    """Return the KV heads that these query heads read; `group` query heads share one KV head."""
    first = query.start // group
    # Round the stop up: a rank that has a part of a group still needs the whole KV head.
    return range(first, -(-query.stop // group) if query else first)
