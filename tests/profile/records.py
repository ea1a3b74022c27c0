"""Records made by hand: what happened when, in milliseconds, on ranks that share one channel."""

from __future__ import annotations

from collections.abc import Sequence

from isp.comm import Transfer
from isp.profile.collectives import RankTimes, align
from isp.profile.recorder import Mark, RankRecord

__all__ = ["aligned", "mark", "record", "transfer"]


def transfer(
    kind: str,
    label: str,
    *,
    phase: str,
    launch: float,
    end: float,
    wait: float,
    channel: str = "weight",
    sent_bytes: int = 100,
) -> Transfer:
    """A transfer that was waited for from `wait` until it ended, if that was later."""
    return Transfer(
        kind,
        channel,
        label,
        sent_bytes,
        launched=launch / 1e3,
        ended=end / 1e3,
        waited=True,
        wait_began=wait / 1e3,
        exposed=max(0.0, end - wait) / 1e3,
        phase=phase,
        block="stamped",
    )


def mark(at: float, phase: str, block: str = "", site: str = "") -> Mark:
    """A place that was reached; memory grows by a GiB a millisecond."""
    return Mark(at / 1e3, phase, block, site, 0.0 if site else at + 1)


def record(
    begins: Sequence[float], transfers: Sequence[Transfer], marks: Sequence[Mark]
) -> RankRecord:
    """Of steps that begin at `begins`, the last of which is the end."""
    return RankRecord(
        begins=tuple(begin / 1e3 for begin in begins),
        transfers=tuple(transfers),
        marks=tuple(marks),
        parts=("embedding", "layers.0", "layers.1", "head"),
        peak_memory_gib=2.0,
    )


def aligned(*records: RankRecord, leads: Sequence[float] = ()) -> list[RankTimes]:
    """The ranks' records on one clock; `leads` in milliseconds, 0 each if left out."""
    ranks = tuple(range(len(records)))
    groups = [{"weight": ranks, "tensor": ranks}] * len(records)
    return align(records, groups, [lead / 1e3 for lead in leads] or [0.0] * len(records))
