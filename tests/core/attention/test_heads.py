"""The split of heads over ranks: no head is lost, and no unread KV head is sent."""

from __future__ import annotations

import pytest

from isp.core.attention.heads import HeadSplit

RANKS = [1, 2, 3, 4, 8]
HEADS = [
    (query, kv) for query in range(1, 25) for kv in range(1, query + 1) if query % kv == 0
]  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
def test_every_query_head_has_its_kv_head_on_its_rank(ranks: int) -> None:
    """Catches a head assigned twice or never, and local KV heads in the wrong order."""
    for query, kv in HEADS:
        _check_plan(query, kv, ranks)


def _check_plan(query: int, kv: int, ranks: int) -> None:
    plan = HeadSplit.of(query, kv, ranks)
    assert [head for heads in plan.query for head in heads] == list(range(query))
    assert max(map(len, plan.query)) - min(map(len, plan.query)) <= 1
    group = query // kv
    for rank in range(ranks):
        own = plan.query[rank]
        assert set(plan.kv[rank]) == {head // group for head in own}
        local = plan.repeated_kv(rank) or tuple(range(len(plan.kv[rank])))
        if own:
            share = len(own) // len(local)
            looked_at = [plan.kv[rank][local[i // share]] for i in range(len(own))]
            assert looked_at == [head // group for head in own]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kv", [1, 2, 3])
def test_few_kv_heads_are_replicated_as_little_as_possible(kv: int, ranks: int) -> None:
    """Catches replication to every rank: a KV head belongs only where its query heads are."""
    plan = HeadSplit.of(kv * 8, kv, ranks)
    copies = sum(map(len, plan.kv))
    assert max(kv, ranks) <= copies <= ranks + kv - 1


def test_kv_heads_must_divide_query_heads() -> None:
    """Catches groups of unequal size, which no model uses."""
    with pytest.raises(ValueError, match="num_kv_heads=3 must divide num_heads=8"):
        HeadSplit.of(8, 3, 2)


@pytest.mark.parametrize(
    ("heads", "ranks", "kept"), [((7, 7), 4, 2), ((8, 2), 4, 1), ((6, 3), 2, 3), ((1, 1), 2, 1)]
)
def test_a_kv_head_is_repeated_only_for_uneven_groups(
    heads: tuple[int, int], ranks: int, kept: int
) -> None:
    """Catches more local KV heads than needed; in the third case one is repeated, because another
    is read by twice as many query heads.
    """
    plan = HeadSplit.of(*heads, ranks)
    assert max(len(plan.repeated_kv(r) or own) for r, own in enumerate(plan.kv)) == kept
