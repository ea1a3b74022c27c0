"""Copies of the state for saves in the background."""

from __future__ import annotations

import torch

from isp.checkpoint.background import Staging
from isp.checkpoint.boxes import Shard


def test_copies_take_the_same_memory_again() -> None:
    """Catches copies of more than the shards, memory taken anew, and a size that changed."""
    whole = torch.arange(40.0).view(8, 5)
    staging = Staging()
    addresses = set()
    for step in range(3):
        rest = torch.full((3 + step // 2,), step)
        shards = {s.key: s for s in (Shard.whole("rows", whole[2:4]), Shard.whole("rest", rest))}
        copied = {key: shard.pieces[0].data for key, shard in staging.copy(shards).items()}
        before = whole[2:4].clone()
        whole += 1
        assert torch.equal(copied["rows"], before)
        assert torch.equal(copied["rest"], rest)
        assert copied["rows"].untyped_storage().nbytes() == before.nbytes
        addresses.add(copied["rows"].data_ptr())
    assert len(addresses) == 1
