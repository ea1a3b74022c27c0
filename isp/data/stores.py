"""Stores of tokenized documents: in memory, joined, with eos added, or a subset of another."""

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
    "hashed",
    "held_out",
]

logger = logging.getLogger(__name__)

_UINT64 = (1 << 64) - 1
EOS_PROBES = 256
"""Number of documents whose last token is read, to find out whether a store has eos already."""


class TokenStore(Protocol):
    """Interface of stores: documents of token ids, of which any part can be read."""

    @property
    def name(self) -> str:
        """Name of the store in log lines and errors."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each document, which may be 0."""

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Return tokens [start, stop) of a document."""

    def where(self, document: int) -> str:
        """Return where a document comes from, for errors: its file, and its index there from 0."""


class MemoryStore:
    """A store in memory: all documents concatenated in one array of `dtype`."""

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
    """The documents of another store, each with eos at its end unless it is empty.

    Eos is added where it is missing. To find that out for each document, most of a large file would
    have to be read. But programs write eos to all documents or to none: so only about `EOS_PROBES`
    documents are read, and eos is added to the others if most of these lack it.
    """

    def __init__(self, store: TokenStore, eos_id: int) -> None:
        self.name = store.name
        self._store = store
        self._eos_id = eos_id
        documents = np.flatnonzero(store.lengths)
        probes = documents[
            :: -(-len(documents) // EOS_PROBES) or 1
        ]  # they are spread over the store
        ends = zip(probes.tolist(), store.lengths[probes].tolist(), strict=True)
        last = [store.read(document, end - 1, end)[0] for document, end in ends]
        lacking = np.array(last, dtype=np.int64) != eos_id
        if len(probes) < len(documents) and len(set(lacking.tolist())) == 2:
            logger.warning(
                "%s: of the documents that were checked, %d of %d end with token %d, the"
                " tokenizer's end of document: the others are treated like most of these",
                *(self.name, int((~lacking).sum()), len(probes), eos_id),
            )
        # A length of one more than in `store` means that `read` adds eos to the document.
        self.lengths = store.lengths.copy()
        self.lengths[documents] += bool(2 * lacking.sum() > len(lacking))
        # Of the documents that were read, it is known which lack eos.
        self.lengths[probes] = store.lengths[probes] + lacking

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        stored = int(self._store.lengths[document])
        tokens = self._store.read(document, min(start, stored), min(stop, stored))
        return tokens if stop <= stored else np.append(tokens.astype(np.int64), self._eos_id)

    def where(self, document: int) -> str:
        return self._store.where(document)


class ConcatStore:
    """The documents of several stores as one store, in the order of `stores`."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self.name = ", ".join(store.name for store in stores)
        self.lengths = np.concatenate([store.lengths for store in stores])
        self._stores = stores
        # For each store: the index, in this store, of the first document after its documents.
        self._ends = np.cumsum([len(store.lengths) for store in stores])

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        store, own = self._find(document)
        return store.read(own, start, stop)

    def where(self, document: int) -> str:
        store, own = self._find(document)
        return store.where(own)

    def _find(self, document: int) -> tuple[TokenStore, int]:
        """Return the store that has a document, and the document's index in it."""
        place = int(np.searchsorted(self._ends, document, side="right"))
        store = self._stores[place]
        return store, document - int(self._ends[place]) + len(store.lengths)


class PartStore:
    """A subset of another store: `documents`, or only the tokens `part` of a single document."""

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
        return f"{place}, after token {self._first}" if self._first else place


def held_out(num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    """Return a mask [num_documents] of held-out documents, about `fraction` of them.

    A hash of the index decides, so which documents are held out does not depend on a seed, or on
    documents that are appended later.
    """
    x: npt.NDArray[np.uint64] = hashed(np.arange(1, num_documents + 1, dtype=np.uint64))
    # Turn the upper 53 bits into a number in [0, 1), which float64 represents exactly.
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction


def hashed(x: Any) -> Any:
    """Return a 64-bit hash of an int, or of each element of an array of uint64.

    Source: the finalizer of SplitMix64 (Steele et al. 2014).
    """
    x = x * 0x9E3779B97F4A7C15 & _UINT64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _UINT64
    return x ^ (x >> 31)
