"""The heads each rank attends with: exact for every number of query heads, KV heads and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import gcd

__all__ = ["HeadPlan"]


@dataclass(frozen=True)
class HeadPlan:
    """The heads of each rank.

    Query heads are dealt in consecutive runs whose lengths differ by one at most; a rank may get
    none. Runs end where the heads of a KV head do, if ranks or KV heads divide the others. A rank
    gets exactly the KV heads that its query heads look at, so a KV head is replicated only where
    the query heads that share it are on several ranks.

        7 query heads, 7 KV heads, 4 ranks    12 query heads, 3 KV heads, 2 ranks
        query  0 1 | 2 3 | 4 5 | 6            query  0 1 2 3 4 5 | 6 7 8 9 10 11
        kv     0 1 | 2 3 | 4 5 | 6            kv     0       1   | 1   2
    """

    query: tuple[range, ...]
    """Query heads of each rank."""
    kv: tuple[range, ...]
    """KV heads of each rank; neighbours may overlap."""
    group: int
    """Query heads that share a KV head."""

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, num_query_heads: int, num_kv_heads: int, num_ranks: int) -> HeadPlan:
        """The plan for these numbers; raises ValueError if KV heads do not divide query heads."""
        if num_kv_heads < 1 or num_query_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads={num_kv_heads} must divide num_heads={num_query_heads}: each KV head"
                f" is shared by equally many query heads"
            )
        group = num_query_heads // num_kv_heads
        ends = (-(-rank * num_query_heads // num_ranks) for rank in range(num_ranks + 1))
        query = tuple(range(a, b) for a, b in pairwise(ends))
        return cls(query, tuple(_seen(heads, group) for heads in query), group)

    def repeated_kv(self, rank: int) -> tuple[int, ...] | None:
        """For each KV head that local attention needs, the rank's own KV head it is a copy of.

        None where the rank's heads can be attended as they are. Local attention shares each KV head
        between equally many query heads; where a rank has only part of a group, its KV heads are
        repeated until that is so.
        """
        owners = [head // self.group - self.kv[rank].start for head in self.query[rank]]
        shares = [len(list(run)) for _, run in groupby(owners)]
        if len(set(shares)) <= 1:
            return None
        return tuple(owners[:: gcd(*shares)])


def _seen(query: range, group: int) -> range:
    """The KV heads that these query heads look at."""
    first = query.start // group
    return range(first, -(-query.stop // group) if query else first)  # stop rounds up
