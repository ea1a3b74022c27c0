"""Stores of tokenised documents: in memory, joined, ended by eos, or a part of another one."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from isp.data.tokenizer import TokenArray

__all__ = [
    "ConcatStore",
    "EndedStore",
    "MemoryStore",
    "PartStore",
    "TokenStore",
    "held_out",
    "mixed",
]

logger = logging.getLogger(__name__)

_UINT64 = (1 << 64) - 1
EOS_PROBES = 256
"""Documents looked at to learn whether a store ends its documents with eos by itself."""


class TokenStore(Protocol):
    """Documents as token ids, with random access; `IndexedDataset` is one on disk."""

    @property
    def name(self) -> str:
        """This store's name in messages."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document; zero is allowed."""

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a document."""

    def where(self, document: int) -> str:
        """The source and the place in it, counted from 0, of a document."""


class MemoryStore:
    """Documents held in memory, one after the other in one array of `dtype`."""

    def __init__(self, name: str, documents: Iterable[TokenArray], *, dtype: np.dtype[Any]) -> None:
        self.name = name
        arrays = [tokens.astype(dtype) for tokens in documents]
        self.lengths = np.array([len(tokens) for tokens in arrays], dtype=np.int64)
        self._offsets = np.cumsum(self.lengths) - self.lengths
        self._tokens = np.concatenate([np.empty(0, dtype), *arrays])

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        offset = int(self._offsets[document])
        assert 0 <= start <= stop <= int(self.lengths[document])
        return self._tokens[offset + start : offset + stop]

    def where(self, document: int) -> str:
        return f"{self.name}, document {document}"


class EndedStore:
    """The documents of another store, each but the empty ones with eos at its end.

    Whether eos is there already is a habit of the program that wrote the store, and reading the
    last token of every document would read most of a large file. So `EOS_PROBES` of them are looked
    at, and the others are taken to be like the most of these.
    """

    def __init__(self, store: TokenStore, eos_id: int) -> None:
        self.name = store.name
        self._store = store
        self._eos_id = eos_id
        documents = np.flatnonzero(store.lengths)
        probes = documents[:: -(-len(documents) // EOS_PROBES) or 1]
        ends = zip(probes.tolist(), store.lengths[probes].tolist(), strict=True)
        last = [store.read(document, end - 1, end)[0] for document, end in ends]
        lacking = np.array(last, dtype=np.int64) != eos_id
        if len(probes) < len(documents) and len(set(lacking.tolist())) == 2:
            logger.warning(
                "%s: %d of %d documents looked at end with token %d, the tokenizer's end of"
                " document: the others are taken to be like the most of them",
                *(self.name, int((~lacking).sum()), len(probes), eos_id),
            )
        self.lengths = store.lengths.copy()
        self.lengths[documents] += bool(2 * lacking.sum() > len(lacking))
        self.lengths[probes] = store.lengths[probes] + lacking

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        stored = int(self._store.lengths[document])
        tokens = self._store.read(document, min(start, stored), min(stop, stored))
        return tokens if stop <= stored else np.append(tokens.astype(np.int64), self._eos_id)

    def where(self, document: int) -> str:
        return self._store.where(document)


class ConcatStore:
    """The documents of several stores, in their order."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self.name = ", ".join(store.name for store in stores)
        self.lengths = np.concatenate([store.lengths for store in stores])
        self._stores = stores
        self._ends = np.cumsum([len(store.lengths) for store in stores])  # in documents

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        store, own = self._find(document)
        return store.read(own, start, stop)

    def where(self, document: int) -> str:
        store, own = self._find(document)
        return store.where(own)

    def _find(self, document: int) -> tuple[TokenStore, int]:
        """The store of a document, and its place there."""
        place = int(np.searchsorted(self._ends, document, side="right"))
        store = self._stores[place]
        return store, document - int(self._ends[place]) + len(store.lengths)


class PartStore:
    """Some documents of another store; with `part`, these tokens of the only one."""

    def __init__(
        self,
        name: str,
        store: TokenStore,
        documents: npt.NDArray[np.int64],
        part: range | None = None,
    ) -> None:
        self.name, self._store, self._documents = name, store, documents
        self._first = 0 if part is None else part.start
        self.lengths = store.lengths[documents] if part is None else np.array([len(part)])

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        first = self._first
        return self._store.read(int(self._documents[document]), first + start, first + stop)

    def where(self, document: int) -> str:
        place = self._store.where(int(self._documents[document]))
        return f"{place}, behind token {self._first}" if self._first else place


def held_out(num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    """The held-out documents: true [num_documents], for about `fraction` of them.

    A hash of the document's index decides, so neither the seed nor documents added behind change
    what is held out.
    """
    x: npt.NDArray[np.uint64] = mixed(np.arange(1, num_documents + 1, dtype=np.uint64))
    # The upper 53 bits are exactly the fractions a float64 can tell apart.
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction


def mixed(x: Any) -> Any:
    """The bits of a number, or of an array of uint64, mixed: 64 that look random.

    Source: the finaliser of SplitMix64 (Steele et al. 2014).
    """
    x = x * 0x9E3779B97F4A7C15 & _UINT64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _UINT64
    return x ^ (x >> 31)
