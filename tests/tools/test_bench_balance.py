"""The balance of context ranks: the number itself, and what it is compared with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import bench_balance  # noqa: E402
from bench_balance import PLANS  # noqa: E402


def test_the_table_has_every_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a plan that no longer runs, or a row lost."""
    words = ["--rows", "2", "--ranks", "2", "--tokens", "500"]
    monkeypatch.setattr(sys, "argv", ["bench_balance.py", *words])
    bench_balance.main()
    table = [line.split("|") for line in capsys.readouterr().out.splitlines() if line[:3] == "| 2"]
    assert [line[2].strip() for line in table] == list(PLANS)
