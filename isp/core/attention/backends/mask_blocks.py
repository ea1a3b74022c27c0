"""Cuts attention under a mask into dense blocks, none of which needs a mask of S x S.

A block is a run of queries of one document against the run of keys that any of them sees. Its mask
is nothing, a plain causal triangle, or a band of at most `_BLOCK_ROWS` rows.
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
"""Most queries of a block that needs a band mask; so that mask has at most _BLOCK_ROWS * S bits."""


@dataclass(frozen=True)
class Visible:
    """Query i of a block sees key j if low <= j - i <= high; None: no limit."""

    low: int | None
    high: int | None

    def band(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """[queries, keys], True where seen."""
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
        """Without the limits that hide nothing here."""
        return Visible(
            None if self.low is None or self.low <= 1 - num_queries else self.low,
            None if self.high is None or self.high >= num_keys - 1 else self.high,
        )


EVERYTHING = Visible(None, None)
TRIANGLE = Visible(None, 0)


class MaskBlock(NamedTuple):
    """A run of queries against all keys that any of them sees."""

    query: range
    key: range
    visible: Visible
    diagonal: int = 0
    """Key i + diagonal is of the token of query i, both counted in the block."""

    @property
    def is_causal_square(self) -> bool:
        """Whether the mask is the plain triangle, which kernels know without being given it."""
        return self.visible == TRIANGLE and len(self.query) == len(self.key)

    @property
    def slices(self) -> tuple[slice, slice]:
        """The queries and the keys."""
        return slice(self.query.start, self.query.stop), slice(self.key.start, self.key.stop)


def document_lengths(
    mask: AttentionMask, batch_size: int, query_length: int, key_length: int
) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of each document of [B, Sq] queries and [B, Sk] keys, rows one after another.

    Raises ValueError where the mask does not fit them.
    """
    mask.check_covers(batch_size, query_length, key_length)
    if mask.cu_seqlens is None:
        return ((query_length, key_length),) * batch_size
    return tuple(zip(mask.lengths, mask.key_lengths, strict=True))


@lru_cache(maxsize=64)
def blocks_of(
    lengths: tuple[tuple[int, int], ...],
    *,
    causal: bool,
    window: int | None,
    rows: int = _BLOCK_ROWS,
    split_up_to: int = 0,
) -> tuple[MaskBlock, ...]:
    """The blocks of documents of these (queries, keys), packed one after another.

    Queries and keys are counted over all of them; the rest is as in `document_blocks`.
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
    """The blocks of one document, aligned at its last query and key.

    One block where no mask has to be given, else blocks of `rows` queries; documents of up to
    `split_up_to` tokens are cut into such blocks also where the mask is the plain triangle. Queries
    that see no key are left out.
    """
    offset = num_keys - num_queries
    # query i sees key j if low <= j - i <= high
    low = None if window is None else offset - window + 1
    high = offset if causal else None if window is None else offset + window - 1
    if num_queries == 0 or num_keys == 0:
        return []
    whole = Visible(low, high).within(num_queries, num_keys)
    known = whole == TRIANGLE and offset == 0 and num_queries > split_up_to
    if whole == EVERYTHING or known:
        return [MaskBlock(range(num_queries), range(num_keys), whole, offset)]
    first = 0 if high is None else max(0, -high)  # queries before it see nothing
    starts = range(first, num_queries, rows)
    return [
        _block(range(i, min(i + rows, num_queries)), num_keys, offset, low, high) for i in starts
    ]


def _block(
    query: range, num_keys: int, offset: int, low: int | None, high: int | None
) -> MaskBlock:
    start, stop = query.start, query.stop
    key = range(
        0 if low is None else max(0, start + low),
        num_keys if high is None else min(num_keys, stop + high),
    )
    by = key.start - start
    visible = Visible(None if low is None else low - by, None if high is None else high - by)
    return MaskBlock(query, key, visible.within(len(query), len(key)), offset - by)
