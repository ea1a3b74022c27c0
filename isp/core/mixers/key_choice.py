"""The choice of keys for sparse attention, in sequences that are split over ranks.

B batch, S' and T = B S' the tokens of this rank, R queries and C keys of a tile, D size of a key,
G choices of a query, n numbers of a choice

An indexer scores a query against all earlier keys of its document, by small keys of its own, and
keeps the best. Each slice of a document receives the earlier index keys by the route that fetches
keys for attention; queries are not sent, and are scored one tile at a time.

    own [T, D] --all-to-all--> [L, D] --tiles, [R, C] scores of each head--> numbers [T, G, n]

backward   none: a choice has no gradient

[Note: Chosen, then by heads] Attention exchanges tokens for heads and fetches keys as usual, and
the numbers are all-gathered over the head ranks, 4 n bytes a token. Gathering keys instead would
send fewer bytes with many ranks, but every rank would expand latents to the keys and values of all
heads and tokens, p times the memory.

[Note: Ties] Scores after a ReLU are often equal: all zero. Which of equal scores torch's top-k
takes on a CPU depends on their total number. So on a CPU a slice is scored against as many keys as
its document has, like in the model alone.
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
"""Scores of a tile at most, over all heads, unless one query has more."""


class Indexer(Protocol):
    """A module that chooses keys, with the inputs of its call."""

    keys: Tensor
    """Index keys of this rank's tokens, [B, S', D]."""
    num_heads: int
    """Number of scores for a query and a key."""
    num_choices: int
    """G."""

    def most(self, length: int) -> int:
        """Return the largest n in a document of so many tokens."""

    def choose(self, tokens: slice, keys: Tensor, seen: Tensor) -> Tensor:
        """Choose among keys [C, D], where `seen` [R, C], for `tokens` of T -> [R, G, n]."""


def choose(
    indexer: Indexer,
    placement: Placement,
    *,
    on_cpu: bool,
    tiles: Callable[[Sequence[slice]], Iterable[slice]] = iter,
) -> Tensor:
    """Return the numbers of the keys that each token attends to, [T, G, n], within its document.

    `tiles` selects the tiles to compute, given all (the planner computes one of each size).
    """
    keys, route = indexer.keys.flatten(0, 1), placement.earlier
    if not route.is_local:
        tag = Tag(Purpose.KEYS, tensor="indexer.k")
        exchange = KeyExchange(placement.channel, route.on(keys.device), tag)
        (keys,) = exchange.go_out((keys.contiguous(),))()
    documents = []
    lengths = zip(placement.segments, placement.whole_lengths, strict=True)
    for (size, length), own in zip(lengths, keys.split(route.mask.key_lengths), strict=False):
        lacking = length - len(own) if on_cpu else 0  # [Note: Ties]
        documents.append((len(own) - size, size, F.pad(own, (0, 0, 0, lacking))))
    return _numbers(indexer, documents, indexer.most(max(placement.split.lengths)), tiles)


def _numbers(
    indexer: Indexer,
    documents: Iterable[tuple[int, int, Tensor]],
    most: int,
    tiles: Callable[[Sequence[slice]], Iterable[slice]],
) -> Tensor:
    """Return the numbers [T, G, n], n = `most`, of slices: (first token, tokens, keys [C, D])."""
    shape = indexer.keys.shape[:2].numel(), indexer.num_choices, most
    numbers, token = indexer.keys.new_full(shape, -1, dtype=torch.int32), 0
    for before, size, keys in documents:
        rows = max(1, _MOST_SCORES // (indexer.num_heads * len(keys)))
        ends = range(token, token + size, rows)
        for tile in tiles([slice(n, min(n + rows, token + size)) for n in ends]):
            places = torch.arange(tile.start, tile.stop, device=keys.device) + (before - token)
            seen = torch.arange(len(keys), device=keys.device) <= places.unsqueeze(1)
            found = indexer.choose(tile, keys, seen)
            numbers[tile, :, : found.shape[-1]] = found
        token += size
    return numbers
