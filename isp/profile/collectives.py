"""Collectives of all ranks on one clock, with each wait split by its reasons.

Times are in milliseconds on rank 0's clock since its first recorded step began. A wait is split
into time in a queue, time for other ranks to join, and time in which bytes were sent. See
[Note: What a wait was for] in docs/design/notes/profile.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import socket
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from isp.core.comm import Channel, TimedTransfer
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh.phase import Phase
from isp.profile.recorder import Mark, RankRecord
from isp.profile.schema import Collective, Cost

__all__ = ["RankTimes", "align", "clock_lead"]


_ROUNDS = 21
"""All-reduces after which clocks are read."""


def clock_lead(host: Channel) -> float:
    """Return the seconds by which this rank's `time.perf_counter` is ahead of rank 0's.

    A collective over `host`, the channel of all ranks in CPU memory. Ranks on one machine share a
    clock. On several machines all ranks read their clocks after each of `_ROUNDS` all-reduces, and
    the median difference counts. Its error is the time by which one rank regularly leaves an
    all-reduce after another, well below 1 ms.
    """
    if host.size == 1:
        return 0.0
    machines = host.all_gather(torch.tensor([_machine()]), tag=Tag(tensor="clock")).wait()
    if len(set(machines.tolist())) == 1:
        return 0.0
    readings = []
    for _ in range(_ROUNDS):
        host.all_reduce(torch.zeros(1), tag=Tag(tensor="clock")).wait()
        readings.append(time.perf_counter())
    own = torch.tensor([readings], dtype=torch.float64)
    # One row of times for each rank: [p, rounds].
    of_ranks = host.all_gather(own, tag=Tag(tensor="clock")).wait()
    leads: list[float] = (of_ranks[host.rank] - of_ranks[0]).tolist()
    return statistics.median(leads)


def _machine() -> int:
    """Return a number that is the same in all processes of a machine, until it reboots."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text() if boot.exists() else socket.gethostname()
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """A rank's record on the common clock."""

    begins: tuple[float, ...]
    """Start of each recorded step, and the end of the last one."""
    collectives: tuple[Collective, ...]
    """Collectives in order of launch."""
    marks: tuple[Mark, ...]
    """Starts of the model's parts, and uses of weights, in order of time."""

    def mark_at(self, moment: float) -> Mark:
        """Return the last mark before `moment`: the part of the model that was computed then."""
        index = bisect_right(self.marks, moment, key=lambda mark: mark.at) - 1
        return self.marks[max(0, index)]

    def step_of(self, collective: Collective) -> int:
        """Return the recorded step in which a collective was waited for; -1 before the first."""
        return bisect_right(self.begins, collective.wait_ms) - 1


def align(records: Sequence[RankRecord]) -> list[RankTimes]:
    """Return the records of all ranks, given in rank order, on one clock."""
    zero = records[0].begins[0] - records[0].clock_lead
    times = [_on_clock(record, zero + record.clock_lead) for record in records]
    matched = _matched(times, [record.channels for record in records])
    return [
        dataclasses.replace(
            own,
            collectives=tuple(
                _with_others(c, [times[r].collectives[i] for r, i in matched.get((rank, n), ())])
                for n, c in enumerate(own.collectives)
            ),
        )
        for rank, own in enumerate(times)
    ]


def _on_clock(record: RankRecord, zero: float) -> RankTimes:
    """Return one rank's record in milliseconds since `zero`, before ranks are compared."""

    def ms(seconds: float) -> float:
        return (seconds - zero) * 1e3

    times = RankTimes(
        begins=tuple(map(ms, record.begins)),
        collectives=(),
        marks=tuple(dataclasses.replace(mark, at=ms(mark.at)) for mark in record.marks),
    )
    under_way: defaultdict[str, list[float]] = defaultdict(list)
    found = []
    for transfer in record.transfers:
        launch, end = ms(transfer.launched), ms(transfer.arrived)
        # Transfers of a channel run one after another, so a transfer starts when the one launched
        # before it ends. Sends and receives have no such order.
        start = ms(transfer.began)
        if not transfer.is_between_two:
            ahead = [t for t in under_way[transfer.channel] if t > launch]
            start = max((t for t in ahead if t <= end), default=launch)
            under_way[transfer.channel] = [*ahead, end]
        waited = ms(transfer.wait_began)
        phase = transfer.phase
        # A gather counts for the phase that waits for it; its launch may be in an earlier phase.
        if transfer.kind == "all_gather" and times.marks:
            phase = times.mark_at(waited).phase
        found.append(_collective(transfer, phase, record.parts, launch, start, end, waited))
    return dataclasses.replace(times, collectives=tuple(found))


def _collective(
    transfer: TimedTransfer,
    phase: Phase,
    parts: Iterable[str],
    launch: float,
    start: float,
    end: float,
    wait: float,
) -> Collective:
    """Return a transfer as a collective; `_with_others` adds what depends on other ranks."""
    purpose, layer, _ = transfer.tag
    named = [part for part in parts if f"{layer}.".startswith(f"{part}.")]
    # Bucketed transfers carry weights of several blocks, so they belong to none.
    several = purpose in (Purpose.REPLICA_GRADIENT, Purpose.PUBLISHED_WEIGHT)
    stamped = "" if several or Cost.of(purpose) is Cost.OUTSIDE else transfer.block
    exposed = transfer.exposed * 1e3
    return Collective(
        kind=transfer.kind,
        channel=transfer.channel,
        label=transfer.label,
        block=max(named, key=len, default=stamped),
        phase=phase,
        purpose=purpose,
        sent_bytes=transfer.sent_bytes,
        launch_ms=launch,
        start_ms=start,
        end_ms=end,
        wait_ms=wait,
        exposed_ms=exposed,
        moving_ms=end - start,
        others_ms=0.0,
        queue_ms=_overlap(wait, wait + exposed, wait, start),
    )


def _matched(
    times: Sequence[RankTimes], groups: Sequence[Mapping[str, Sequence[int]]]
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return, by (rank, index of a collective), the same collective on the other ranks.

    Ranks of a group launch the same collectives in the same order; two ranks launch sends and
    receives of the same label in the same order. If labels differ because records do not begin at
    the same collective, nothing is matched.
    """
    sequences: defaultdict[tuple[object, ...], dict[int, list[int]]] = defaultdict(dict)
    for rank, own in enumerate(times):
        for number, collective in enumerate(own.collectives):
            ranks = tuple(groups[rank].get(collective.channel, (rank,)))
            between_two = collective.label if collective.is_between_two else None
            key = collective.channel, ranks, between_two
            sequences[key].setdefault(rank, []).append(number)
    matched: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for by_rank in sequences.values():
        # The n-th collective of a group is the same one on all of its ranks.
        for together in zip(*by_rank.values(), strict=False):
            members = list(zip(by_rank, together, strict=True))
            if len({_identity(times[r].collectives[n]) for r, n in members}) == 1:
                for member in members:
                    matched[member] = [other for other in members if other != member]
    return matched


def _identity(collective: Collective) -> tuple[str, str]:
    """Return the kind and label of a collective, which are equal on all of its ranks.

    The kind of a send or receive is left out, since the same transfer is a send on one rank and a
    receive on the other.
    """
    return "" if collective.is_between_two else collective.kind, collective.label


def _with_others(own: Collective, others: Sequence[Collective]) -> Collective:
    """Return `own` with its wait split into time for other ranks and moving time.

    `others`: the same collective on the other ranks of its group.
    """
    if not others:
        return own
    wait_end = own.wait_ms + own.exposed_ms
    # Before `ready` this rank's own queue is the reason for the wait, not the other ranks.
    ready = max(own.wait_ms, own.start_ms)
    came = max(c.launch_ms if c.is_between_two else c.start_ms for c in others)
    moving = min(c.end_ms - c.start_ms for c in (own, *others))
    # The start of a send or receive is not known: only its wait is observed.
    if own.is_between_two:
        moving = max(0.0, own.end_ms - max(ready, came))
    return dataclasses.replace(
        own, moving_ms=moving, others_ms=_overlap(own.wait_ms, wait_end, ready, came)
    )


def _overlap(begin: float, end: float, other_begin: float, other_end: float) -> float:
    """Return the length of the intersection of two intervals."""
    return max(0.0, min(end, other_end) - max(begin, other_begin))
