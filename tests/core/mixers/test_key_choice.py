"""The choice of keys by an indexer on 1 to 4 ranks, in tiles, against each document alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.comm import Channel
from isp.core.mixers import key_choice
from isp.core.mixers.placement import Placement
from tests.core.mixers.test_mixers import PLANS
from tests.ranks import run_ranks


class _Indexer:
    """Two heads that choose keys by scores after a ReLU; many scores are zero, hence equal."""

    num_heads = num_choices = 2

    def __init__(self, queries: Tensor, keys: Tensor) -> None:
        """Take queries [T, 2, D] and keys [T, D]."""
        self._queries, self.keys = queries, keys.unsqueeze(0)

    def most(self, length: int) -> int:
        return min(5, length)

    def choose(self, tokens: slice, keys: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("rgd,cd->rgc", self._queries[tokens], keys).relu()
        scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        return scores.topk(self.most(len(keys))).indices


def _on_rank(rank: int, size: int) -> dict[str, bool]:
    channel, same = Channel(dist.group.WORLD, name="tensor"), {}
    for name in PLANS if 64 % size == 0 else ("uneven", "scattered"):
        plan = PLANS[name](size)
        random = torch.Generator().manual_seed(3)
        queries, keys = (
            torch.randn(sum(plan.lengths), *shape, generator=random) for shape in ((2, 4), (4,))
        )
        expected = []
        for q, k in zip(queries.split(plan.lengths), keys.split(plan.lengths), strict=True):
            found = _Indexer(q, k).choose(slice(None), k, torch.ones(len(k), len(k)).tril() > 0)
            lacking = min(5, max(plan.lengths)) - found.shape[-1]
            expected.append(torch.nn.functional.pad(found, (0, lacking), value=-1))
        placement = Placement(channel, plan)
        own = torch.from_numpy(plan.order).split(placement.sizes)[rank]
        numbers = key_choice.choose(_Indexer(queries[own], keys[own]), placement, on_cpu=True)
        same[name] = torch.equal(numbers.long(), torch.cat(expected)[own])
    return same


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_chooses_as_in_its_document_alone(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches keys of another document or order, a misplaced tile, and ties broken differently."""
    monkeypatch.setattr(key_choice, "_MOST_SCORES", 2 * 23 * 4)  # tiles of 4 queries, or of 1
    for same in run_ranks(size, _on_rank, size):
        assert all(same.values()), same
