"""`PackedDataset`: samples of fixed length, cut from a stream of shuffled documents.

S tokens in a sample (`seq_len`), D documents with tokens
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
"""Label of tokens without loss; the default `ignore_index` of torch's cross_entropy."""

_SHUFFLE_ROUNDS = 6
"""Number of rounds of the Feistel network in `shuffled`."""

_Int64Array = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """A sequence of `seq_len` tokens, with labels and positions."""

    tokens: _Int64Array  # [S]
    labels: _Int64Array  # [S], shifted: the next token, or IGNORE_INDEX
    positions: _Int64Array  # [S], from 0 for each document's part of the sample
    padding: int = 0
    """Number of padding tokens at the end."""


class Dataset(Protocol):
    """Interface of data sets: an endless sequence of samples, of which any can be read by index."""

    @property
    def pack(self) -> bool:
        """True if attention and positions are separate for each document of a sample."""

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in an epoch; 0 for a stream, whose length is not known."""

    @property
    def tokens_per_sample(self) -> float:
        """Mean number of tokens in a sample, without padding."""

    @property
    def summary(self) -> str:
        """Name and size of the data, in one or more lines for the log."""

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0; raise ValueError for ids outside the vocabulary."""


class _Epoch(NamedTuple):
    """Order of the documents and of the samples in one epoch."""

    number: int
    documents: _Int64Array  # [D], indices of documents with tokens, in the order of the stream
    ends: _Int64Array  # [D], end of each of these documents in the stream, in tokens
    key: int  # key of the permutation of the samples, for `shuffled`


class PackedDataset:
    """Samples cut from shuffled, concatenated documents.

    Sample i is a function of the store, `seed` and i, so resuming needs no state. See
    [Note: Sample order] in docs/design/notes/data.md.

    With `pack`, documents are separate: positions restart at each, and the last token before
    another document has no label. Without `pack`, the stream is cut as it is. `note` is appended to
    `summary`, the line for the log. Raises ValueError for a store with fewer tokens than one sample
    needs.
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
        # Without `pack`, the last token of a sample has a label, too: the token after the sample.
        # So the last sample needs one token more.
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
        """Name of the store, and numbers of documents, tokens and samples, as one log line."""
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
        # Read one token more: the label of the sample's last token. At the end of the stream, with
        # `pack`, there may be none.
        pieces = self._read(epoch, start, min(start + self.seq_len + 1, self.num_tokens))
        stream = np.concatenate(pieces, dtype=np.int64)  # [S + 1], or [S] at the stream's end
        ends = np.cumsum([len(piece) for piece in pieces])
        return cut(stream, ends, self.seq_len, self.pack)

    def _read(self, epoch: _Epoch, start: int, stop: int) -> list[TokenArray]:
        """Return tokens [start, stop) of the stream, one array for each document."""
        pieces: list[TokenArray] = []
        # The first document that ends after `start` is the one that has token `start`.
        place = int(np.searchsorted(epoch.ends, start, side="right"))
        while start < stop:
            document, end = int(epoch.documents[place]), int(epoch.ends[place])
            offset = end - int(self._store.lengths[document])  # where the document begins
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
        """Return the order of an epoch, computed unless it is one of the two used last.

        Two are kept because a batch may have samples from both sides of the end of an epoch.
        """
        for epoch in self._recent:
            if epoch.number == number:
                return epoch
        generator = np.random.default_rng([self._seed, number])
        documents = generator.permutation(self._documents)
        ends = np.cumsum(self._store.lengths[documents])
        epoch = _Epoch(number, documents, ends, int(generator.integers(1 << 63)))
        # Assign a whole new tuple: the prefetching thread may read `_recent` at the same time.
        self._recent = (epoch, *self._recent[:1])
        return epoch


def cut(stream: _Int64Array, ends: _Int64Array, seq_len: int, pack: bool) -> Sample:
    """Return the sample of the first S tokens of `stream`, which has S + 1 tokens or S.

    `ends`: where each document's part of `stream` ends, in tokens; used only with `pack`.
    """
    labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int64)
    labels[: len(stream) - 1] = stream[1:]
    ends = ends[ends <= seq_len] if pack else ends[:0]
    # No label for the last token of each document. A document that goes on after the sample has its
    # end at S + 1, which was left out above: the last token of the sample keeps its label.
    labels[ends - 1] = IGNORE_INDEX
    return Sample(stream[:seq_len], labels, positions_of(ends, seq_len))


def positions_of(ends: _Int64Array, length: int) -> _Int64Array:
    """Return positions [length], counted from 0, that restart at each of `ends`."""
    places = np.arange(length)
    starts = np.zeros(length, dtype=np.int64)
    starts[ends[ends < length]] = ends[ends < length]
    # `starts` has the index of each document's first token there, and 0 elsewhere. The running
    # maximum carries it on to all tokens of the document.
    return places - np.maximum.accumulate(starts)


def check_ids(tokens: TokenArray, *, vocab_size: int, where: str, start: int = 0) -> None:
    """Raise ValueError for ids outside of [0, vocab_size), for which there is no embedding.

    `where` names the document, and `start` is the index of `tokens[0]` in it, for the error.
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
    """Return element `index` of the permutation of range(size) that `key` selects, in O(1).

    The permutation is computed, not stored. A Feistel network permutes the numbers below the next
    power of 4; a result outside of range(size) is permuted again until it is inside (cycle
    walking). Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    half = max(1, -(-(size - 1).bit_length() // 2))  # number of bits in each half of an index
    mask = (1 << half) - 1
    while True:  # this ends: repeated, a permutation comes back to `index`, which is inside
        left, right = index >> half, index & mask
        for turn in range(_SHUFFLE_ROUNDS):
            bits = hashed(key + right + (turn << half))
            left, right = right, left ^ (bits & mask)
        index = left << half | right
        if index < size:
            return index
