"""Fixed-length samples cut from shuffled documents, by index alone.

Shapes: S sequence (`seq_len`), N documents of the store, n documents with a piece in the sample.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isp.data.stores import TokenStore
from isp.data.tokenizer import TokenArray, Tokenizer

__all__ = ["IGNORE_INDEX", "PackedDataset", "Sample"]

IGNORE_INDEX = -100
"""The label of a token that the loss leaves out; torch's own default."""

EOS_PROBES = 4096
"""Documents looked at to learn whether a store ends its documents with eos by itself."""

Int64Array = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """`seq_len` tokens of the stream."""

    tokens: Int64Array  # [S]
    labels: Int64Array  # [S], the token to predict or IGNORE_INDEX
    positions: Int64Array  # [S], counted from the start of each document's piece
    document_lengths: Int64Array  # [n], sums to S


class _Epoch(NamedTuple):
    """One pass over the store: `documents` in stream order, where each ends, and the samples."""

    number: int
    documents: Int64Array  # [documents with tokens]
    ends: Int64Array  # the same, in tokens of the stream
    samples: Int64Array  # [samples_per_epoch], the piece of the stream that comes at each place


class PackedDataset:
    """Sample i of an endless sequence, as a pure function of the store, `seed` and i.

    [Note: Sample order] Each epoch shuffles the documents, joins them into one stream with eos
    after each, cuts the stream into pieces of `seq_len`, and shuffles the pieces; what is left at
    the end of the stream is dropped, another part each epoch. The stream is never built: a sample
    finds its documents by bisection and reads only its own tokens, so opening costs the document
    lengths and an epoch two permutations.

    With `pack`, a document is a world of its own: positions restart at each piece, and the last
    token before another document has no label. Without, the stream is cut as it is.
    Raises ValueError if the store has fewer tokens than one sample.
    """

    def __init__(
        self, store: TokenStore, tokenizer: Tokenizer, *, seq_len: int, pack: bool, seed: int
    ) -> None:
        assert seed >= 0
        self.seq_len = seq_len
        self.pack = pack
        self._store = store
        self._eos_id = tokenizer.eos_id
        self._vocab_size = tokenizer.vocab_size
        self._seed = seed
        self._documents = np.flatnonzero(store.lengths)
        self._lengths = store.lengths + self._missing_eos()  # [N], with eos
        self.num_tokens = int(self._lengths.sum())
        # The plain stream gives every token a label, so the last sample needs one token more.
        self.samples_per_epoch = (self.num_tokens - (0 if pack else 1)) // seq_len
        if self.samples_per_epoch < 1:
            raise ValueError(
                f"data.seq_len={seq_len} needs at least {seq_len + (0 if pack else 1):,} tokens, "
                f"and {store.name} has {self.num_tokens:,} in {len(self._documents):,} documents: "
                "give more text or a smaller data.seq_len"
            )
        self._recent: tuple[_Epoch, ...] = ()

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0.  Raises ValueError for ids outside the tokenizer's vocabulary."""
        number, place = divmod(index, self.samples_per_epoch)
        epoch = self._epoch(number)
        start = int(epoch.samples[place]) * self.seq_len
        # One token beyond the sample, where there is one, to be the last label.
        pieces = self._read(epoch, start, min(start + self.seq_len + 1, self.num_tokens))
        stream = np.concatenate(pieces, dtype=np.int64)  # [S + 1], or [S] at the very end
        self._check_ids(stream)
        return self._cut(stream, np.cumsum([len(piece) for piece in pieces]))

    def _cut(self, stream: Int64Array, ends: Int64Array) -> Sample:
        """The sample at the head of `stream`, whose documents' pieces end at `ends`."""
        labels = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        labels[: len(stream) - 1] = stream[1:]
        bounds = np.append(ends[ends < self.seq_len], self.seq_len)
        if self.pack:
            # A piece that goes on behind the sample ends at S + 1: its last token keeps its label.
            labels[ends[ends <= self.seq_len] - 1] = IGNORE_INDEX
        else:
            bounds = bounds[-1:]
        lengths = np.diff(bounds, prepend=0)
        positions = np.arange(self.seq_len) - np.repeat(bounds - lengths, lengths)
        return Sample(stream[: self.seq_len], labels, positions, lengths)

    def _read(self, epoch: _Epoch, start: int, stop: int) -> list[TokenArray]:
        """Tokens [start, stop) of the stream, split between documents."""
        pieces: list[TokenArray] = []
        place = int(np.searchsorted(epoch.ends, start, side="right"))
        while start < stop:
            document, end = int(epoch.documents[place]), int(epoch.ends[place])
            offset = end - int(self._lengths[document])
            stored = int(self._store.lengths[document])
            piece = self._store.read(
                document, min(start - offset, stored), min(stop - offset, stored)
            )
            if min(stop, end) - offset > stored:
                piece = np.append(piece.astype(np.int64), self._eos_id)
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
        ends = np.cumsum(self._lengths[documents])
        epoch = _Epoch(number, documents, ends, generator.permutation(self.samples_per_epoch))
        # Replaced at once, never changed: a prefetching thread may look at the same time.
        self._recent = (epoch, *self._recent[:1])
        return epoch

    def _missing_eos(self) -> Int64Array:
        """1 for each document to which eos has to be added, 0 for the others, [N].

        Whether documents end with eos is a habit of the program that wrote the store. Reading the
        last token of every document would read most of a large file, so a sample of them decides,
        and only a store with both kinds is looked at whole.
        """
        missing = np.zeros(len(self._store.lengths), dtype=np.int64)
        probes = self._documents[:: max(1, len(self._documents) // EOS_PROBES)].tolist()
        found = {self._lacks_eos(document) for document in probes}
        for document in self._documents.tolist() if len(found) == 2 else ():
            missing[document] = self._lacks_eos(document)
        if found == {True}:
            missing[self._documents] = 1
        return missing

    def _lacks_eos(self, document: int) -> bool:
        """Whether eos has to be added to a document."""
        length = int(self._store.lengths[document])
        return int(self._store.read(document, length - 1, length)[0]) != self._eos_id

    def _check_ids(self, tokens: Int64Array) -> None:
        """Refuse ids that no row of the embedding stands for."""
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(
                f"{self._store.name} holds token ids {tokens.min()}..{tokens.max()}, and the "
                f"tokenizer has {self._vocab_size:,} (0..{self._vocab_size - 1}): set "
                "data.tokenizer to the one these tokens were made with"
            )
