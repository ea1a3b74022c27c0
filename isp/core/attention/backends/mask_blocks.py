"""`MaskBlock`: attention under a mask, cut into dense blocks, none of which needs a mask of S x S.

A block is a range of queries of one document against the range of keys that any of them sees. It
needs no mask, the causal triangle, or a band mask of at most `_BLOCK_ROWS` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from isp.core.attention.mask import AttentionMask

__all__ = [
    "EVERYTHING",
    "TRIANGLE",
    "MaskBlock",
    "Visible",
    "blocks_of",
    "document_blocks",
    "document_lengths",
]

_BLOCK_ROWS = 256
"""Largest number of queries in a block with a band mask, which limits the mask to this times S."""


@dataclass(frozen=True)
class Visible:
    """A band mask: query i of a block sees key j if low <= j - i <= high; None: no limit."""

    low: int | None
    """Least offset j - i that is seen."""
    high: int | None
    """Greatest offset j - i that is seen."""

    def band(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Return the band as a mask [queries, keys], True where a key is seen."""
        offset = torch.arange(num_keys, device=device) - torch.arange(
            num_queries, device=device
        ).unsqueeze(1)
        seen = torch.ones_like(offset, dtype=torch.bool)
        if self.low is not None:
            seen &= offset >= self.low
        if self.high is not None:
            seen &= offset <= self.high
        return seen

    def within(self, num_queries: int, num_keys: int) -> Visible:
        """Return the band with each limit that hides no key in a block of this size set to None."""
        # In a block, j - i is from 1 - num_queries to num_keys - 1.
        return Visible(
            None if self.low is None or self.low <= 1 - num_queries else self.low,
            None if self.high is None or self.high >= num_keys - 1 else self.high,
        )


EVERYTHING = Visible(None, None)
"""The band in which every query sees every key."""
TRIANGLE = Visible(None, 0)
"""The causal band: query i sees keys 0 to i of the block."""


class MaskBlock(NamedTuple):
    """A dense block of attention: a range of queries, and the keys that any of them sees."""

    query: range
    key: range
    visible: Visible
    """The keys of the block that each query of the block sees."""
    diagonal: int = 0
    """Query i's own key is key i + diagonal of the block."""

    @property
    def is_causal_square(self) -> bool:
        """True if the mask is the causal triangle of a square, for which kernels have a flag."""
        return self.visible == TRIANGLE and len(self.query) == len(self.key)

    @property
    def slices(self) -> tuple[slice, slice]:
        """The ranges of queries and of keys as slices, to index tensors [T, ..]."""
        return slice(self.query.start, self.query.stop), slice(self.key.start, self.key.stop)


def document_lengths(
    mask: AttentionMask, batch_size: int, query_length: int, key_length: int
) -> tuple[tuple[int, int], ...]:
    """Return the numbers (queries, keys) of each document in B rows, row after row.

    Raises ValueError if the mask's documents do not fill the rows.
    """
    mask.check_covers(batch_size, query_length, key_length)
    if mask.cu_seqlens is None:
        return ((query_length, key_length),) * batch_size
    return tuple(zip(mask.lengths, mask.key_lengths, strict=True))


@lru_cache(maxsize=64)  # cached because all layers of a kind need the same blocks
def blocks_of(
    lengths: tuple[tuple[int, int], ...],
    *,
    causal: bool,
    window: int | None,
    rows: int = _BLOCK_ROWS,
    split_up_to: int = 0,
) -> tuple[MaskBlock, ...]:
    """Return the blocks of packed documents with `lengths` (queries, keys).

    Ranges count queries and keys over all documents. For the other arguments see
    `document_blocks`.
    """
    found: list[MaskBlock] = []
    query_start = key_start = 0
    for num_queries, num_keys in lengths:
        found += (
            block._replace(query=_shift(block.query, query_start), key=_shift(block.key, key_start))
            for block in document_blocks(
                num_queries,
                num_keys,
                causal=causal,
                window=window,
                rows=rows,
                split_up_to=split_up_to,
            )
        )
        query_start += num_queries
        key_start += num_keys
    return tuple(found)


def _shift(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)


def document_blocks(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool,
    window: int | None,
    rows: int = _BLOCK_ROWS,
    split_up_to: int = 0,
) -> list[MaskBlock]:
    """Return the blocks of one document, whose last query is aligned with its last key.

    A document that needs no mask is one block, and so is a causal square (as many queries as keys)
    of more than `split_up_to` queries. Other documents are cut into blocks of `rows` queries.
    Queries that see no key are in no block.
    """
    offset = num_keys - num_queries
    # Query i sees key j if low <= j - i <= high; its own key is i + offset.
    low = None if window is None else offset - window + 1
    high = offset if causal else None if window is None else offset + window - 1
    if num_queries == 0 or num_keys == 0:
        return []
    whole = Visible(low, high).within(num_queries, num_keys)
    one_triangle = whole == TRIANGLE and offset == 0 and num_queries > split_up_to
    if whole == EVERYTHING or one_triangle:
        return [MaskBlock(range(num_queries), range(num_keys), whole, offset)]
    # With fewer keys than queries, the first queries see no key.
    first = 0 if high is None else max(0, -high)
    starts = range(first, num_queries, rows)
    return [
        _block(range(i, min(i + rows, num_queries)), num_keys, offset, low, high) for i in starts
    ]


def _block(
    query: range, num_keys: int, offset: int, low: int | None, high: int | None
) -> MaskBlock:
    """Return the block of some queries of a document, with the keys that any of them sees."""
    start, stop = query.start, query.stop
    key = range(
        0 if low is None else max(0, start + low),
        num_keys if high is None else min(num_keys, stop + high),
    )
    # `low` and `high` count from the document's first query and key. The limits of a block count
    # from the first query and key of the block.
    by = key.start - start
    visible = Visible(None if low is None else low - by, None if high is None else high - by)
    return MaskBlock(query, key, visible.within(len(query), len(key)), offset - by)
