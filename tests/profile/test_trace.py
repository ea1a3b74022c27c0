"""The Chrome trace: everything that viewers need, and nothing that they would drop."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict

import pytest

from isp.core.mesh.phase import Phase
from isp.profile.totals import timeline
from isp.profile.trace import chrome_trace, torch_events, write_trace
from tests.profile.example import example_profile
from tests.profile.records import aligned, record, transfer, weight
from tests.profile.test_exact import BEGINS, MARKS, first_step


def assert_nested(events) -> None:
    """Check that slices of one lane are nested or apart."""
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for slices in lanes.values():
        open_until = []
        for begin, minus_length, name in sorted(slices):
            end = begin - minus_length
            while open_until and open_until[-1] <= begin + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, name
            open_until.append(end)


def test_a_trace_is_json_with_lanes_of_every_rank(tmp_path):
    """Catches a trace that does not parse, or a rank or channel without a lane."""
    timelines = [rank.timeline for rank in example_profile().modes[1].ranks]
    write_trace(tmp_path / "trace.json.gz", chrome_trace(timelines, title="isp"))
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "isp rank 0", 1: "isp rank 1"}
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    assert lanes == {"phase", "compute", "exposed waits", "communication: weight"}
    assert sum(e["ph"] == "C" for e in events) == 2 * len(timelines[0].memory) > 8
    assert_nested(events)


def test_slices_have_the_recorded_times():
    """Catches a wrong unit, and missing waits or transfers."""
    (times,) = aligned(record(BEGINS, first_step(), MARKS))
    events = chrome_trace([timeline(times, 0, number=0, zero=0.0)])
    slices = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert slices["all_gather embedding.weight"] == pytest.approx((-5000, 20000))
    assert slices["wait for embedding.weight"] == pytest.approx((13000, 2000))
    assert "wait for layers.0.attention.wqkv.weight.grad" not in slices
    assert_nested(events)


def test_transfers_that_overlap_get_lanes_of_their_own():
    """Catches two slices that cross in one lane, which viewers do not draw."""
    crossing = [
        transfer(
            "all_gather", weight(f"layers.{i}.w"), phase=Phase.FORWARD, launch=t, end=e, wait=50
        )
        for i, (t, e) in enumerate([(10, 20), (12, 30), (15, 18), (21, 40)])
    ]
    (times,) = aligned(record(BEGINS, crossing, MARKS))
    events = chrome_trace([timeline(times, 0, number=0, zero=0.0)])
    assert_nested(events)
    lanes = [e["tid"] for e in events if e["ph"] == "X" and e["name"].startswith("all_gather")]
    assert len(set(lanes)) == 3


def test_torch_profiler_events_are_aligned_with_ours():
    """Catches times off by the profiler's base, and processes of two ranks that are merged."""
    seen = {
        "baseTimeNanoseconds": 2_000_000_000,
        "traceEvents": [
            {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 5, "ts": 1000.0, "dur": 2.0},
            {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
            {"ph": "s", "name": "ac2g", "id": 4, "pid": 77, "tid": 5, "ts": 1000.0},
            {"ph": "X", "name": "Iteration", "pid": "Spans", "tid": 0, "ts": 0, "dur": 9},
        ],
    }
    one, two = (
        torch_events(seen, process=r, title=f"rank {r}", zero_seconds=1.5) for r in range(2)
    )
    assert one[0]["ts"] == pytest.approx(500_000 + 1000)
    assert one[1]["args"]["name"] == "rank 0: torch.profiler, python"
    assert {e["pid"] for e in one}.isdisjoint({e["pid"] for e in two})
    assert one[2]["id"] != two[2]["id"]
    assert all(isinstance(e["pid"], int) for e in one)
