"""Micro-batches: their tensors, and which samples each rank gets at each step."""

import numpy as np
import pytest
import torch

from isp.core.micro_batch import MicroBatch
from isp.data.batch import BatchSampler, held_out_micro_batches, stacked
from isp.data.dataset import IGNORE_INDEX, PackedDataset, Sample
from isp.data.stores import EndedStore, MemoryStore

SEQ_LEN = 8


def make(*, pack: bool = True, num_documents: int = 40) -> PackedDataset:
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 256, rng.integers(1, 20)) for _ in range(num_documents)]
    store = MemoryStore("the text", documents, dtype=np.dtype(np.uint16))
    return PackedDataset(EndedStore(store, 256), vocab_size=257, seq_len=SEQ_LEN, pack=pack, seed=9)


def rows(batch: MicroBatch) -> list[list[int]]:
    return batch.tokens.reshape(-1, SEQ_LEN).tolist()


def test_packed_rows_are_joined_with_their_bounds() -> None:
    """Catches attention across the boundary of two rows, and a wrong dtype or shape."""
    samples = [
        Sample(*map(np.array, ([5, 6, 7], [6, -100, 8], [0, 1, 0]))),
        Sample(*map(np.array, ([8, 9, 1], [9, 1, -100], [0, 1, 2]))),
    ]
    batch = stacked(samples, pack=True)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 1]]
    assert batch.labels.tolist() == [[6, -100, 8, 9, 1, -100]]
    assert batch.positions.tolist() == [[0, 1, 0, 0, 1, 2]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6]
    assert batch.cu_seqlens.dtype == torch.int32
    assert {batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype} == {torch.int64}


@pytest.mark.parametrize(
    ("pack", "padding", "lengths"),
    [(True, [0, 2], [2, 1, 1]), (True, [1, 0], [2, 3]), (False, [1, 2], [2, 1])],
)
def test_padding_is_not_counted_as_tokens(
    pack: bool, padding: list[int], lengths: list[int]
) -> None:
    """Catches padding counted as trained tokens, or as a document in the FLOPs."""
    starts = [[0, 1, 0], [0, 0, 1] if padding[1] else [0, 1, 2]]
    places = starts if pack else [[0, 1, 2]] * 2
    ids = np.arange(3)
    samples = [Sample(ids, ids, np.array(p), n) for p, n in zip(places, padding, strict=True)]
    batch = stacked(samples, pack=pack)
    for found in (batch, batch.to(torch.device("meta"))):
        assert found.num_tokens == 6 - sum(padding)
        assert found.document_lengths == lengths


def test_unpacked_rows_are_stacked() -> None:
    """Catches `cu_seqlens` without packing, and positions that restart."""
    sampler = BatchSampler(dataset=make(pack=False), micro_bsz=3, micro_num=2)
    for batch in sampler.micro_batches(0, 0, 1):
        assert batch.tokens.shape == batch.labels.shape == (3, SEQ_LEN)
        assert batch.positions.tolist() == [list(range(SEQ_LEN))] * 3
        assert batch.cu_seqlens is None
        assert (batch.labels != IGNORE_INDEX).all()


def test_to_moves_all_but_the_bounds() -> None:
    """Catches a tensor that is not moved, and bounds that the host would have to fetch."""
    for pack in (True, False):
        batch = BatchSampler(dataset=make(pack=pack), micro_bsz=1, micro_num=1)
        moved = batch.micro_batches(0, 0, 1)[0].to(torch.device("meta"))
        assert all(x.is_meta for x in (moved.tokens, moved.labels, moved.positions))
        assert (moved.cu_seqlens is None) == (not pack)
        assert moved.cu_seqlens is None or not moved.cu_seqlens.is_meta


@pytest.mark.parametrize("num_documents", [40, 12])
def test_a_global_batch_depends_only_on_its_size(num_documents: int) -> None:
    """Catches samples, or an order, that change with ranks, accumulation or rows in a batch."""
    dataset = make(num_documents=num_documents)
    size, steps = 12, 5
    if num_documents == 12:
        assert dataset.samples_per_epoch < steps * size  # some batch spans the end of an epoch
    expected = [
        [dataset.sample(i).tokens.tolist() for i in range(step * size, (step + 1) * size)]
        for step in range(steps)
    ]
    layouts = [
        (micro_num, data_size, size // (micro_num * data_size))
        for micro_num in (1, 2, 3, 4, 6, 12)
        for data_size in (1, 2, 3, 4, 6, 12)
        if size % (micro_num * data_size) == 0
    ]
    assert len(layouts) > 12
    for micro_num, data_size, micro_bsz in layouts:
        sampler = BatchSampler(dataset=dataset, micro_bsz=micro_bsz, micro_num=micro_num)
        for step in range(steps):
            ranks = [sampler.micro_batches(step, rank, data_size) for rank in range(data_size)]
            assert [len(batches) for batches in ranks] == [micro_num] * data_size
            got = [
                row
                for micro in range(micro_num)
                for batches in ranks
                for row in rows(batches[micro])
            ]
            assert got == expected[step]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("max_samples", [1, 7, 10_000])
def test_held_out_samples_count_once(pack: bool, max_samples: int) -> None:
    """Catches a validation loss that depends on the layout, and ranks with unequal batches."""
    dataset = make(pack=pack, num_documents=9)
    count = min(dataset.samples_per_epoch, max_samples)
    expected = [dataset.sample(i) for i in range(count)]
    for data_size in (1, 2, 3):
        for micro_bsz in (1, 2, 5):
            ranks = [
                list(
                    held_out_micro_batches(
                        dataset,
                        micro_bsz=micro_bsz,
                        data_rank=rank,
                        data_size=data_size,
                        max_samples=max_samples,
                    )
                )
                for rank in range(data_size)
            ]
            lengths = {len(batches) for batches in ranks}
            assert lengths == {-(-count // (micro_bsz * data_size))}
            flat = [
                (tokens, labels)
                for batches in zip(*ranks, strict=True)
                for batch in batches
                for tokens, labels in zip(
                    rows(batch), batch.labels.reshape(-1, SEQ_LEN).tolist(), strict=True
                )
            ]
            for (tokens, labels), sample in zip(flat, expected, strict=False):
                assert tokens == sample.tokens.tolist()
                assert labels == sample.labels.tolist()
            assert len(flat) >= count
            assert all(set(labels) == {IGNORE_INDEX} for _, labels in flat[count:])
