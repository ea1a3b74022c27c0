"""Check that the exposed communication of a profile on GPUs is that of torch.profiler's kernels.

    isp profile CONFIG --nproc 8
    python tools/check_with_torch.py outputs/NAME/profile

Reads the trace of the newest profile below the folder, which has torch's kernels and ISP's waits of
the same step. Communication is exposed, by torch, while an NCCL kernel runs and no other kernel;
by ISP ("ours"), while compute waits for a transfer. Prints both in percent of the step for each
rank. Exits with 1 if they differ by more than 2 points on any rank. Imports nothing of ISP.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TOLERANCE = 2.0
"""The largest difference of two percentages, in percentage points."""
_TORCH = 1_000_000
"""The first process number of torch.profiler's events in the trace; each rank has a thousand."""
_COMPUTE_LANE, _WAITS_LANE = 1, 2
Span = tuple[float, float]
"""Begin and end of a time."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """Join overlapping spans; return them in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Return the time that `spans` cover; overlaps count once."""
    return sum(end - begin for begin, end in merged(spans))


def shares(events: list[dict[str, Any]]) -> Iterator[tuple[int, float, float]]:
    """Yield for each rank that ran kernels a tuple: rank, and two percentages of the step.

    Both say for how much of the step communication was exposed: first as the events of
    torch.profiler show it, then as ISP's do.
    """
    slices = [e for e in events if e.get("ph") == "X"]
    for rank in sorted({e["pid"] for e in slices if e["pid"] < _TORCH}):
        own = [e for e in slices if e["pid"] == rank]
        step = [_span(e) for e in own if e["tid"] == _COMPUTE_LANE]
        begin, end = min(s[0] for s in step), max(s[1] for s in step)
        first = _TORCH + 1000 * rank
        kernels = [e for e in slices if first <= e["pid"] < first + 1000 and _on_device(e)]
        if not kernels:
            continue
        inside = [(e["name"], max(begin, a), min(end, b)) for e in kernels for a, b in [_span(e)]]
        inside = [(name, a, b) for name, a, b in inside if b > a]
        busy = length((a, b) for _, a, b in inside)
        compute = length((a, b) for name, a, b in inside if not _is_nccl(name))
        waits = length(_span(e) for e in own if e["tid"] == _WAITS_LANE)
        yield rank, 100 * (busy - compute) / (end - begin), 100 * waits / (end - begin)


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _on_device(event: dict[str, Any]) -> bool:
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def _is_nccl(name: str) -> bool:
    return "nccl" in name.lower()


def main() -> int:
    """Compare every rank of the newest profile below the folder that the command line names."""
    files = sorted(Path(sys.argv[1]).rglob("trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        print(f"error: no trace.json.gz below {sys.argv[1]}: run `isp profile`, which writes it")
        return 1
    with gzip.open(files[-1], "rt") as file:
        found = list(shares(json.load(file)["traceEvents"]))
    if not found:
        print(f"error: {files[-1]} has no GPU kernels to compare with: profile a run on GPUs")
        return 1
    print("process    torch     ours")
    for rank, theirs, ours in found:
        print(f"{rank:>7}  {theirs:6.2f}%  {ours:6.2f}%")
    worst = max(abs(ours - theirs) for _, theirs, ours in found)
    print(f"at most {worst:.2f} points apart")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
