"""The benchmark of scans runs, and counts the bytes that the formula plans."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import bench_mixers  # noqa: E402


def test_quick_run_has_every_mixer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a way that no longer runs or gives something else, and bytes that are not planned."""
    monkeypatch.setattr(sys, "argv", ["bench_mixers.py", "--quick", "--ranks", "2"])
    bench_mixers.main()
    lines = [line.split("|") for line in capfd.readouterr().out.splitlines() if line[:1] == "|"]
    names = ["gated delta rule", "KDA", "Mamba2", "selective scan"]
    assert [line[1].strip() for line in lines[2:]] == names
    assert all(float(line[4]) > 0 for line in lines[2:])
