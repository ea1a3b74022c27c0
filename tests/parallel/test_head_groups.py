"""Heads in groups: which numbers fit, and that groups change no byte of what is exchanged."""

from __future__ import annotations

import pytest

from isp.attention.heads import HeadPlan
from isp.parallel import Mode, ParallelConfig, TensorConfig
from isp.parallel.head_groups import HeadGroups
from model.config import ModelConfig

SIZES = [(8, 8), (8, 4), (32, 8), (12, 3), (6, 1)]


def _fitting(query: int, kv: int, ranks: int) -> dict[int, HeadGroups]:
    found = {}
    for number in range(1, query + 1):
        try:
            found[number] = HeadGroups.of(number, query, kv, ranks)
        except ValueError:
            continue
    return found


@pytest.mark.parametrize(("query", "kv"), SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_groups_exchange_what_all_heads_at_once_would(query: int, kv: int, ranks: int) -> None:
    """Catches groups whose KV heads go to more ranks than before, or leave a rank without heads."""
    whole = HeadPlan.of(query, kv, ranks)
    copies = sum(map(len, whole.kv))
    for number, groups in _fitting(query, kv, ranks).items():
        assert groups.kv * groups.shares == number == len(groups.in_order())
        plan = HeadPlan.of(query // number, kv // groups.kv, ranks)
        assert groups.kv * sum(map(len, plan.kv)) == copies
        if number > 1:
            assert {len(heads) for heads in plan.query} == {query // number // ranks}


def test_one_kv_head_a_rank_is_shared_by_groups_of_query_heads() -> None:
    """Catches Llama 8B refused on eight ranks: each KV head waits for four groups there."""
    assert list(_fitting(32, 8, 8)) == [1, 2, 4]
    groups = HeadGroups.of(4, 32, 8, 8).in_order()
    assert [(group.kv, group.share) for group in groups] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert [group.is_first for group in groups] == [True, False, False, False]
    assert [group.is_last for group in groups] == [False, False, False, True]


def _model(**changes: object) -> ModelConfig:
    return ModelConfig(hidden_size=64, num_heads=8, num_kv_heads=4, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", list(Mode))
def test_groups_that_do_not_divide_are_refused_with_those_that_do(mode: Mode) -> None:
    """Catches a number that fails in a layer, on a rank, and not before the run."""
    parallel = ParallelConfig(tensor=TensorConfig(size=2, mode=mode))
    for number in (1, 2, 4):
        _model(attention_head_groups=number).check_layout(parallel, 16)
    with pytest.raises(ValueError, match=r"attention_head_groups=3 .* use 1, 2 or 4"):
        _model(attention_head_groups=3).check_layout(parallel, 16)


def test_what_contradicts_parts_is_refused(tmp_path: object) -> None:
    """Catches keys that would keep what groups are there to drop, or that no part computes."""
    with pytest.raises(ValueError, match="checkpoint_keeps_attention=true keeps what"):
        _model(attention_head_groups=2, checkpoint=1.0, checkpoint_keeps_attention=True)
    for change in ({"attention_head_groups": 2}, {"mlp_tile_tokens": 8}):
        with pytest.raises(ValueError, match="is for isp's own model"):
            ModelConfig(hf=str(tmp_path), **change)  # type: ignore[arg-type]
