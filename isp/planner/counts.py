"""Calls and bytes of each collective in a step; they equal the counts of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, TypeVar

from isp.core.comm.tag import Purpose, Transfer
from isp.core.mesh import SequenceScan
from isp.models.tracing.calls import Kind
from isp.planner.case import PlanCase
from isp.planner.declared import shape_of
from isp.planner.fabric import DeviceSpec, Fabric, LinkSpec
from isp.planner.rank import DryRank, Heard
from isp.planner.walk import walk

K = TypeVar("K")

__all__ = ["Count", "Traffic", "scans", "traffic"]

_SPEEDS: Any = dict.fromkeys(("memory_gib", "tflops", "wide_tflops", "gb_per_second"), 1)
_SHARES: Any = dict.fromkeys(("efficiency", "attention_efficiency"), 1)
_ANY = Fabric(
    name="any",
    devices_per_node=2**20,
    device=DeviceSpec(name="any", **_SPEEDS, **_SHARES),
    inside=LinkSpec(gb_per_second=1, latency_us=0),
)
"""A fabric for walks whose times do not matter: traffic is the same on every machine."""


class Count(NamedTuple):
    """Number of transfers of one kind or purpose that a rank makes in a step, and their bytes."""

    calls: int
    sent_bytes: int


class Traffic(NamedTuple):
    """All transfers of one rank in a step."""

    by_channel: dict[tuple[str, str], Count]
    """Number of transfers and their bytes, by (kind, channel) as in the transfer log."""
    by_purpose: dict[Purpose, Count]
    """Number of transfers and their bytes, by the purpose of the transfer."""


def traffic(case: PlanCase, rank: int) -> Traffic:
    """Return the transfers of `rank` in a step, from the batch's broadcast to published weights.

    A long step is extrapolated from two short ones: [Note: Long steps] in
    docs/design/notes/planner.md.
    """
    few, period, place = case.few_micro_batches, case.topology.pipeline, case.place(rank)
    found = walk(case, _ANY, rank, few).sent
    if rest := (case.micro_num - few) // period:
        longer = walk(case, _ANY, rank, few + period).sent
        found = Counter(
            {sent: found[sent] + rest * (n - found[sent]) for sent, n in longer.items()}
        )
    send = case.between_stages
    # For each micro-batch a rank sends one tensor to each neighbor and receives one: activations go
    # to the next stage and their gradients come back, and the reverse for the previous stage.
    for hop in (send, send._replace(kind="recv", sent_bytes=0)):
        found[hop] += case.micro_num * sum(map(sum, case.neighbors(place.stage)))
    found.update(_once_a_step(case, rank))
    by_channel: dict[tuple[str, str], Count] = {}
    by_purpose: dict[Purpose, Count] = {}
    for sent, n in found.items():
        _add(by_channel, (sent.kind, sent.channel), n, sent)
        _add(by_purpose, sent.tag.purpose, n, sent)
    return Traffic(by_channel, {key: by_purpose[key] for key in Purpose if key in by_purpose})


def _add(counts: dict[K, Count], key: K, n: int, sent: Transfer) -> None:
    """Add `n` transfers to the count of `key`; if `n` is 0, nothing is changed."""
    calls, size = counts.get(key, (0, 0))
    if n:
        counts[key] = Count(calls + n, size + n * sent.sent_bytes)


def _once_a_step(case: PlanCase, rank: int) -> list[Transfer]:
    """Return the transfers outside of micro-batches: the batch, and a tied table's gradient."""
    place, heard = case.place(rank), Heard()
    dry = DryRank(case, place, heard)
    dry.share_batch()
    ends = {0, case.order.num_stages - 1} & set(case.order.stages_of(place.stage))
    if len(ends) == 1 and (tied := shape_of(case, place.stage).tied) is not None:
        dry.add_tied(tied)
    return heard


def scans(case: PlanCase) -> str:
    """Return how scans are split over ranks, in words; "" if no scan is split."""
    if not any(call.kind is Kind.SCAN for call in case.language_model.trace.calls):
        return ""
    sent = traffic(case, 0).by_purpose
    ways = {SequenceScan.HEADS: Purpose.SCAN_HEADS, SequenceScan.STATE: Purpose.STATES}
    found = " and ".join(way for way, purpose in ways.items() if purpose in sent)
    is_auto = case.parallel.sequence_scan is SequenceScan.AUTO
    why = " (auto, by the bytes that a rank receives)" if is_auto else ""
    return f"by {found}{why}" if found else ""
