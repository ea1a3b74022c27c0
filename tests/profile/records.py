"""Hand-made records of events in milliseconds, on ranks that share one channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from isp.core.comm import TimedTransfer
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh.phase import Phase
from isp.profile.collectives import RankTimes, align
from isp.profile.recorder import Mark, RankRecord

__all__ = [
    "METRICS",
    "QKV",
    "aligned",
    "gradient",
    "mark",
    "output",
    "record",
    "transfer",
    "weight",
]

QKV = Tag(Purpose.HEADS, tensor="attention.qkv")
METRICS = Tag(Purpose.CONTROL, tensor="metrics")


def weight(layer: str) -> Tag:
    """Return the tag of a layer's weight."""
    return Tag(Purpose.WEIGHT, layer, "weight")


def gradient(layer: str) -> Tag:
    """Return the tag of a weight's gradient."""
    return Tag(Purpose.WEIGHT_GRADIENT, layer, "weight.grad")


def output(layer: str) -> Tag:
    """Return the tag of a row-parallel linear's output."""
    return Tag(Purpose.ACTIVATION, layer, "y")


def transfer(
    kind: str,
    tag: Tag,
    *,
    phase: Phase,
    launch: float,
    end: float,
    wait: float,
    channel: str = "weight",
    sent_bytes: int = 100,
) -> TimedTransfer:
    """Return a transfer with a wait from `wait` to its end, if that is later."""
    return TimedTransfer(
        kind,
        channel,
        tag,
        sent_bytes,
        launched=launch / 1e3,
        ended=end / 1e3,
        waited=True,
        wait_began=wait / 1e3,
        exposed=max(0.0, end - wait) / 1e3,
        phase=phase,
        block="stamped",
    )


def mark(at: float, phase: Phase, block: str = "", site: str = "") -> Mark:
    """Return a mark; memory grows by 1 GiB per millisecond."""
    return Mark(at / 1e3, phase, block, site, 0.0 if site else at + 1)


def record(
    begins: Sequence[float], transfers: Sequence[TimedTransfer], marks: Sequence[Mark]
) -> RankRecord:
    """Return a record of steps that start at `begins`; the last entry is the end."""
    return RankRecord(
        begins=tuple(begin / 1e3 for begin in begins),
        transfers=tuple(transfers),
        marks=tuple(marks),
        parts=("embedding", "layers.0", "layers.1", "head"),
        peak_memory_gib=2.0,
    )


def aligned(*records: RankRecord, leads: Sequence[float] = ()) -> list[RankTimes]:
    """Return the ranks' records on one clock; `leads` are in milliseconds, by default 0."""
    ranks = tuple(range(len(records)))
    channels = {"weight": ranks, "tensor": ranks}
    return align(
        [
            replace(record, channels=channels, clock_lead=lead / 1e3)
            for record, lead in zip_longest(records, leads, fillvalue=0.0)
        ]
    )
