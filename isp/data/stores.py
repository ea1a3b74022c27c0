"""Stores of tokenised documents: in memory, joined, or a part of another one."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from isp.data.tokenizer import TokenArray

__all__ = ["ConcatStore", "MemoryStore", "SubsetStore", "TokenStore", "held_out"]


class TokenStore(Protocol):
    """Documents as token ids, with random access; `IndexedDataset` is one on disk."""

    @property
    def name(self) -> str:
        """What messages call this store."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document; zero is allowed."""

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a document."""


class MemoryStore:
    """Documents held in memory, one after the other in one array of `dtype`."""

    def __init__(self, name: str, documents: Iterable[TokenArray], *, dtype: np.dtype[Any]) -> None:
        self.name = name
        arrays = [tokens.astype(dtype) for tokens in documents]
        self.lengths = np.array([len(tokens) for tokens in arrays], dtype=np.int64)
        self._offsets = np.cumsum(self.lengths) - self.lengths
        self._tokens = np.concatenate([np.empty(0, dtype), *arrays])

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a document."""
        offset = int(self._offsets[document])
        assert 0 <= start <= stop <= int(self.lengths[document])
        return self._tokens[offset + start : offset + stop]


class ConcatStore:
    """The documents of several stores, in their order."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self.name = ", ".join(store.name for store in stores)
        self.lengths = np.concatenate([store.lengths for store in stores])
        self._stores = stores
        self._ends = np.cumsum([len(store.lengths) for store in stores])  # in documents

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a document."""
        place = int(np.searchsorted(self._ends, document, side="right"))
        store = self._stores[place]
        return store.read(document - int(self._ends[place]) + len(store.lengths), start, stop)


class SubsetStore:
    """Some documents of another store."""

    def __init__(self, name: str, store: TokenStore, documents: npt.NDArray[np.int64]) -> None:
        self.name = name
        self.lengths = store.lengths[documents]
        self._store = store
        self._documents = documents

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a document."""
        return self._store.read(int(self._documents[document]), start, stop)


def held_out(num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    """Which documents are held out: true [num_documents], for about `fraction` of them.

    A hash of the document's index decides, so neither the seed nor documents added behind change
    what is held out.  Source: the finaliser of SplitMix64 (Steele et al. 2014).
    """
    x = np.arange(1, num_documents + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    # The upper 53 bits are exactly the fractions a float64 can tell apart.
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction
