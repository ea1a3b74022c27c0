"""Cuts attention under a mask into dense pieces, none of which needs a mask of S x S.

A piece is a run of queries of one document against the run of keys that any of them sees. Its mask
is nothing, a plain causal triangle, or a band of at most `_BLOCK_ROWS` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from isp.attention.mask import AttentionMask

__all__ = [
    "EVERYTHING",
    "KeyPiece",
    "MaskBlock",
    "Visible",
    "document_blocks",
    "document_lengths",
    "pieces_of",
]

_BLOCK_ROWS = 256
"""Most queries of a piece that needs a band mask; so that mask has at most _BLOCK_ROWS * S bits."""


@dataclass(frozen=True)
class Visible:
    """Query i of a piece sees key j if low <= j - i <= high; None: no limit."""

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


@dataclass(frozen=True)
class KeyPiece:
    """A block of `count` documents of equal length, one right after another."""

    block: MaskBlock
    """Rows of the first document's queries and keys, counted over the whole batch."""
    count: int
    num_queries: int
    """Queries of each document, which is how far apart their blocks are."""
    num_keys: int
    """Keys of each document."""
    goes_on: bool = False
    """Whether its queries see keys of a piece before it, too."""

    @property
    def is_causal_square(self) -> bool:
        """Whether the mask is the plain triangle, which kernels know without being given it."""
        return self.block.visible == TRIANGLE and len(self.block.query) == len(self.block.key)


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
def pieces_of(
    lengths: tuple[tuple[int, int], ...],
    *,
    causal: bool,
    window: int | None,
    batch_below: int = 0,
    split_up_to: int = 0,
    apart_from: int | None = None,
    rows: int = _BLOCK_ROWS,
) -> tuple[KeyPiece, ...]:
    """The pieces of documents of these (queries, keys), packed one after another.

    Neighbours of equal length become one piece if they are shorter than `batch_below` tokens.
    Where all queries see at least `apart_from` keys, those are a piece without a mask, and the
    others' results are to be merged with its own. The rest is as in `document_blocks`.
    """
    pieces: list[KeyPiece] = []
    query_start = key_start = 0
    for (num_queries, num_keys), run in groupby(lengths):
        count = len(list(run))
        together = count if max(num_queries, num_keys) < batch_below else 1
        earlier, blocks = num_keys - num_queries, []
        is_apart = apart_from is not None and earlier >= apart_from and causal and window is None
        if num_queries and is_apart:
            blocks.append(MaskBlock(range(num_queries), range(earlier), EVERYTHING))
        kept = num_queries if blocks else num_keys
        blocks += [
            block._replace(key=_shift(block.key, num_keys - kept))
            for block in document_blocks(
                num_queries,
                kept,
                causal=causal,
                window=window,
                rows=rows,
                split_up_to=split_up_to,
            )
        ]
        for _ in range(0, count, together):
            for number, block in enumerate(blocks):
                query, key = _shift(block.query, query_start), _shift(block.key, key_start)
                block = block._replace(query=query, key=key)
                goes_on = number > 0 and kept < num_keys
                pieces.append(KeyPiece(block, together, num_queries, num_keys, goes_on))
            query_start += num_queries * together
            key_start += num_keys * together
    return tuple(pieces)


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
