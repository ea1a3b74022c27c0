"""The choice of keys for sparse attention, of sequences that are split over ranks.

B batch, S' and T = B S' the tokens of this rank, R queries and C keys of a tile, D size of a key,
G choices of a query, n numbers of a choice

An indexer scores a query against all keys before it in its document, by small keys of its own, and
keeps the best. Each slice of a document is sent the index keys before it, by the route that fetches
keys for attention; queries are not sent, and are scored a tile at a time.

    own [T, D] --all-to-all--> [L, D] --tiles, [R, C] scores of each head--> numbers [T, G, n]

backward   none: a choice has no gradient

[Note: Chosen, then by heads] Attention exchanges tokens for heads and fetches keys as ever, and
the numbers are all-gathered over the head ranks, 4 n bytes a token. To gather keys instead would be
fewer bytes for many ranks; but latents would be expanded on every rank, whose keys and values of
all heads and tokens are p times the memory.

[Note: Ties] Scores behind a ReLU are often equal: all zero. Which of equal ones torch's top-k takes
on a CPU depends on how many there are in all, so there a slice is scored against as many keys as
its document has, as the model alone does it.
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
"""Of a tile, over all heads, unless a query alone has more."""


class Indexer(Protocol):
    """A module that chooses keys, and what it was called with."""

    keys: Tensor
    """[B, S', D], of this rank's tokens."""
    num_heads: int
    """Scores of a query and a key."""
    num_choices: int
    """G."""

    def most(self, length: int) -> int:
        """n, at most, in a document of so many tokens."""

    def choose(self, tokens: slice, keys: Tensor, seen: Tensor) -> Tensor:
        """`tokens` of T, keys [C, D] of which they may choose where `seen` [R, C] -> [R, G, n]."""


def choose(
    indexer: Indexer,
    placement: Placement,
    *,
    on_cpu: bool,
    tiles: Callable[[Sequence[slice]], Iterable[slice]] = iter,
) -> Tensor:
    """The numbers of the keys that each token attends to, [T, G, n], within its document.

    `tiles`: which of alike tiles are run.
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
    """[T, G, n], `most` = n; of documents: where the tokens begin, how many, keys [C, D]."""
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
