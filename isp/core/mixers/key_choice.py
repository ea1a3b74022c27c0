"""The choice of keys for sparse attention, in sequences that are split over ranks.

B batch, S' tokens of a sequence on this rank, T = B S'; R queries and C keys of a tile, D size of
an index key, G choices of a query, n indices of a choice

An indexer scores a query against all earlier keys of its document, by small index keys of its own,
and keeps the best. Each slice of a document receives the earlier index keys by the same route as
keys for attention; queries are not sent, and are scored one tile at a time.

    own [T, D] --all-to-all--> [L, D] --tiles, [R, C] scores of each head--> indices [T, G, n]

backward   none: a choice has no gradient

Attention then exchanges tokens for heads, fetches keys as usual, and all-gathers the indices.
See [Note: Chosen, then by heads] in docs/design/notes/mixers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.attention.context_parallel.route import KeyExchange
from isp.core.comm.tag import Purpose, Tag
from isp.core.mixers.placement import Placement

__all__ = ["Indexer", "choose"]

_MOST_SCORES = 1 << 26
"""Largest number of scores in a tile, over all heads, unless one query has more."""


class Indexer(Protocol):
    """A module of the model that chooses keys, together with the inputs of one call."""

    keys: Tensor
    """Index keys of this rank's tokens, [B, S', D]."""
    num_heads: int
    """Number of heads, each of which scores a query against a key."""
    num_choices: int
    """G, the number of choices of a query: one for each KV head, or 1 for all heads."""

    def most(self, length: int) -> int:
        """Return n, the number of indices of a choice, for a document of `length` tokens."""

    def choose(self, tokens: slice, keys: Tensor, seen: Tensor) -> Tensor:
        """Return the indices [R, G, n] of the keys that R queries choose.

        `tokens` are the queries, as indices of this rank's tokens. They choose from `keys` [C, D],
        among those for which the mask `seen` [R, C] is True.
        """


def choose(
    indexer: Indexer,
    placement: Placement,
    *,
    on_cpu: bool,
    tiles: Callable[[Sequence[slice]], Iterable[slice]] = iter,
) -> Tensor:
    """Return the indices [T, G, n], within its document, of the keys that each token attends to.

    `tiles` returns which of the given tiles to compute (the planner computes one of each size).
    """
    keys, route = indexer.keys.flatten(0, 1), placement.earlier
    if not route.is_local:
        tag = Tag(Purpose.KEYS, tensor="indexer.k")
        exchange = KeyExchange(placement.channel, route.on(keys.device), tag)
        (keys,) = exchange.go_out((keys.contiguous(),))()
    documents = []
    lengths = zip(placement.segments, placement.whole_lengths, strict=True)
    for (size, length), own in zip(lengths, keys.split(route.mask.key_lengths), strict=False):
        # On CPU, which of equal scores torch's top-k takes depends on the number of scores, and
        # scores after a ReLU are often equal: zero. So a slice is scored against as many keys as
        # its whole document has, to choose like the model in one process.
        lacking = length - len(own) if on_cpu else 0
        documents.append((len(own) - size, size, F.pad(own, (0, 0, 0, lacking))))
    return _numbers(indexer, documents, indexer.most(max(placement.split.lengths)), tiles)


def _numbers(
    indexer: Indexer,
    documents: Iterable[tuple[int, int, Tensor]],
    most: int,
    tiles: Callable[[Sequence[slice]], Iterable[slice]],
) -> Tensor:
    """Return the indices [T, G, n], n = `most`, of the keys that the tokens of slices choose.

    `documents` has for each slice: the number of its document's tokens before it, its number of
    tokens, and keys [C, D] of its document from the first token on.
    """
    shape = indexer.keys.shape[:2].numel(), indexer.num_choices, most
    # Filled with -1, which remains where a query has fewer than n keys.
    numbers, token = indexer.keys.new_full(shape, -1, dtype=torch.int32), 0
    for before, size, keys in documents:
        rows = max(1, _MOST_SCORES // (indexer.num_heads * len(keys)))
        ends = range(token, token + size, rows)
        for tile in tiles([slice(n, min(n + rows, token + size)) for n in ends]):
            # Positions of the tile's queries in their document: a query sees keys up to its own.
            places = torch.arange(tile.start, tile.stop, device=keys.device) + (before - token)
            seen = torch.arange(len(keys), device=keys.device) <= places.unsqueeze(1)
            found = indexer.choose(tile, keys, seen)
            numbers[tile, :, : found.shape[-1]] = found
        token += size
    return numbers
