"""Check that HolisticTraceAnalysis (HTA) finds the overlap of communication that a profile has.

    pip install --no-deps HolisticTraceAnalysis
    pip install "pandas<3" networkx plotly pydot psutil pyyaml
    python tools/check_with_hta.py outputs/quickstart/profile/TIME

HTA reads traces of GPUs: it takes kernels with an NCCL name as communication, and all others as
computation. A trace of CPU ranks has no streams. So the step of each rank is written as if it had:
each transfer becomes an NCCL kernel on a stream of its channel, and each time between two waits a
kernel on a compute stream. HTA does not see the profile's totals: it computes overlap itself.

Prints the share of communication that overlaps computation, in percent, for each mode and rank, by
HTA and by the profile ("ours"). Exits with 1 if they differ by more than 2 points on any rank.
Imports nothing of ISP, so it runs in the environment of HTA.
"""

from __future__ import annotations

import gzip
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

TOLERANCE = 2.0
"""The largest difference of two percentages, in percentage points."""
_COMPUTE_STREAM = 7
_FIRST_CHANNEL_STREAM = 20


def main() -> int:
    """Compare every mode and rank of the profile in the folder that the command line names."""
    # Turn log lines off, as HTA logs each of its steps.
    logging.disable()
    warnings.simplefilter("ignore")
    profile = json.loads((Path(sys.argv[1]) / "profile.json").read_text())
    worst = 0.0
    print("mode  rank     hta    ours")
    for mode in profile["modes"]:
        found = overlap_by_hta([rank["timeline"] for rank in mode["ranks"]])
        for rank, theirs in zip(mode["ranks"], found, strict=True):
            totals = rank["totals"][rank["timeline"]["step"]]
            ours = 100 * (1 - totals["exposed_ms"] / totals["comm_ms"])
            worst = max(worst, abs(ours - theirs))
            print(f"{mode['mode']:4}  {rank['rank']:4}  {theirs:5.2f}%  {ours:5.2f}%")
    print(f"at most {worst:.2f} points apart")
    return int(worst > TOLERANCE)


def overlap_by_hta(timelines: list[dict[str, Any]]) -> list[float]:
    """Return, by HTA, the percentage of communication that overlaps computation on each rank."""
    from hta.trace_analysis import TraceAnalysis

    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for rank, timeline in enumerate(timelines):
            files[rank] = str(Path(folder) / f"rank_{rank}.json.gz")
            document = {
                "schemaVersion": 1,
                "distributedInfo": {"rank": rank},
                "traceEvents": as_gpu_trace(timeline),
            }
            with gzip.open(files[rank], "wt") as file:
                json.dump(document, file)
        table = TraceAnalysis(trace_files=files, trace_dir=folder).get_comm_comp_overlap(
            visualize=False
        )
    return [float(x) for x in table.sort_values("rank")["comp_comm_overlap_pctg"]]


def as_gpu_trace(timeline: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the trace events of a step as if a GPU had run it."""
    collectives = timeline["collectives"]
    # Trace times are not negative: begin with the first transfer, launched before the step.
    zero = min([timeline["begin_ms"], *(c["launch_ms"] for c in collectives)])
    streams = {name: i for i, name in enumerate(sorted({c["channel"] for c in collectives}))}
    kernels = [
        (
            f"ncclDevKernel_{c['kind']}",
            _FIRST_CHANNEL_STREAM + streams[c["channel"]],
            c["launch_ms"],
            c["end_ms"],
        )
        for c in collectives
    ]
    end, reached = max([timeline["end_ms"], *(c["end_ms"] for c in collectives)]), zero
    # Compute runs while no wait blocks: add an event from the end of each blocked wait to the
    # beginning of the next one, one before the first wait, and one after the last.
    for c in sorted(collectives, key=lambda c: c["wait_ms"]):
        if c["wait_ms"] > reached:
            kernels.append(("compute", _COMPUTE_STREAM, reached, c["wait_ms"]))
        reached = max(reached, c["wait_ms"] + c["exposed_ms"])
    if end > reached:
        kernels.append(("compute", _COMPUTE_STREAM, reached, end))
    events = []
    for number, (name, stream, begin, stop) in enumerate(kernels, start=1):
        times = {"ts": (begin - zero) * 1e3, "dur": max(0.0, stop - begin) * 1e3}
        facts = {"stream": stream, "correlation": number, "device": 0}
        launch = {"correlation": number}
        call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
        events.append({"ph": "X", **call, "ts": times["ts"], "dur": 1.0, "args": launch})
        place = {"cat": "kernel", "name": name, "pid": 0, "tid": stream}
        events.append({"ph": "X", **place, **times, "args": facts})
    return events


if __name__ == "__main__":
    sys.exit(main())
