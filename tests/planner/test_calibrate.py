"""`isp calibrate`: its fit, and a file that `isp layouts` can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from isp.cli import main
from isp.planner.calibrate import fit_line
from isp.planner.fabric import load_fabric
from tests.ranks import launch_forked


def test_a_fit_finds_latency_and_bandwidth() -> None:
    """Catches a fit of the largest transfers only, in which latency does not show."""
    sizes = [4096 * 4**i for i in range(7)]
    noise = [1.1, 0.95, 1.0, 1.05, 0.9, 1.02, 1.0]
    seconds = [(50e-6 + n / 2e9) * f for n, f in zip(sizes, noise, strict=True)]
    found = fit_line(sizes, seconds)
    assert found.latency_seconds == pytest.approx(50e-6, rel=0.15)
    assert found.bytes_per_second == pytest.approx(2e9, rel=0.15)
    flat = fit_line(sizes, [1e-3] * 7)
    assert flat.latency_seconds == pytest.approx(1e-3)
    assert flat.bytes_per_second > 1e9


def test_two_ranks_write_a_usable_fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a collective that a rank does not join, and a file that cannot be read."""
    monkeypatch.setattr("isp.cli.launch.launch", launch_forked)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "here.yaml"
    assert main(["calibrate", "--nproc", "2", "--quick", "--out", str(file)]) == 0
    assert f"plan with --fabric {file}" in capsys.readouterr().out
    fabric = load_fabric(file)
    assert fabric.devices_per_node == 2
    assert fabric.device.kind == "cpu"
    assert fabric.inside.gb_per_second > 0
    fabric.check(2)
