"""`ExampleDataset`: samples of whole examples for fine-tuning, as many as fit, and padding."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from isp.config.data import ExcessLength
from isp.data.dataset import IGNORE_INDEX, Sample, check_ids, positions_of, shuffled
from isp.data.examples import ExampleStore, check_trained, count_trained
from isp.data.tokenizer import Tokenizer
from isp.utils.text import counted

__all__ = ["ExampleDataset", "best_fit"]

_Int64Array = npt.NDArray[np.int64]
_SHOWN_CHARACTERS = 200
"""Number of characters to which `ExampleDataset.shown` cuts each part of an example."""


class ExampleDataset:
    """Samples of examples that are packed into sequences once, before the first epoch.

    Sample i is a function of the store, `seed` and i, so resuming needs no state. See
    [Note: Packed sequences] in docs/design/notes/data.md.

    With `pack`, a sequence may have several examples, with separate positions and attention;
    without, it has one. `excess_length`: what to do with examples longer than `seq_len`. Examples
    without a trained token (after truncation) are dropped. `summary`, a line for the log, says how
    many examples were too long, and how many had no trained token.
    `group` consecutive examples (2 for pairs of preferences) stay in one sequence: each may have
    seq_len / group tokens, and if one is dropped, so are the others of the group. `note` is
    appended to `summary`.

    The constructor reads all labels. It raises ValueError if no example is left.
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
        group: int = 1,
        note: str = "",
    ) -> None:
        self.seq_len = seq_len
        self.pack = pack
        self._store = store
        self._vocab_size = vocab_size
        self._pad_id = pad_id
        self._seed = seed
        self._longest = seq_len // group
        self._limit = f"{'half of ' * (group > 1)}data.seq_len={seq_len}"
        self._lengths = np.minimum(store.tokens.lengths, self._longest)
        usable, counts = self._usable(excess_length, group)
        # The `group` examples that belong together are packed as one, by the index of the first.
        chosen = np.random.default_rng(seed).permutation(usable[::group])
        lengths = sum(self._lengths[chosen + i] for i in range(group))
        # Stable, so that examples of equal length stay in the random order of `chosen`.
        longest_first = np.argsort(-lengths, kind="stable")
        sequences = (
            best_fit(chosen[longest_first].tolist(), lengths[longest_first].tolist(), seq_len)
            if pack
            else [[document] for document in chosen.tolist()]
        )
        self._sequences = [[d + i for d in first for i in range(group)] for first in sequences]
        self.samples_per_epoch = len(self._sequences)
        count = self.samples_per_epoch
        self.tokens_per_sample = int(lengths.sum()) / count
        padding = 1 - self.tokens_per_sample / seq_len
        self.summary = (
            f"{counts}; {counted(count, 'sample')} of {seq_len:,}, {padding:.1%} of them"
            f" padding{note}"
        )

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0; raise ValueError for ids outside the vocabulary."""
        epoch, place = divmod(index, self.samples_per_epoch)
        key = int(np.random.default_rng([self._seed, epoch]).integers(1 << 63))
        documents = self._sequences[shuffled(place, self.samples_per_epoch, key)]
        tokens = np.full(self.seq_len, self._pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        start = 0
        for document in documents:
            end = start + int(self._lengths[document])
            tokens[start:end] = self._read(document, labels=False)
            # The label of a token is the next token. In the store a token's label is itself, so
            # shift by one. The last token of an example has none to predict.
            labels[start : end - 1] = self._read(document, labels=True)[1:]
            start = end
        ends = np.cumsum(self._lengths[documents])
        positions = positions_of(ends if self.pack else ends[:0], self.seq_len)
        return Sample(tokens, labels, positions, padding=self.seq_len - start)

    def shown(self, tokenizer: Tokenizer) -> str:
        """Return the first example as text for the log, with trained tokens in [[ ]]."""
        document = self._sequences[0][0]
        tokens, labels = (self._read(document, labels=of) for of in (False, True))
        trained = labels != IGNORE_INDEX
        trained[0] = False  # no token predicts the first
        text = ""
        # Split into parts of only trained, or only other, tokens.
        for part in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(trained)) + 1):
            piece = repr(tokenizer.decode(tokens[part], special=True))[1:-1]
            if len(piece) > _SHOWN_CHARACTERS:
                piece = f"{piece[: _SHOWN_CHARACTERS // 2]} ... {piece[-_SHOWN_CHARACTERS // 2 :]}"
            text += f"[[{piece}]]" if trained[part[0]] else piece
        if len(text) > 10 * _SHOWN_CHARACTERS:
            text = f"{text[: 10 * _SHOWN_CHARACTERS]} ..."
        number = counted(len(tokens), "token")
        return f"{trained.mean():.0%} of {number} trained, those in [[ ]]: {text}"

    def _read(self, document: int, *, labels: bool) -> _Int64Array:
        """Return the tokens, or the labels, of an example up to its truncated length."""
        store = self._store.labels if labels else self._store.tokens
        ids = store.read(document, 0, int(self._lengths[document])).astype(np.int64)
        # Check all ids. IGNORE_INDEX is not an id: replace it by any valid id before the check.
        trained = np.where(ids == IGNORE_INDEX, 0, ids) if labels else ids
        check_ids(trained, vocab_size=self._vocab_size, where=store.where(document))
        return ids

    def _usable(self, excess_length: ExcessLength, group: int) -> tuple[_Int64Array, str]:
        """Return the indices of the examples to train on, and a sentence for the log.

        The sentence has the numbers of used, of too long and of dropped examples. If one of `group`
        consecutive examples is dropped, all of them are: 2 for pairs of answers, else 1.
        """
        tokens = self._store.tokens
        excess = tokens.lengths > self._longest
        if excess_length is ExcessLength.RAISE and excess.any():
            first = int(np.flatnonzero(excess)[0])
            raise ValueError(
                f"{tokens.where(first)} has {tokens.lengths[first]:,} tokens, more than"
                f" {self._limit} ({counted(int(excess.sum()), 'example')} in all): use"
                f" data.excess_length_strategy=truncate or drop, or a larger data.seq_len"
            )
        dropped = excess & (excess_length is ExcessLength.DROP)
        ends = enumerate(self._lengths.tolist())
        labels = (self._store.labels.read(document, 0, end) for document, end in ends)
        trained = np.array([count_trained(of_one) for of_one in labels], dtype=np.int64)
        # One bool for each group of examples: a group is used only if all its examples are.
        used = (~dropped & (trained > 0)).reshape(-1, group).all(axis=1)
        usable = np.flatnonzero(np.repeat(used, group))
        check_trained(len(usable) > 0, f"{tokens.name}, in examples of {self.seq_len} tokens,")
        done = "dropped" if excess_length is ExcessLength.DROP else "truncated"
        return usable, (
            f"{tokens.name}: {counted(len(usable), 'example')},"
            f" {counted(int(self._lengths[usable].sum()), 'token')},"
            f" {int(trained[usable].sum()):,} of them trained;"
            f" {counted(int(excess.sum()), 'example')} longer than {self._limit} {done},"
            f" {int((~dropped & (trained == 0)).sum()):,} without a trained token dropped"
        )


def best_fit(items: Iterable[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack `items` into sequences, each into the fullest one that still has enough free space.

    `sizes` are in tokens, at most `capacity`; sort items by decreasing size, for which the known
    bound on the number of sequences holds. Each item costs O(log capacity), and an insertion into a
    list of at most `capacity` numbers. Source: best fit decreasing, as in Ding et al. 2024, "Fewer
    Truncations Improve Language Modeling".
    """
    sequences: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # indices of sequences, by their free space in tokens
    spaces: list[int] = []  # the keys of `by_space`, sorted
    for item, size in zip(items, sizes, strict=True):
        at = bisect_left(spaces, size)  # index of the smallest free space that is enough
        if at == len(spaces):  # No sequence has room: begin a new one.
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
