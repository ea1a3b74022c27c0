"""Fixed-length samples cut from shuffled documents, by index alone.

Shapes: S sequence (`seq_len`).
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from isp.data.stores import TokenStore, mixed
from isp.data.tokenizer import TokenArray
from isp.utils.counts import counted

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
"""The label of a token that the loss leaves out; torch's own default."""

_SHUFFLE_ROUNDS = 6

_Int64Array = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """`seq_len` tokens of the stream."""

    tokens: _Int64Array  # [S]
    labels: _Int64Array  # [S], the token to predict or IGNORE_INDEX
    positions: _Int64Array  # [S], from 0 in each document's piece
    padding: int = 0
    """Tokens at the end that belong to no document."""


class Dataset(Protocol):
    """Sample i of an endless sequence, as a pure function of i."""

    @property
    def pack(self) -> bool:
        """Whether samples hold several documents, each a world of its own."""

    @property
    def samples_per_epoch(self) -> int:
        """Samples after which each has come once; 0: not known, of a stream."""

    @property
    def tokens_per_sample(self) -> float:
        """Tokens in a sample that are not padding, on average."""

    @property
    def summary(self) -> str:
        """How much there is, in a line or several for the log."""

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0.  Raises ValueError for ids outside the tokenizer's vocabulary."""


class _Epoch(NamedTuple):
    """One pass over the store: `documents` in stream order, and where each ends."""

    number: int
    documents: _Int64Array  # [documents with tokens]
    ends: _Int64Array  # the same, in tokens of the stream
    key: int  # of the shuffle of its samples


class PackedDataset:
    """Sample i of an endless sequence, as a pure function of the store, `seed` and i.

    [Note: Sample order] Each epoch shuffles the documents, joins them into one stream, cuts the
    stream into pieces of `seq_len`, and shuffles the pieces; what is left at the end of the stream
    is dropped, another part each epoch. The stream is never built, nor is the order of the pieces:
    a sample works out its place, finds its documents by bisection and reads only its own tokens. So
    opening reads no tokens, and an epoch costs one permutation of the documents: in all about 80
    bytes of memory and half a microsecond a document, whatever their length.

    With `pack`, a document is a world of its own: positions restart at each piece, and the last
    token before another document has no label. Without, the stream is cut as it is.
    `note` ends the summary. Raises ValueError if the store has fewer tokens than one sample.
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
        # The plain stream gives every token a label, so the last sample needs one token more.
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
        """How much there is, in a line for the log."""
        return (
            f"{self._store.name}: {counted(len(self._documents), 'document')},"
            f" {counted(self.num_tokens, 'token')},"
            f" {counted(self.samples_per_epoch, 'sample')} of {self.seq_len:,}{self._note}"
        )

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0.  Raises ValueError for ids outside the tokenizer's vocabulary."""
        number, place = divmod(index, self.samples_per_epoch)
        epoch = self._epoch(number)
        start = shuffled(place, self.samples_per_epoch, epoch.key) * self.seq_len
        # One token beyond the sample, where there is one, to be the last label.
        pieces = self._read(epoch, start, min(start + self.seq_len + 1, self.num_tokens))
        stream = np.concatenate(pieces, dtype=np.int64)  # [S + 1], or [S] at the very end
        ends = np.cumsum([len(piece) for piece in pieces])
        return cut(stream, ends, self.seq_len, self.pack)

    def _read(self, epoch: _Epoch, start: int, stop: int) -> list[TokenArray]:
        """Tokens [start, stop) of the stream, split between documents."""
        pieces: list[TokenArray] = []
        place = int(np.searchsorted(epoch.ends, start, side="right"))
        while start < stop:
            document, end = int(epoch.documents[place]), int(epoch.ends[place])
            offset = end - int(self._store.lengths[document])
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
        """The order of one epoch; the last two are kept, for a batch may lie across an end."""
        for epoch in self._recent:
            if epoch.number == number:
                return epoch
        generator = np.random.default_rng([self._seed, number])
        documents = generator.permutation(self._documents)
        ends = np.cumsum(self._store.lengths[documents])
        epoch = _Epoch(number, documents, ends, int(generator.integers(1 << 63)))
        # Replaced at once, never changed: a prefetching thread may look at the same time.
        self._recent = (epoch, *self._recent[:1])
        return epoch


def cut(stream: _Int64Array, ends: _Int64Array, seq_len: int, pack: bool) -> Sample:
    """The sample at the head of `stream` [S + 1], whose documents' pieces end at `ends`."""
    labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int64)
    labels[: len(stream) - 1] = stream[1:]
    ends = ends[ends <= seq_len] if pack else ends[:0]
    # A piece that goes on behind the sample ends at S + 1: its last token keeps its label.
    labels[ends - 1] = IGNORE_INDEX
    return Sample(stream[:seq_len], labels, positions_of(ends, seq_len))


def positions_of(ends: _Int64Array, length: int) -> _Int64Array:
    """Positions [length] that restart behind each of `ends`."""
    places = np.arange(length)
    starts = np.zeros(length, dtype=np.int64)
    starts[ends[ends < length]] = ends[ends < length]
    return places - np.maximum.accumulate(starts)


def check_ids(tokens: TokenArray, *, vocab_size: int, where: str, start: int = 0) -> None:
    """Refuse ids that no row of the embedding stands for, in the tokens from `start` on."""
    if not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    at = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    raise ValueError(
        f"{where}, token {start + at} is id {tokens[at]}, and the tokenizer has {vocab_size:,}"
        f" (0..{vocab_size - 1}): set data.tokenizer to the one these tokens were made with, or"
        f" write the file again"
    )


def shuffled(index: int, size: int, key: int) -> int:
    """The element at `index` of a permutation of range(size) that `key` chooses, in O(1).

    A Feistel network over the next power of 4 mixes the bits; what lands outside is mixed again.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_SHUFFLE_ROUNDS):
            mixture = mixed(key + right + (turn << half))
            left, right = right, left ^ (mixture & mask)
        index = left << half | right
        if index < size:
            return index
