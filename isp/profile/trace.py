"""A step of all ranks as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each rank is a process with these lanes: phases, parts of the model, blocking waits, one lane per
channel (more where its transfers overlap) for transfers in flight, and memory. Events that
torch.profiler recorded in the same step are added as processes of their own. Slices of a lane never
overlap: [Note: Lanes] in docs/design/notes/profile.md.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from isp.profile.schema import Collective, StepTimeline
from isp.utils.files import written_whole

__all__ = ["chrome_trace", "torch_events", "write_trace"]

Event = dict[str, Any]

_STEP, _PARTS, _WAITS = 0, 1, 2
"""Numbers of a rank's lanes: phases of the step, compute by part of the model, exposed waits."""
_FIRST_CHANNEL = 10
"""Number of the lane of a rank's first channel; each further channel has the next number."""
_TORCH_PROCESS = 1_000_000
"""First process number for torch.profiler's events."""


def chrome_trace(
    timelines: Sequence[StepTimeline], *, title: str = "", first_process: int = 0
) -> list[Event]:
    """Return the events of the ranks' timelines of one step, in rank order; microseconds.

    Processes are numbered from `first_process`, and named `title` and their rank.
    """
    events: list[Event] = []
    for rank, timeline in enumerate(timelines):
        events += _of_rank(first_process + rank, f"{title} rank {rank}".strip(), timeline)
    return events


def _of_rank(rank: int, title: str, timeline: StepTimeline) -> Iterable[Event]:
    """Yield the events of one rank: names of lanes, spans, waits, transfers, memory."""
    yield from _named("process", rank, 0, title, rank)
    for lane, name in ((_STEP, "phase"), (_PARTS, "compute"), (_WAITS, "exposed waits")):
        yield from _named("thread", rank, lane, name, lane)
    for span in timeline.spans:
        yield _slice(rank, _PARTS, span.block, span.phase, span.begin_ms, span.end_ms, {})
    for phase, group in groupby(timeline.spans, key=lambda span: span.phase):
        spans = list(group)
        yield _slice(rank, _STEP, phase, phase, spans[0].begin_ms, spans[-1].end_ms, {})
    yield from _waits(rank, timeline.collectives)
    yield from _channels(rank, timeline.collectives)
    for sample in timeline.memory:
        place = {"pid": rank, "tid": 0, "ts": sample.at_ms * 1e3}
        yield {"ph": "C", "name": "memory", **place, "args": {"GiB": round(sample.gib, 6)}}


def _waits(rank: int, collectives: Sequence[Collective]) -> Iterable[Event]:
    """Yield the waits of one rank, each one cut where it overlaps an earlier one."""
    reached = float("-inf")
    for c in sorted(collectives, key=lambda c: c.wait_ms):
        begin, end = max(c.wait_ms, reached), c.wait_ms + c.exposed_ms
        if end > begin:
            yield _slice(rank, _WAITS, f"wait for {c.label}", c.kind, begin, end, _facts(c))
            reached = end


def _channels(rank: int, collectives: Sequence[Collective]) -> Iterable[Event]:
    """Yield the transfers of one rank, each on the first lane of its channel that is free."""
    # Each lane has the name of its channel, and the time at which its last transfer ends. Slices
    # that overlap in one lane would be dropped or distorted by viewers.
    lanes: list[tuple[str, float]] = []
    for c in collectives:
        end = max(c.end_ms, c.launch_ms)
        free = (i for i, (name, at) in enumerate(lanes) if name == c.channel and at <= c.launch_ms)
        number = next(free, len(lanes))
        lane = _FIRST_CHANNEL + number
        if number == len(lanes):
            yield from _named("thread", rank, lane, f"communication: {c.channel}", lane)
        lanes[number : number + 1] = [(c.channel, end)]
        yield _slice(rank, lane, f"{c.kind} {c.label}", c.channel, c.launch_ms, end, _facts(c))


def _facts(c: Collective) -> dict[str, Any]:
    """Return the details that a viewer shows for a transfer."""
    names = "kind", "channel", "label", "purpose", "block", "phase", "sent_bytes"
    return {
        **{name: getattr(c, name) for name in names},
        "exposed_ms": round(c.exposed_ms, 4),
        "waiting_for_other_ranks_ms": round(c.others_ms, 4),
        "queued_ms": round(c.queue_ms, 4),
        "moving_ms": round(c.moving_ms, 4),
    }


def _slice(
    rank: int, lane: int, name: str, category: str, begin: float, end: float, facts: Event
) -> Event:
    """Return a complete event of a Chrome trace; `begin` and `end` are in milliseconds."""
    times = {"ts": begin * 1e3, "dur": (end - begin) * 1e3}
    place = {"pid": rank, "tid": lane}
    return {"ph": "X", "name": name, "cat": category, **place, **times, "args": facts}


def _named(what: str, process: int, lane: int, name: str, index: int) -> Iterable[Event]:
    """Yield the metadata events that name a process or thread and set its position."""
    for key, args in (("name", {"name": name}), ("sort_index", {"sort_index": index})):
        yield {"ph": "M", "name": f"{what}_{key}", "pid": process, "tid": lane, "args": args}


def torch_events(
    trace: Mapping[str, Any], *, process: int, title: str, zero_seconds: float
) -> list[Event]:
    """Return torch.profiler's events of a rank, to be shown next to our `process`.

    `zero_seconds` is the Unix time of time 0 in our timeline. The processes in `trace` get new
    numbers and names, so that they collide with none of ours nor of other ranks.
    """
    first = _TORCH_PROCESS + 1000 * process
    # torch counts from `baseTimeNanoseconds` of Unix time: shift its times to our zero.
    shift = trace.get("baseTimeNanoseconds", 0) / 1e3 - zero_seconds * 1e6
    processes: dict[Any, int] = {}
    events = []
    for event in trace["traceEvents"]:
        if "pid" not in event or event.get("name") == "process_labels":
            continue
        number = processes.setdefault(event["pid"], len(processes))
        moved = {**event, "pid": first + number}
        if "id" in moved and event.get("ph") in "sft":
            # Ids of flow events count per rank: without the prefix, arrows would connect ranks.
            moved["id"] = f"{process}.{event['id']}"
        if "ts" in event and event.get("ph") != "M":
            moved["ts"] = event["ts"] + shift
        if event.get("name") == "process_name":
            seen = event["args"].get("name", "")
            moved["args"] = {"name": f"{title}: torch.profiler, {seen}"}
        if event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": first + number}
        events.append(moved)
    return events


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """Write `events` to `path`, compressed, as a Chrome trace."""
    document = {"displayTimeUnit": "ms", "traceEvents": events}

    def write(new: Path) -> None:
        with gzip.open(new, "wt", encoding="utf-8", compresslevel=5) as file:
            json.dump(document, file, separators=(",", ":"))

    written_whole(path, write)
