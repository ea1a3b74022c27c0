"""The benchmark of the recorder, and HTA on the adapted trace."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from isp.profile.totals import timeline, totals
from tests.profile.records import aligned, record
from tests.profile.test_exact import BEGINS, MARKS, first_step

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import bench_profile  # noqa: E402
from check_with_hta import as_gpu_trace, overlap_by_hta  # noqa: E402


def test_the_recorder_benchmark_has_a_line_for_each_mode(monkeypatch, capfd):
    """Catches a benchmark that no longer runs, and a step that records nothing."""
    monkeypatch.setattr(sys, "argv", ["bench_profile.py", "--quick", "--ranks", "2"])
    bench_profile.main()
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    records = {line[1]: int(line[3]) for line in lines if line[:1] == ["2"]}
    assert set(records) == {"mtp", "msp", "fsp", "isp"}
    assert min(records.values()) > 20


def _timeline() -> tuple[dict, float]:
    """Return a step in the format of `profile.json`, and the overlapped share of its
    communication.
    """
    (times,) = aligned(record(BEGINS, first_step(), MARKS))
    step, own = timeline(times, 0, number=0, zero=0.0), totals(times, 0)
    return json.loads(json.dumps(dataclasses.asdict(step))), 1 - own.exposed_ms / own.comm_ms


def test_the_adapted_trace_has_compute_where_no_wait_blocks():
    """Catches a trace in which a wait is compute, or compute is missing."""
    step, _ = _timeline()
    compute = [e for e in as_gpu_trace(step) if e["name"] == "compute"]
    assert sum(e["dur"] for e in compute) == pytest.approx((105 - 18) * 1e3)
    moved = [e for e in as_gpu_trace(step) if e["name"].startswith("nccl")]
    assert len(moved) == len(step["collectives"])


def test_hta_finds_the_same_overlap():
    """Catches a share of overlapped communication that HTA does not confirm."""
    pytest.importorskip("hta")
    step, hidden = _timeline()
    assert overlap_by_hta([step])[0] == pytest.approx(100 * hidden, abs=2)
