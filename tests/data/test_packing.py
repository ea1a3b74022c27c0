"""Packing of whole examples: each once, none cut, in an order without state."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from isp.cli import main
from isp.config.data import ExcessLength
from isp.data.dataset import IGNORE_INDEX
from isp.data.examples import ExampleStore
from isp.data.packing import ExampleDataset, best_fit
from isp.data.stores import MemoryStore
from tests.data.chat_folder import write_lines

SEQ_LEN = 16
PAD = 99
Ids = tuple[int, ...]


def random_examples(seed: int, *, longest: int = SEQ_LEN, number: int = 60) -> list[list[Ids]]:
    """Return tokens and labels of examples, drawn independently of each other."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(number):
        length = int(rng.integers(2, longest + 1))
        tokens, labels = rng.integers(0, 99, (2, length))
        labels[rng.random(length) < 0.5] = IGNORE_INDEX
        labels[1] = 7  # at least one is trained
        examples.append([tuple(tokens.tolist()), tuple(labels.tolist())])
    return examples


def make(
    examples: list[list[Ids]],
    *,
    pack: bool = True,
    seed: int = 0,
    excess_length: ExcessLength = ExcessLength.TRUNCATE,
) -> ExampleDataset:
    columns = zip(*examples, strict=True)
    store = ExampleStore(
        *(MemoryStore("talks", map(np.array, c), dtype=np.dtype(np.int32)) for c in columns)
    )
    return ExampleDataset(
        store,
        vocab_size=100,
        pad_id=PAD,
        seq_len=SEQ_LEN,
        pack=pack,
        seed=seed,
        excess_length=excess_length,
    )


def unpacked(dataset: ExampleDataset, indices: range) -> Counter[tuple[Ids, Ids]]:
    """Return tokens and shifted labels of every document of these samples, without padding."""
    found: Counter[tuple[Ids, Ids]] = Counter()
    for index in indices:
        sample = dataset.sample(index)
        assert len(sample.tokens) == SEQ_LEN
        assert all(column.dtype == np.int64 for column in sample[:3])
        padding = 0
        for begin, end in itertools.pairwise([*np.flatnonzero(sample.positions == 0), SEQ_LEN]):
            piece, length = slice(begin, end), end - begin
            assert sample.positions[piece].tolist() == list(range(length))
            document = tuple(sample.tokens[piece].tolist()), tuple(sample.labels[piece].tolist())
            if document[0] == (PAD,) * length:
                assert end == SEQ_LEN, "padding is at the end alone"
                padding = length
                assert set(document[1]) == {IGNORE_INDEX}
            else:
                found[document] += 1
        assert sample.padding == padding
    return found


def shifted(example: list[Ids]) -> tuple[Ids, Ids]:
    tokens, labels = example
    return tokens, (*labels[1:], IGNORE_INDEX)


@pytest.mark.parametrize("seed", range(5))
def test_an_epoch_has_every_example_once(seed: int) -> None:
    """Catches tokens that are lost, repeated or cut, or have the labels or positions of others."""
    examples = random_examples(seed)
    dataset = make(examples, seed=seed)
    size = dataset.samples_per_epoch
    assert size < len(examples) * 0.7, "rows hold several"
    for epoch in range(3):
        found = unpacked(dataset, range(epoch * size, (epoch + 1) * size))
        assert found == Counter(map(shifted, examples))


def test_samples_depend_only_on_seed_and_index() -> None:
    """Catches state, an order that is equal in each epoch, and a seed without effect."""
    examples = random_examples(1)
    fresh, used, other = make(examples), make(examples), make(examples, seed=1)
    size = fresh.samples_per_epoch
    assert other.samples_per_epoch == size
    indices = np.random.default_rng(0).permutation(4 * size)
    by_index = {int(i): used.sample(int(i)).tokens.tolist() for i in indices}
    orders = []
    for epoch in range(4):
        rows = [fresh.sample(i).tokens.tolist() for i in range(epoch * size, (epoch + 1) * size)]
        assert rows == [by_index[i] for i in range(epoch * size, (epoch + 1) * size)]
        orders.append(rows)
    assert len({str(order) for order in orders}) == 4
    assert len({str(sorted(order)) for order in orders}) == 1
    assert [other.sample(i).tokens.tolist() for i in range(size)] != orders[0]


LONG = [(1,) * 20, (*(IGNORE_INDEX,) * 10, *(1,) * 10)]
LATE = [(2,) * 20, (*(IGNORE_INDEX,) * 16, *(2,) * 4)]
NONE = [(3,) * 4, (3, *(IGNORE_INDEX,) * 3)]
FITS = [(4,) * 16, (4,) * 16]


def test_examples_too_long_or_without_labels_are_counted() -> None:
    """Catches an example silently dropped, and one without labels that is kept."""
    examples: list[list[Ids]] = [LONG, LATE, NONE, FITS]
    dataset = make(examples)
    found = unpacked(dataset, range(dataset.samples_per_epoch))
    cut = shifted([LONG[0][:16], LONG[1][:16]])
    assert found == Counter([cut, shifted(FITS)])
    assert dataset.summary == (
        "talks: 2 examples, 32 tokens, 21 of them trained; 2 examples longer than data.seq_len=16"
        " truncated, 2 without a trained token dropped; 2 samples of 16, 0.0% of them padding"
    )
    dataset = make(examples, excess_length=ExcessLength.DROP)
    assert unpacked(dataset, range(dataset.samples_per_epoch)) == Counter([shifted(FITS)])
    assert "2 examples longer than data.seq_len=16 dropped, 1 without" in dataset.summary
    with pytest.raises(ValueError, match=r"talks, document 0 has 20 tokens.*\(2 examples in all\)"):
        make(examples, excess_length=ExcessLength.RAISE)
    with pytest.raises(ValueError, match="has no token to train on"):
        make([LATE, NONE])


def first_row_that_fits(sizes: list[int], capacity: int) -> list[list[int]]:
    """Return a best fit found by a search of all rows."""
    rows: list[list[int]] = []
    spaces: list[int] = []
    for item, size in enumerate(sizes):
        fitting = [space for space in spaces if space >= size]
        if fitting:
            row = max(i for i, space in enumerate(spaces) if space == min(fitting))
        else:
            row = len(rows)
            rows.append([])
            spaces.append(capacity)
        rows[row].append(item)
        spaces[row] -= size
    return rows


def test_best_fit_equals_a_search_of_all_rows() -> None:
    """Catches a row that overflows, and a new row although another has space."""
    rng = np.random.default_rng(6)
    for _ in range(200):
        capacity = int(rng.integers(1, 30))
        sizes: npt.NDArray[np.int64] = rng.integers(1, capacity + 1, int(rng.integers(1, 60)))
        rows = best_fit(range(len(sizes)), sizes.tolist(), capacity)
        assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
        filled = [int(sizes[row].sum()) for row in rows]
        assert max(filled) <= capacity
        naive = first_row_that_fits(sizes.tolist(), capacity)
        assert sorted(filled) == sorted(int(sizes[row].sum()) for row in naive)


def test_many_examples_are_packed_quickly() -> None:
    """Catches a search whose time grows quadratically; this one takes a fraction of a second."""
    sizes = np.sort(np.random.default_rng(0).integers(1, 131_073, 100_000))[::-1].tolist()
    rows = best_fit(range(len(sizes)), sizes, 131_072)
    assert sum(sizes) / (len(rows) * 131_072) > 0.99


def test_inspect_shows_the_samples_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches lengths, padding or labels other than those that are trained."""
    lines = [{"input_ids": [97] * n, "labels": [-100] + [97] * (n - 1)} for n in (3, 5, 5, 8)]
    path = write_lines(tmp_path / "a.jsonl", lines)
    assert main(["data", "inspect", str(path), "--seq-len", "8"]) == 0
    shown = capsys.readouterr().out
    assert "4 examples, 21 tokens, 17 of them trained" in shown
    assert "median 5, longest 8" in shown
    assert "up to          8 tokens           3  ####" in shown
    assert "packing     87.5% of the tokens" in shown
    assert "example     88% of 8 tokens trained, those in [[ ]]: a[[aaaaaaa]]" in shown
    (tmp_path / "b.txt").write_text("hello" * 9)
    assert main(["data", "inspect", str(tmp_path / "b.txt"), "--seq-len", "4"]) == 0
    assert "packing     100.0%" in capsys.readouterr().out
