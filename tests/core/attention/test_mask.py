"""Masks and documents, without attention."""

from __future__ import annotations

import pytest
import torch

from isp.core.attention.backends.mask_blocks import document_blocks, document_lengths
from isp.core.attention.mask import AttentionMask
from isp.core.attention.mask import AttentionMask as Mask
from tests.core.attention.reference import visible


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_cover_what_is_visible_exactly(causal: bool, window: int | None, rows: int) -> None:
    """Catches a window or an alignment that is off by one, and keys outside a block's run."""
    for num_queries in range(7):
        for num_keys in range(7):
            expected = visible(num_queries, num_keys, causal, window)
            for split_up_to in (0, 5):
                seen = torch.zeros_like(expected)
                blocks = document_blocks(
                    num_queries,
                    num_keys,
                    causal=causal,
                    window=window,
                    rows=rows,
                    split_up_to=split_up_to,
                )
                for query, key, what, diagonal in blocks:
                    assert key.start + diagonal + num_queries == query.start + num_keys
                    assert len(query) > 0
                    assert len(key) > 0
                    band = what.band(len(query), len(key), torch.device("cpu"))
                    assert band.any(1).all(), "a block's query must see something"
                    seen[query.start : query.stop, key.start : key.stop] |= band
                assert torch.equal(seen, expected)


def test_a_window_costs_no_more_than_its_width() -> None:
    """Catches a sliding window computed as a mask of S x S."""
    length, window, rows = 4096, 64, 128
    blocks = document_blocks(length, length, causal=True, window=window, rows=rows)
    assert len(blocks) == length // rows
    assert max(len(block.key) for block in blocks) == rows + window - 1


@pytest.mark.parametrize(
    ("lengths", "sizes", "message"),
    [
        ([3, 4], (1, 8, 8), "rise from 0 to the 8 tokens"),
        ([6, 2], (2, 4, 4), "cannot span two sequences"),
        ([4, 4], (2, 4, 5), "with 4 queries and 5 keys need cu_seqlens_k"),
        ([5, -1], (1, 4, 4), "rise from 0"),
    ],
)
def test_documents_that_do_not_fit_the_row_are_refused(
    lengths: list[int], sizes: tuple[int, int, int], message: str
) -> None:
    """Catches cu_seqlens of a shard or of another batch, which would attend across documents."""
    with pytest.raises(ValueError, match=message):
        document_lengths(AttentionMask.of_documents(lengths), *sizes)


@pytest.mark.parametrize(
    ("key_lengths", "sizes", "message"),
    [
        ([3, 4], (1, 5, 8), "cu_seqlens_k must rise from 0 to the 8"),
        ([3, 5], (2, 4, 4), "a batch of one sequence, got 2"),
        ([3, 5], (1, 4, 8), "cu_seqlens must rise from 0 to the 4"),
    ],
)
def test_key_lengths_that_do_not_fit_are_refused(
    key_lengths: list[int], sizes: tuple[int, int, int], message: str
) -> None:
    """Catches keys of another row used with the queries of this one."""
    mask = AttentionMask.of_documents([1, 4], key_lengths)
    assert document_lengths(mask, 1, 5, sum(key_lengths)) == tuple(zip((1, 4), key_lengths))  # noqa: B905
    assert mask.max_lengths == (4, max(key_lengths))
    with pytest.raises(ValueError, match=message):
        document_lengths(mask, *sizes)


def test_documents_are_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a validation of all documents in every layer, and other sizes that pass unchecked."""
    looks: list[str] = []
    monkeypatch.setattr("isp.core.attention.mask._check_rises", lambda name, *_: looks.append(name))
    mask = AttentionMask.of_documents([3, 5])
    for _ in range(3):
        mask.check_covers(1, 8, 8)
    assert looks == ["cu_seqlens"]
    with pytest.raises(ValueError, match="as many queries as keys"):
        mask.check_covers(1, 8, 9)


def test_wrong_masks_are_refused() -> None:
    """Catches arguments that kernels would silently misread."""
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        Mask(window=0)
    with pytest.raises(ValueError, match=r"int32 .* got torch.int64"):
        Mask(cu_seqlens=torch.tensor([0, 4]))
    for queries in (None, torch.tensor([0, 4, 5], dtype=torch.int32)):
        with pytest.raises(
            ValueError, match=r"cu_seqlens_k must have the dtype and shape of cu_seqlens, .*\[2\]"
        ):
            Mask(cu_seqlens=queries, cu_seqlens_k=torch.tensor([0, 4], dtype=torch.int32))
