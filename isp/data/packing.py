"""Samples of whole examples: as many as fit into a sequence, which is padded at its end.

Shapes: S sequence (`seq_len`).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from isp.data.config import ExcessLength
from isp.data.dataset import IGNORE_INDEX, Sample, check_ids, positions_of, shuffled
from isp.data.examples import ExampleStore, check_trained, count_trained

__all__ = ["ExampleDataset", "best_fit"]

_Int64Array = npt.NDArray[np.int64]


class ExampleDataset:
    """Sample i of an endless sequence, as a pure function of the store, `seed` and i.

    [Note: Packed sequences] Examples are packed once into sequences of `seq_len`, the longest
    first, each into the sequence with the least space that holds it; `seed` decides among those of
    one length. Each epoch shuffles the sequences. So an example is never cut to fill a sequence,
    every one comes once an epoch, and the order needs no state, as in [Note: Sample order]. The
    rest of a sequence is padding, which has no labels and is a document of its own.

    With `pack`, positions and attention are those of each example. Without, a sequence has one.
    Opening reads all labels. `excess_length` says what becomes of examples longer than `seq_len`;
    those without a trained token, after truncation, are dropped. Both are counted in the log.
    Raises ValueError if no example is left.
    """

    def __init__(
        self,
        store: ExampleStore,
        *,
        vocab_size: int,
        pad_id: int,
        seq_len: int,
        pack: bool,
        seed: int,
        excess_length: ExcessLength = ExcessLength.TRUNCATE,
    ) -> None:
        self.seq_len = seq_len
        self.pack = pack
        self._store = store
        self._vocab_size = vocab_size
        self._pad_id = pad_id
        self._seed = seed
        self._lengths = np.minimum(store.tokens.lengths, seq_len)
        usable, counts = self._usable(excess_length)
        chosen = np.random.default_rng(seed).permutation(usable)
        longest_first = chosen[np.argsort(-self._lengths[chosen], kind="stable")]
        self._sequences = (
            best_fit(longest_first.tolist(), self._lengths[longest_first].tolist(), seq_len)
            if pack
            else [[document] for document in chosen.tolist()]
        )
        self.samples_per_epoch = len(self._sequences)
        count = self.samples_per_epoch
        padding = 1 - int(self._lengths[chosen].sum()) / (count * seq_len)
        self.summary = f"{counts}; {count:,} samples of {seq_len:,}, {padding:.1%} of them padding"

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0.  Raises ValueError for ids outside the tokenizer's vocabulary."""
        epoch, place = divmod(index, self.samples_per_epoch)
        key = int(np.random.default_rng([self._seed, epoch]).integers(1 << 63))
        documents = self._sequences[shuffled(place, self.samples_per_epoch, key)]
        tokens = np.full(self.seq_len, self._pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        start = 0
        for document in documents:
            end = start + int(self._lengths[document])
            tokens[start:end] = self._read(document, labels=False)
            labels[start : end - 1] = self._read(document, labels=True)[1:]
            start = end
        ends = np.cumsum(self._lengths[documents])
        return Sample(tokens, labels, positions_of(ends if self.pack else ends[:0], self.seq_len))

    def _read(self, document: int, *, labels: bool) -> _Int64Array:
        """An example's tokens, or its labels, as far as they are used."""
        store = self._store.labels if labels else self._store.tokens
        ids = store.read(document, 0, int(self._lengths[document])).astype(np.int64)
        trained = np.where(ids == IGNORE_INDEX, 0, ids) if labels else ids
        check_ids(trained, vocab_size=self._vocab_size, where=store.where(document))
        return ids

    def _usable(self, excess_length: ExcessLength) -> tuple[_Int64Array, str]:
        """The examples that are trained on, and how many are and are not, in words."""
        tokens = self._store.tokens
        excess = tokens.lengths > self.seq_len
        if excess_length is ExcessLength.RAISE and excess.any():
            first = int(np.flatnonzero(excess)[0])
            raise ValueError(
                f"{tokens.where(first)} has {tokens.lengths[first]:,} tokens, more than"
                f" data.seq_len={self.seq_len}, as {int(excess.sum())} examples have:"
                f" data.excess_length_strategy=truncate or drop, or a larger data.seq_len"
            )
        dropped = excess & (excess_length is ExcessLength.DROP)
        ends = enumerate(self._lengths.tolist())
        labels = (self._store.labels.read(document, 0, end) for document, end in ends)
        trained = np.array([count_trained(of_one) for of_one in labels], dtype=np.int64)
        usable = np.flatnonzero(~dropped & (trained > 0))
        check_trained(len(usable) > 0, f"{tokens.name}, in examples of {self.seq_len} tokens,")
        done = "dropped" if excess_length is ExcessLength.DROP else "truncated"
        return usable, (
            f"{tokens.name}: {len(usable):,} examples, {int(self._lengths[usable].sum()):,} tokens,"
            f" {int(trained[usable].sum()):,} of them trained; {int(excess.sum()):,} examples"
            f" longer than data.seq_len={self.seq_len} {done},"
            f" {int((~dropped & (trained == 0)).sum()):,} without a trained token dropped"
        )


def best_fit(items: Iterable[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Sequences of `items`, each put in turn into the one with the least space that holds it.

    No size is above `capacity`. O(log capacity) an item, and a move in a list of at most as many.
    Source: best fit decreasing, as in Ding et al. 2024, "Fewer Truncations Improve Language
    Modeling"; the sizes have to come in decreasing order for its bound.
    """
    sequences: list[list[int]] = []
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # keys of it, sorted
    for item, size in zip(items, sizes, strict=True):
        at = bisect_left(spaces, size)
        if at == len(spaces):
            sequence, space = len(sequences), capacity
            sequences.append([])
        else:
            space = spaces[at]
            sequence = by_space[space].pop()
            if not by_space[space]:
                del by_space[spaces.pop(at)]
        sequences[sequence].append(item)
        if left := space - size:
            if left not in by_space:
                by_space[left] = []
                insort(spaces, left)
            by_space[left].append(sequence)
    return sequences
