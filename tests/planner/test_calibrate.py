"""`isp calibrate`: the fit, and a file that `isp plan` reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isp.planner.calibrate import fit_line
from isp.planner.fabric import load_fabric

ROOT = Path(__file__).parents[2]


def test_a_line_is_found_again() -> None:
    """Catches a fit that looks at the largest transfers alone, whose latency is nothing."""
    sizes = [4096 * 4**i for i in range(7)]
    noise = [1.1, 0.95, 1.0, 1.05, 0.9, 1.02, 1.0]
    seconds = [(50e-6 + n / 2e9) * f for n, f in zip(sizes, noise, strict=True)]
    found = fit_line(sizes, seconds)
    assert found.latency_seconds == pytest.approx(50e-6, rel=0.15)
    assert found.bytes_per_second == pytest.approx(2e9, rel=0.15)
    flat = fit_line(sizes, [1e-3] * 7)
    assert flat.latency_seconds == pytest.approx(1e-3)
    assert flat.bytes_per_second > 1e9


def test_two_ranks_write_a_fabric_that_can_be_planned_with(tmp_path: Path) -> None:
    """Catches a collective that a rank does not join, and a file that cannot be read."""
    file = tmp_path / "here.yaml"
    command = [sys.executable, "-m", "isp", "calibrate", "--nproc", "2", "--quick"]
    done = subprocess.run(
        [*command, "--out", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert f"plan with --fabric {file}" in done.stdout
    fabric = load_fabric(file)
    assert fabric.devices_per_node == 2
    assert fabric.device.kind == "cpu"
    assert fabric.inside.gb_per_second > 0
    fabric.check(2)
