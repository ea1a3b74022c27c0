"""Packing against a reference that builds the whole stream, sample by sample."""

import tracemalloc

import numpy as np
import pytest

from isp.data.dataset import IGNORE_INDEX, PackedDataset, Sample, shuffled
from isp.data.stores import EndedStore, MemoryStore
from isp.data.tokenizer import ByteTokenizer

EOS = ByteTokenizer.eos_id


def make(
    documents: list[list[int]], seq_len: int, *, pack: bool = True, seed: int = 0
) -> PackedDataset:
    store = MemoryStore("the text", map(np.array, documents), dtype=np.dtype(np.uint16))
    return PackedDataset(
        EndedStore(store, EOS), vocab_size=257, seq_len=seq_len, pack=pack, seed=seed
    )


def random_documents(rng: np.random.Generator, *, ends_with_eos: float) -> list[list[int]]:
    """Return documents of 0 to 12 tokens, some of which end with eos already."""
    documents = []
    for _ in range(int(rng.integers(1, 12))):
        tokens = rng.integers(0, 256, rng.integers(0, 13)).tolist()
        documents.append([*tokens, EOS] if rng.random() < ends_with_eos else tokens)
    return documents


def reference_epoch(
    documents: list[list[int]], seq_len: int, *, pack: bool, seed: int, epoch: int
) -> list[Sample]:
    """Return every sample of an epoch, token by token from the whole stream."""
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation([i for i, tokens in enumerate(documents) if tokens])
    stream: list[tuple[int, int]] = []  # token, document
    for document in order:
        tokens = documents[document]
        stream += [(token, document) for token in tokens]
        if tokens[-1] != EOS:
            stream.append((EOS, document))
    num_samples = (len(stream) - (not pack)) // seq_len
    key = int(generator.integers(1 << 63))
    samples = []
    for place in range(num_samples):
        start = shuffled(place, num_samples, key) * seq_len
        labels: list[int] = []
        positions: list[int] = []
        for at in range(start, start + seq_len):
            new = at == start or (pack and stream[at - 1][1] != stream[at][1])
            positions.append(0 if new else positions[-1] + 1)
            same = at + 1 < len(stream) and (not pack or stream[at + 1][1] == stream[at][1])
            labels.append(stream[at + 1][0] if same else IGNORE_INDEX)
        tokens = [token for token, _ in stream[start : start + seq_len]]
        samples.append(Sample(*map(np.array, (tokens, labels, positions))))
    return samples


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("ends_with_eos", [0.0, 0.5, 1.0])
def test_every_sample_equals_that_of_the_reference(pack: bool, ends_with_eos: float) -> None:
    """Catches any error of the random access: offsets, labels, positions, bounds, eos."""
    rng = np.random.default_rng(11)
    compared = 0
    for case in range(60):
        documents = random_documents(rng, ends_with_eos=ends_with_eos)
        seq_len = int(rng.integers(1, 20))
        expected = [
            sample
            for epoch in range(3)
            for sample in reference_epoch(documents, seq_len, pack=pack, seed=case, epoch=epoch)
        ]
        if not expected:
            continue
        dataset = make(documents, seq_len, pack=pack, seed=case)
        assert dataset.samples_per_epoch * 3 == len(expected)
        for index, sample in enumerate(expected):
            for got, correct in zip(dataset.sample(index)[:3], sample[:3], strict=True):
                assert got.dtype == np.int64
                assert got.tolist() == correct.tolist()
            compared += 1
    assert compared > 300


def test_samples_depend_only_on_seed_and_index() -> None:
    """Catches state: calls in another order, or for another epoch, that change a sample."""
    documents = [list(range(i, i + 20)) for i in range(30)]
    fresh, used = make(documents, 16, seed=4), make(documents, 16, seed=4)
    indices = np.random.default_rng(0).permutation(5 * fresh.samples_per_epoch)
    by_index = {int(i): used.sample(int(i)).tokens.tolist() for i in indices}
    for i in range(5 * fresh.samples_per_epoch):
        assert fresh.sample(i).tokens.tolist() == by_index[i]


def test_epochs_and_seeds_shuffle_anew() -> None:
    """Catches a missing shuffle, or the same shuffle in each epoch or for each seed."""
    documents = [[i] * 3 for i in range(64)]  # with eos: exactly one sample of 4
    dataset, other = make(documents, 4), make(documents, 4, seed=1)
    size = dataset.samples_per_epoch
    orders = [
        [int(source.sample(i).tokens[0]) for i in range(start, start + size)]
        for source, start in ((dataset, 0), (dataset, size), (other, 0))
    ]
    for order in orders:
        assert sorted(order) == list(range(64))  # each document once an epoch
        assert order != list(range(64))
    assert len({tuple(order) for order in orders}) == 3


def test_too_few_tokens_are_refused_at_the_limit() -> None:
    """Catches a limit that is off by one, and a message without key and numbers."""
    assert make([[1, 2], [3]], 5).samples_per_epoch == 1  # 5 tokens with eos
    message = r"data\.seq_len=6 needs at least 6 tokens, and the text has 5 in 2 documents"
    with pytest.raises(ValueError, match=message):
        make([[1, 2], [3]], 6)
    assert make([[1, 2], [3]], 4, pack=False).samples_per_epoch == 1
    with pytest.raises(ValueError, match=r"data\.seq_len=5 needs at least 6 tokens"):
        make([[1, 2], [3]], 5, pack=False)
    with pytest.raises(ValueError, match="has 0 in 0 documents"):
        make([[], []], 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_the_shuffle_is_a_permutation(size: int) -> None:
    """Catches samples that occur twice in an epoch, or never."""
    for key in (0, 1, 2**63 - 1):
        assert sorted(shuffled(i, size, key) for i in range(size)) == list(range(size))


def test_the_shuffle_mixes() -> None:
    """Catches neighbors that stay together, and elements that tend to certain positions."""
    size, keys = 10, range(5_000)
    counts = np.zeros((size, size), dtype=int)  # [place, element]
    for key in keys:
        for place in range(size):
            counts[place, shuffled(place, size, key * 0x9E3779B9)] += 1
    # Each cell is binomial with a standard deviation of 21; the largest of 100 is below 4 of them.
    assert np.abs(counts - len(keys) / size).max() < 5 * 21
    steps = np.diff([shuffled(place, 10_000, 7) for place in range(10_000)])
    assert (np.abs(steps) == 1).mean() < 0.001  # 0.0002 are to be expected


def test_an_epoch_of_any_length_begins_without_delay() -> None:
    """Catches an order of samples stored as a list, which takes gigabytes for 2^39 tokens."""

    class LongStore:
        name = "long"
        lengths = np.array([1 << 39])

        def read(self, document: int, start: int, stop: int) -> np.ndarray:
            return np.full(stop - start, 7)

        def where(self, document: int) -> str:
            return self.name

    dataset = PackedDataset(LongStore(), vocab_size=257, seq_len=4, pack=True, seed=0)
    tracemalloc.start()
    dataset.sample(5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_ids_outside_the_vocabulary_are_refused() -> None:
    """Catches an index outside the embedding, which on a GPU is an error without a cause."""
    assert make([[256, 1]], 3).sample(0).tokens.max() == EOS
    documents = [[1, 2, 3], [4, 257, 5]]
    with pytest.raises(
        ValueError, match=r"the text, document 1, token 1 is id 257, .*\(0\.\.256\)"
    ):
        make(documents, 8).sample(0)
    dataset = make([*documents, [7] * 8], 4)
    good = [i for i in range(dataset.samples_per_epoch) if not _refused(dataset, i)]
    assert len(good) == 3  # tokens outside of the samples are not checked


def _refused(dataset: PackedDataset, index: int) -> bool:
    try:
        dataset.sample(index)
    except ValueError:
        return True
    return False
