"""The arithmetic that cuts a dimension, a tensor and a vocabulary into parts."""

from __future__ import annotations

import pytest
import torch

from isp.core.mesh.partition import chunk_range
from isp.tensor_parallel import VocabUtility, divide, split_tensor_along_last_dim


def test_divide_refuses_a_remainder() -> None:
    """Catches a remainder that is dropped."""
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match="13 is not divisible by 4"):
        divide(13, 4)


def test_tensors_are_split_along_the_last_dim() -> None:
    """Catches a split along another dim, unneeded copies, and parts out of order."""
    x = torch.arange(24).view(2, 3, 4)
    views = split_tensor_along_last_dim(x, 2)
    assert torch.equal(views[0], x[..., :2])
    assert torch.equal(views[1], x[..., 2:])
    assert all(v.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for v in views)
    copies = split_tensor_along_last_dim(x, 2, contiguous=True)
    assert all(c.is_contiguous() and torch.equal(c, v) for c, v in zip(copies, views, strict=True))
    with pytest.raises(ValueError, match="4 is not divisible by 3"):
        split_tensor_along_last_dim(x, 3)


@pytest.mark.parametrize("world", [1, 4, 8])
@pytest.mark.parametrize("length", [0, 3, 8, 50, 1600])
def test_parts_equal_torch_chunk(length: int, world: int) -> None:
    """Catches parts that overlap, leave a gap, or differ from those of the embedding tables."""
    parts = [chunk_range(length, world, i) for i in range(world)]
    assert [i for part in parts for i in part] == list(range(length))
    pieces = torch.arange(length).chunk(world)
    assert [len(p) for p in parts if p] == [len(piece) for piece in pieces if len(piece)]


@pytest.mark.parametrize("rank", range(8))
def test_vocabulary_ranges_agree_by_rank_and_by_size(rank: int) -> None:
    """Catches a range that is off by one rank, and two functions for it that disagree."""
    expected = (rank * 200, (rank + 1) * 200)
    assert VocabUtility.vocab_range_from_global_vocab_size(1600, rank, 8) == expected
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(200, rank, 8) == expected
    uneven = VocabUtility.vocab_range_from_global_vocab_size(50, rank, 8)
    assert uneven == (7 * rank, min(50, 7 * rank + 7))
    with pytest.raises(ValueError, match="rank 8 is not one of 8"):
        VocabUtility.vocab_range_from_global_vocab_size(50, 8, 8)
