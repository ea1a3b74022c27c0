"""Concatenated and split document stores, and held-out documents."""

from pathlib import Path

import numpy as np
import pytest

from isp.config.data import DataConfig
from isp.data.indexed import IndexedDataset
from isp.data.prepare import prepare
from isp.data.sources import open_datasets
from isp.data.stores import (
    EOS_PROBES,
    ConcatStore,
    EndedStore,
    MemoryStore,
    PartStore,
    TokenStore,
    held_out,
)


def store_of(*documents: list[int]) -> MemoryStore:
    return MemoryStore("memory", map(np.array, documents), dtype=np.dtype(np.int32))


def contents(store: TokenStore) -> list[list[int]]:
    lengths = store.lengths.tolist()
    return [store.read(index, 0, length).tolist() for index, length in enumerate(lengths)]


def test_concat_and_subset_find_their_documents() -> None:
    """Catches a wrong offset at the boundary of two stores, or at an empty document."""
    first, second = store_of([1, 2], [], [3]), store_of([4, 5, 6])
    joined = ConcatStore([first, second, store_of([], [7])])
    assert contents(joined) == [[1, 2], [], [3], [4, 5, 6], [], [7]]
    assert joined.read(3, 1, 3).tolist() == [5, 6]
    part = PartStore("part", joined, np.array([5, 0, 3]))
    assert contents(part) == [[7], [1, 2], [4, 5, 6]]
    assert part.read(2, 1, 2).tolist() == [5]


def test_documents_are_named_by_their_source() -> None:
    """Catches a message that names another of several files, or another document."""
    first, second = (
        MemoryStore(name, [np.array([1])] * 2, dtype=np.dtype(np.int32)) for name in ("a", "b")
    )
    joined = ConcatStore([EndedStore(first, 0), EndedStore(second, 0)])
    assert [joined.where(i) for i in range(4)] == [
        "a, document 0",
        "a, document 1",
        "b, document 0",
        "b, document 1",
    ]
    assert PartStore("part", joined, np.array([3, 0])).where(0) == "b, document 1"


def test_documents_get_an_eos_unless_they_have_one() -> None:
    """Catches a doubled or missing eos where documents differ; an empty document stays empty."""
    ended = EndedStore(store_of([1, 9], [], [2], [9]), 9)
    assert contents(ended) == [[1, 9], [], [2, 9], [9]]
    assert ended.read(2, 1, 2).tolist() == [9]
    assert contents(EndedStore(store_of([], []), 9)) == [[], []]


@pytest.mark.parametrize("ends_with_eos", [0.0, 0.4, 0.6, 1.0])
def test_opening_reads_few_documents_of_many(
    ends_with_eos: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a start that reads the whole file, also if its documents differ."""

    class CountingStore(MemoryStore):
        reads = 0

        def read(self, document: int, start: int, stop: int) -> np.ndarray:
            self.reads += 1
            return super().read(document, start, stop)

    ends = np.random.default_rng(0).random(20 * EOS_PROBES) < ends_with_eos
    documents = [np.array([7, 9 if end else 8]) for end in ends]
    store = CountingStore("many", documents, dtype=np.dtype(np.uint16))
    ended = EndedStore(store, 9)
    assert store.reads <= EOS_PROBES
    added = ended.lengths - store.lengths
    assert abs(added.mean() - (ends_with_eos < 0.5)) < 0.1
    assert ("are treated like most of these" in caplog.text) is (0 < ends_with_eos < 1)


def test_the_held_out_part_is_stable_and_near_its_fraction() -> None:
    """Catches a choice that changes when documents are added, or when the fraction grows."""
    chosen = held_out(20_000, 0.1)
    assert 1_900 < chosen.sum() < 2_100
    np.testing.assert_array_equal(held_out(500, 0.1), chosen[:500])
    assert held_out(20_000, 0.2)[chosen].all()
    assert not held_out(1000, 0.0).any()
    # Spelled out, so that a new version does not train on held-out text of an old run.
    assert np.flatnonzero(chosen)[:5].tolist() == [2, 32, 33, 41, 42]


def write_documents(folder: Path, count: int) -> str:
    lines = [f'{{"text": "document {index:04d}"}}' for index in range(count)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return str(folder / "a.jsonl")


def test_train_and_held_out_share_no_document(tmp_path: Path) -> None:
    """Catches evaluation on trained text, and documents in neither part."""
    source = write_documents(tmp_path, 200)
    config = DataConfig(source=source, valid_fraction=0.2, seq_len=14)
    data = open_datasets(config, seed=3)
    assert data.valid is not None
    sets = []
    for dataset in (data.train, data.valid):
        # 13 bytes and eos: a document is exactly one sample.
        samples = [dataset.sample(i) for i in range(dataset.samples_per_epoch)]
        sets.append({data.tokenizer.decode(sample.tokens) for sample in samples})
    train, valid = sets
    assert not train & valid
    assert train | valid == {f"document {index:04d}" for index in range(200)}
    assert len(valid) == held_out(200, 0.2).sum()


def test_held_out_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    """Catches two runs whose validation losses cannot be compared."""
    config = DataConfig(source=write_documents(tmp_path, 50), valid_fraction=0.3, seq_len=5)
    first, second = (open_datasets(config, seed=seed) for seed in (1, 2))
    assert first.valid is not None
    assert second.valid is not None
    for i in range(first.valid.samples_per_epoch):
        expected = first.valid.sample(i).tokens
        np.testing.assert_array_equal(second.valid.sample(i).tokens, expected)
    assert (first.train.sample(0).tokens != second.train.sample(0).tokens).any()


def test_an_empty_part_is_an_error(tmp_path: Path) -> None:
    """Catches an evaluation that silently has no text, or leaves no text to train on."""
    source = write_documents(tmp_path, 1)
    for fraction, count in ((0.001, 0), (0.999, 14)):
        with pytest.raises(ValueError, match=rf"={fraction} holds out {count} of the 14 tokens"):
            open_datasets(DataConfig(source=source, valid_fraction=fraction, seq_len=2), seed=0)
    source = write_documents(tmp_path, 5)
    for fraction, count in ((1e-9, 0), (0.999, 5)):
        with pytest.raises(ValueError, match=rf"={fraction} holds out {count} of the 5 documents"):
            open_datasets(DataConfig(source=source, valid_fraction=fraction, seq_len=2), seed=0)


def test_the_end_of_a_single_text_is_held_out(tmp_path: Path) -> None:
    """Catches a text that is trained on whole, and tokens that are in no part or in both."""
    (tmp_path / "book.txt").write_text("abcdefghijklmno")  # and eos
    source = str(tmp_path / "book.txt")
    data = open_datasets(DataConfig(source=source, valid_fraction=0.25, seq_len=4), seed=3)
    assert data.valid is not None
    parts = [
        sorted(data.tokenizer.decode(part.sample(i).tokens) for i in range(part.samples_per_epoch))
        for part in (data.train, data.valid)
    ]
    assert parts == [["abcd", "efgh", "ijkl"], ["mno"]]
    assert data.valid.summary.startswith("end held out of ")
    assert ": 1 document, 4 tokens" in data.valid.summary


def test_files_without_text_are_refused(tmp_path: Path) -> None:
    """Catches empty files that would show as an empty dataset."""
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "x.txt").touch()
    for source in (str(tmp_path / "blank.jsonl"), str(tmp_path / "hollow")):
        with pytest.raises(ValueError, match=rf"data\.source={source} holds no documents"):
            open_datasets(DataConfig(source=source, seq_len=2), seed=0)


def test_errors_of_valid_source_name_that_key(tmp_path: Path) -> None:
    """Catches a message that names the wrong key."""
    source = write_documents(tmp_path, 9)
    with pytest.raises(FileNotFoundError, match=r"^data\.valid_source=gone does not exist"):
        open_datasets(DataConfig(source=source, valid_source="gone", seq_len=2), seed=0)
    (tmp_path / "short.txt").write_text("abc")
    config = DataConfig(source=source, valid_source=str(tmp_path / "short.txt"), seq_len=5)
    with pytest.raises(ValueError, match=r"data\.valid_source=.*short\.txt has 4 in 1 document:"):
        open_datasets(config, seed=0)


def test_text_and_pairs_mix_and_give_the_same_samples(tmp_path: Path) -> None:
    """Catches a .bin/.idx pair that differs from the text it was made from, eos included."""
    source = write_documents(tmp_path, 30)
    prepare(source, tmp_path / "p")
    assert len(IndexedDataset(tmp_path / "p")) == 30
    text, pair, both, mixed = (
        open_datasets(DataConfig(source=item, seq_len=11), seed=5).train
        for item in (
            source,
            str(tmp_path / "p"),
            [source, source],
            [str(tmp_path / "p.idx"), source],
        )
    )
    for i in range(text.samples_per_epoch + 2):
        for left, right in zip(text.sample(i), pair.sample(i), strict=True):
            np.testing.assert_array_equal(left, right)
    # The documents of one half end with eos already, those of the other do not.
    for i in range(both.samples_per_epoch):
        for left, right in zip(both.sample(i), mixed.sample(i), strict=True):
            np.testing.assert_array_equal(left, right)
