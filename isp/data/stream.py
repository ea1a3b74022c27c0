"""`StreamDataset`: text read in order, without an index or a copy in memory (`data.streaming`).

A place in the stream is five integers, from which a run resumes on any number of ranks. See
[Note: Streams] in docs/design/notes/data.md.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isp.data.dataset import Sample, cut
from isp.data.documents import read_documents
from isp.data.examples import check_any
from isp.data.tokenizer import TokenArray
from isp.utils.text import counted

__all__ = ["StreamDataset", "is_place"]

BLOCK = 1024
"""Number of consecutive documents that are in memory at a time, and shuffled among themselves."""

_Tokens = npt.NDArray[np.int64]


class _Place(NamedTuple):
    """A place in the stream, at which a sample or a document begins."""

    epoch: int = 0
    file: int = 0
    """Index of the file in the shuffled order of the epoch."""
    before: int = 0
    """Number of documents of the file before the current block."""
    document: int = 0
    """Index of the document in the shuffled order of the block."""
    token: int = 0
    """Index of the token in the document."""


def is_place(value: object) -> bool:
    """Return True if `value` has the form of a result of `StreamDataset.tell`."""
    return (
        isinstance(value, list)
        and len(value) == len(_Place._fields)
        and all(isinstance(number, int) and number >= 0 for number in value)
    )


class StreamDataset:
    """Samples of an endless stream of text, to be read with increasing indices.

    For a smaller index than in the call before, `sample` and `tell` read again from the place of
    the last `seek`. `encode` returns the tokens of a document, to which eos is added if it is not
    at the end. `note` is appended to `summary`, the line for the log.
    """

    samples_per_epoch = 0  # It is not known: all files would have to be read.

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        encode: Callable[[str], TokenArray],
        *,
        eos_id: int,
        text_key: str,
        seq_len: int,
        pack: bool,
        seed: int,
        note: str = "",
    ) -> None:
        self._name, self._files, self._encode, self._text_key = name, files, encode, text_key
        self._eos_id = eos_id
        self.seq_len, self.pack, self._seed = seq_len, pack, seed
        self.tokens_per_sample = float(seq_len)
        self.summary = (
            f"{name}: {counted(len(files), 'file')}, streamed in samples of {seq_len:,}{note}"
        )
        self.seek(0, _Place())

    def seek(self, index: int, place: Sequence[int]) -> None:
        """Go to `place`, the result of `tell(index)`, at which sample `index` begins."""
        self._begin = index, _Place(*place)
        self._next = index
        self._documents = self._read(self._begin[1])
        self._held: deque[tuple[_Place, _Tokens]] = deque()
        """Documents, or ends of them, from the place of sample `_next` on."""

    def tell(self, index: int) -> list[int]:
        """Return the place in the stream at which sample `index` begins."""
        self._move(index)
        return list(self._held[0][0])

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0; raise ValueError for a source without text."""
        self._move(index)
        pieces = [tokens for _, tokens in self._held]
        ends = np.cumsum([len(piece) for piece in pieces])
        return cut(np.concatenate(pieces)[: self.seq_len + 1], ends, self.seq_len, self.pack)

    def _move(self, index: int) -> None:
        """Read on until `_held` begins with sample `index`, and has the token after it, too."""
        if index < self._next:  # the stream cannot be read backward: begin again
            self.seek(*self._begin)
        self._fill()
        while self._next < index:
            left = self.seq_len  # tokens of this sample that still have to be dropped
            while left:
                place, tokens = self._held.popleft()
                if len(tokens) > left:  # the rest of the document begins the next sample
                    at = place._replace(token=place.token + left)
                    self._held.appendleft((at, tokens[left:]))
                left -= min(left, len(tokens))
            self._next += 1
            self._fill()

    def _fill(self) -> None:
        """Read documents until `_held` has more than `seq_len` tokens: a sample and a label."""
        held = sum(len(tokens) for _, tokens in self._held)
        while held <= self.seq_len:
            self._held.append(next(self._documents))
            held += len(self._held[-1][1])

    def _read(self, place: _Place) -> Iterator[tuple[_Place, _Tokens]]:
        """Yield the documents from `place` on, each with its place, epoch after epoch."""
        while True:
            order = np.random.default_rng([self._seed, place.epoch]).permutation(len(self._files))
            # An epoch without any document would make this loop run forever. Only an epoch that is
            # read from its beginning shows that there is none.
            is_empty = place == _Place(place.epoch)
            for number in range(place.file, len(order)):
                file = int(order[number])
                place = place._replace(file=number)
                texts = read_documents(self._files[file], text_key=self._text_key)
                # Files have no index, so this reads the documents that it skips.
                left = islice(texts, place.before, None)
                while block := [document.text for document in islice(left, BLOCK)]:
                    is_empty = False
                    key = [self._seed, place.epoch, file, place.before]
                    shuffled = np.random.default_rng(key).permutation(len(block))
                    for choice in shuffled[place.document :]:
                        yield place, self._document(block[choice])[place.token :]
                        place = place._replace(document=place.document + 1, token=0)
                    place = place._replace(before=place.before + len(block), document=0)
                place = _Place(place.epoch)  # the next file begins at its first document
            check_any(not is_empty, self._name)
            place = _Place(place.epoch + 1)

    def _document(self, text: str) -> _Tokens:
        """Return the tokens of `text` with eos at the end."""
        tokens, eos = self._encode(text).astype(np.int64), self._eos_id
        return tokens if len(tokens) and tokens[-1] == eos else np.append(tokens, eos)
