"""Samples of fixed length, cut from a stream of shuffled documents: `PackedDataset`.

Shapes: S sequence (`seq_len`).
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from isp.data.stores import TokenStore, hashed
from isp.data.tokenizer import TokenArray
from isp.utils.text import counted

__all__ = [
    "IGNORE_INDEX",
    "Dataset",
    "PackedDataset",
    "Sample",
    "check_ids",
    "cut",
    "positions_of",
    "shuffled",
]

IGNORE_INDEX = -100
"""Label of a token that the loss leaves out; the default `ignore_index` of torch."""

_SHUFFLE_ROUNDS = 6
"""Rounds of the Feistel network of `shuffled`."""

_Int64Array = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """A sequence of `seq_len` tokens with its labels and positions."""

    tokens: _Int64Array  # [S]
    labels: _Int64Array  # [S], shifted: the next token, or IGNORE_INDEX
    positions: _Int64Array  # [S], counted from 0 in the piece of each document
    padding: int = 0
    """Number of padding tokens at the end."""


class Dataset(Protocol):
    """An endless sequence of samples; sample i is a function of i alone."""

    @property
    def pack(self) -> bool:
        """True if attention and positions are separate for each document of a sample."""

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the data; 0 for a stream, whose length is unknown."""

    @property
    def tokens_per_sample(self) -> float:
        """Mean number of tokens of a sample that are not padding."""

    @property
    def summary(self) -> str:
        """Size of the data in one or more lines for the log."""

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0; raise ValueError for ids outside the vocabulary."""


class _Epoch(NamedTuple):
    """Order of the documents and of the samples in one pass over the store."""

    number: int
    documents: _Int64Array  # [D], documents with tokens, in the order of the stream
    ends: _Int64Array  # [D], end of each of them in the stream, in tokens
    key: int  # selects the permutation of the samples


class PackedDataset:
    """Samples of concatenated documents; sample i is a function of the store, `seed` and i.

    [Note: Sample order] Each epoch shuffles the documents, concatenates them into one stream, cuts
    the stream into samples of `seq_len` tokens, and shuffles the samples. The remainder at the end
    of the stream is dropped; it is a different one in each epoch. Neither the stream nor the order
    of the samples is stored: `sample` computes the position in the stream, finds the documents by
    bisection, and reads only the tokens of the sample. Opening a store therefore reads no tokens,
    and an epoch costs one permutation of the documents: about 80 bytes of memory and half a
    microsecond for each document, whatever their length.

    With `pack`, documents are separate: positions restart at each, and the last token before
    another document has no label. Without `pack`, the stream is cut as it is.
    `note` is appended to the summary. Raises ValueError for a store with fewer tokens than one
    sample needs.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        vocab_size: int,
        seq_len: int,
        pack: bool,
        seed: int,
        note: str = "",
    ) -> None:
        assert seed >= 0
        self.seq_len = seq_len
        self.tokens_per_sample = float(seq_len)
        self.pack = pack
        self._store = store
        self._vocab_size = vocab_size
        self._seed = seed
        self._documents = np.flatnonzero(store.lengths)
        self.num_tokens = int(store.lengths.sum())
        # Without `pack`, the last token of a sample has a label too, which is one token further on.
        self.samples_per_epoch = (self.num_tokens - (0 if pack else 1)) // seq_len
        if self.samples_per_epoch < 1:
            raise ValueError(
                f"data.seq_len={seq_len} needs at least {seq_len + (0 if pack else 1):,} tokens, "
                f"and {store.name} has {self.num_tokens:,} in"
                f" {counted(len(self._documents), 'document')}: give more text or a smaller"
                " data.seq_len"
            )
        self._recent: tuple[_Epoch, ...] = ()
        self._note = note

    @property
    def summary(self) -> str:
        """Numbers of documents, tokens and samples in one line for the log."""
        return (
            f"{self._store.name}: {counted(len(self._documents), 'document')},"
            f" {counted(self.num_tokens, 'token')},"
            f" {counted(self.samples_per_epoch, 'sample')} of {self.seq_len:,}{self._note}"
        )

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0; raise ValueError for ids outside the vocabulary."""
        number, place = divmod(index, self.samples_per_epoch)
        epoch = self._epoch(number)
        start = shuffled(place, self.samples_per_epoch, epoch.key) * self.seq_len
        # One token beyond the sample is the label of its last token; with `pack` there may be none.
        pieces = self._read(epoch, start, min(start + self.seq_len + 1, self.num_tokens))
        stream = np.concatenate(pieces, dtype=np.int64)  # [S + 1], or [S] at the very end
        ends = np.cumsum([len(piece) for piece in pieces])
        return cut(stream, ends, self.seq_len, self.pack)

    def _read(self, epoch: _Epoch, start: int, stop: int) -> list[TokenArray]:
        """Return tokens [start, stop) of the stream, one array for each document."""
        pieces: list[TokenArray] = []
        # The first document that ends after `start` contains it.
        place = int(np.searchsorted(epoch.ends, start, side="right"))
        while start < stop:
            document, end = int(epoch.documents[place]), int(epoch.ends[place])
            offset = end - int(self._store.lengths[document])  # begin of the document in the stream
            piece = self._store.read(document, start - offset, min(stop, end) - offset)
            check_ids(
                piece,
                vocab_size=self._vocab_size,
                where=self._store.where(document),
                start=start - offset,
            )
            pieces.append(piece)
            start, place = end, place + 1
        return pieces

    def _epoch(self, number: int) -> _Epoch:
        """Return the order of one epoch, from the last two used or computed anew.

        Two are kept because a batch may have samples of both sides of an epoch's end.
        """
        for epoch in self._recent:
            if epoch.number == number:
                return epoch
        generator = np.random.default_rng([self._seed, number])
        documents = generator.permutation(self._documents)
        ends = np.cumsum(self._store.lengths[documents])
        epoch = _Epoch(number, documents, ends, int(generator.integers(1 << 63)))
        # One assignment of a new tuple: a prefetching thread may read it at the same time.
        self._recent = (epoch, *self._recent[:1])
        return epoch


def cut(stream: _Int64Array, ends: _Int64Array, seq_len: int, pack: bool) -> Sample:
    """Return the sample made of the first S tokens of `stream` [S + 1] or [S].

    `ends`: end of each document's piece in `stream`, in tokens; used only with `pack`.
    """
    labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int64)
    labels[: len(stream) - 1] = stream[1:]
    ends = ends[ends <= seq_len] if pack else ends[:0]
    # A document that goes on after the sample ends at S + 1, so it was left out of `ends` above
    # and the last token of the sample keeps its label.
    labels[ends - 1] = IGNORE_INDEX
    return Sample(stream[:seq_len], labels, positions_of(ends, seq_len))


def positions_of(ends: _Int64Array, length: int) -> _Int64Array:
    """Return positions [length] that restart at 0 after each of `ends`."""
    places = np.arange(length)
    starts = np.zeros(length, dtype=np.int64)
    starts[ends[ends < length]] = ends[ends < length]
    # The running maximum carries the start of each document to all of its tokens.
    return places - np.maximum.accumulate(starts)


def check_ids(tokens: TokenArray, *, vocab_size: int, where: str, start: int = 0) -> None:
    """Raise ValueError for ids outside of [0, vocab_size), which have no row of the embedding.

    `where` names the document in the error, and `start` is the index of `tokens[0]` in it.
    """
    if not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    at = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    raise ValueError(
        f"{where}, token {start + at} is id {tokens[at]}, and the tokenizer has {vocab_size:,}"
        f" (0..{vocab_size - 1}): set data.tokenizer to the one these tokens were made with, or"
        f" write the file again"
    )


def shuffled(index: int, size: int, key: int) -> int:
    """Return element `index` of a permutation of range(size) that `key` selects, in O(1).

    A Feistel network permutes the range up to the next power of 4; a result outside of
    range(size) is permuted again until it is inside (cycle walking).
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    half = max(1, -(-(size - 1).bit_length() // 2))  # bits of each of the two halves
    mask = (1 << half) - 1
    while True:  # ends: a permutation returns to `index`, which is inside
        left, right = index >> half, index & mask
        for turn in range(_SHUFFLE_ROUNDS):
            bits = hashed(key + right + (turn << half))
            left, right = right, left ^ (bits & mask)
        index = left << half | right
        if index < size:
            return index
