"""The balance of context ranks: the number itself, and what it is compared with."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from isp.parallel.context import Slice

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import bench_balance  # noqa: E402
from bench_balance import PLANS, log_normal_row, measure  # noqa: E402


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_costs_are_even_where_others_are_not(num_ranks: int) -> None:
    """Catches ranks that wait for one another, and more keys that travel than has to be."""
    draw = random.Random(num_ranks)
    rows = [log_normal_row(draw, 32768, 600, 1.3) for _ in range(100)]
    assert all(sum(row) == 32768 for row in rows)
    ours, zigzag, padded, contiguous = (
        [measure(plan_of, row, num_ranks) for row in rows] for plan_of in PLANS.values()
    )
    assert max(row.imbalance for row in ours) < 0.003
    assert all(row.padding == 0 for row in ours)
    for others in (zigzag, contiguous):
        assert sum(row.imbalance for row in others) / len(rows) > 0.2
    for row, other in zip(ours, padded, strict=True):
        assert other.padding > 0
        assert other.travels == pytest.approx(0.75, abs=0.01)
        assert row.travels < other.travels


def test_what_it_is_compared_with() -> None:
    """Catches a comparison with plans that nobody would use."""
    assert PLANS["zig-zag, row"]([6, 2], 2).slices == (
        (Slice(0, 0, 2), Slice(1, 0, 2)),
        (Slice(0, 2, 6),),
    )
    assert PLANS["contiguous"]([3, 5], 2).slices == (
        (Slice(0, 0, 3), Slice(1, 0, 1)),
        (Slice(1, 1, 5),),
    )
    assert PLANS["zig-zag, padded"]([3, 5], 2).lengths == (4, 8)
    assert PLANS["zig-zag, padded"]([3, 5], 2).slices[1] == (
        Slice(0, 1, 2),
        Slice(0, 2, 3),
        Slice(1, 2, 4),
        Slice(1, 4, 6),
    )


def test_the_table_has_every_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a plan that no longer runs, or a row lost."""
    words = ["--rows", "2", "--ranks", "2", "--tokens", "500"]
    monkeypatch.setattr(sys, "argv", ["bench_balance.py", *words])
    bench_balance.main()
    table = [line.split("|") for line in capsys.readouterr().out.splitlines() if line[:3] == "| 2"]
    assert [line[2].strip() for line in table] == list(PLANS)
