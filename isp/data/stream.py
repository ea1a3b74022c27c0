"""Text that is read in order and never indexed: `data.streaming`.

[Note: Streams] Each epoch shuffles the files, and each block of `BLOCK` documents of a file. So a
place in the stream is five whole numbers, and what follows it depends on them, the files and the
seed alone. Every rank that reads tokenises the whole stream and keeps its own samples: ranks change
nothing, and a run resumes on any number of them from the place that its checkpoint has, of whose
file alone the beginning is read again.
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
from isp.utils.counts import counted

__all__ = ["StreamDataset", "is_place"]

BLOCK = 1024

_Tokens = npt.NDArray[np.int64]


class _Place(NamedTuple):
    epoch: int = 0
    file: int = 0
    """In the order of the epoch."""
    before: int = 0
    """Documents of the file that come before the block."""
    document: int = 0
    """In the order of the block."""
    token: int = 0
    """Of the document."""


def is_place(value: object) -> bool:
    """Return whether `value` has the form of what `StreamDataset.tell` returns."""
    return (
        isinstance(value, list)
        and len(value) == len(_Place._fields)
        and all(isinstance(number, int) and number >= 0 for number in value)
    )


class StreamDataset:
    """Sample i of an endless stream; `sample` and `tell` are asked for increasing numbers.

    An earlier number is found by reading again from where `seek` has begun.
    """

    samples_per_epoch = 0  # not known

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
        """Let sample `index` begin at `place`, which `tell` gave."""
        self._begin = index, _Place(*place)
        self._next = index
        self._documents = self._read(self._begin[1])
        self._held: deque[tuple[_Place, _Tokens]] = deque()

    def tell(self, index: int) -> list[int]:
        """The place at which sample `index` begins."""
        self._move(index)
        return list(self._held[0][0])

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0.  Raises ValueError for a source without text."""
        self._move(index)
        pieces = [tokens for _, tokens in self._held]
        ends = np.cumsum([len(piece) for piece in pieces])
        return cut(np.concatenate(pieces)[: self.seq_len + 1], ends, self.seq_len, self.pack)

    def _move(self, index: int) -> None:
        """Hold the tokens of sample `index`, and the one behind it."""
        if index < self._next:
            self.seek(*self._begin)
        self._fill()
        while self._next < index:
            left = self.seq_len
            while left:
                place, tokens = self._held.popleft()
                if len(tokens) > left:
                    at = place._replace(token=place.token + left)
                    self._held.appendleft((at, tokens[left:]))
                left -= min(left, len(tokens))
            self._next += 1
            self._fill()

    def _fill(self) -> None:
        held = sum(len(tokens) for _, tokens in self._held)
        while held <= self.seq_len:
            self._held.append(next(self._documents))
            held += len(self._held[-1][1])

    def _read(self, place: _Place) -> Iterator[tuple[_Place, _Tokens]]:
        """The documents from `place` on, each with its own."""
        while True:
            order = np.random.default_rng([self._seed, place.epoch]).permutation(len(self._files))
            is_empty = place == _Place(place.epoch)
            for number in range(place.file, len(order)):
                file = int(order[number])
                place = place._replace(file=number)
                texts = read_documents(self._files[file], text_key=self._text_key)
                left = islice(texts, place.before, None)
                while block := [document.text for document in islice(left, BLOCK)]:
                    is_empty = False
                    key = [self._seed, place.epoch, file, place.before]
                    shuffled = np.random.default_rng(key).permutation(len(block))
                    for choice in shuffled[place.document :]:
                        yield place, self._document(block[choice])[place.token :]
                        place = place._replace(document=place.document + 1, token=0)
                    place = place._replace(before=place.before + len(block), document=0)
                place = _Place(place.epoch)
            check_any(not is_empty, self._name)
            place = _Place(place.epoch + 1)

    def _document(self, text: str) -> _Tokens:
        tokens, eos = self._encode(text).astype(np.int64), self._eos_id
        return tokens if len(tokens) and tokens[-1] == eos else np.append(tokens, eos)
