"""The benchmark of heads x context runs, and what it measures by is right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import bench_context  # noqa: E402


def test_quick_run_has_every_way(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a way that no longer runs or gives something else, and more bytes than needed."""
    monkeypatch.setattr(sys, "argv", ["bench_context.py", "--quick", "--ranks", "4"])
    bench_context.main()
    lines = [line.split("|") for line in capfd.readouterr().out.splitlines() if line[:1] == "|"]
    rows = [[cell.strip() for cell in line[1:-1]] for line in lines]
    names = ["Ulysses alone", "2 x 2", "1 x 4", "1 x 4, ring", "p2p ring"]
    found = [row[0] for row in rows if row[0] and row[0][0] != "-"]
    assert found == [*names, "torch's ring", *names]
    of_least = {row[0]: float(row[2]) for row in rows if row[0] in names}
    assert [of_least[name] for name in names[:3]] == [1.0, 1.0, 1.0]
    assert of_least["p2p ring"] > 2
