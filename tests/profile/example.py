"""A small profile made by hand: two modes on two ranks, one measured step of 100 ms."""

from __future__ import annotations

from itertools import pairwise

from isp.comm.tag import Purpose
from isp.parallel.phase import Phase
from isp.profile.schema import (
    Collective,
    ComputeSpan,
    Edge,
    KindTotals,
    MemorySample,
    ModeProfile,
    Profile,
    RankProfile,
    Reason,
    StepTimeline,
    Totals,
    Wait,
)

__all__ = ["example_profile"]


def example_profile() -> Profile:
    """mtp, whose all-reduces are waited for, and isp, which hides most of its gathers."""
    return Profile(
        created="2026-11-21T12:00:00",
        torch="2.13.0",
        device="AMD EPYC",
        world_size=2,
        warmup_steps=2,
        num_steps=1,
        config="model: {num_layers: 2}\n",
        modes=(_mtp(), _isp()),
    )


def _collective(kind: str, channel: str, label: str, **values: object) -> Collective:
    launch, end = values["launch_ms"], values["end_ms"]
    defaults: dict[str, object] = {
        "block": label.partition(".")[0],
        "purpose": Purpose.WEIGHT if channel == "weight" else Purpose.ACTIVATION,
        "sent_bytes": 1 << 20,
        "start_ms": launch,
        "moving_ms": end - launch,  # type: ignore[operator]
        "others_ms": 0.0,
        "queue_ms": 0.0,
    }
    return Collective(kind=kind, channel=channel, label=label, **{**defaults, **values})  # type: ignore[arg-type]


def _spans() -> tuple[ComputeSpan, ...]:
    cuts = [
        ("other work", Phase.OTHER, 0.0),
        ("embedding", Phase.FORWARD, 5.0),
        ("layers.0", Phase.FORWARD, 10.0),
        ("layers.1", Phase.FORWARD, 25.0),
        ("head", Phase.FORWARD, 38.0),
        ("loss", Phase.LOSS, 42.0),
        ("head", Phase.BACKWARD, 45.0),
        ("layers.1", Phase.RECOMPUTE, 50.0),
        ("layers.1", Phase.BACKWARD, 58.0),
        ("layers.0", Phase.BACKWARD, 70.0),
        ("embedding", Phase.BACKWARD, 85.0),
        ("optimizer", Phase.OPTIMIZER, 90.0),
        ("", "", 100.0),
    ]
    return tuple(
        ComputeSpan(block=block, phase=phase, begin_ms=begin, end_ms=after[2])
        for (block, phase, begin), after in pairwise(cuts)
    )


def _rank(rank: int, collectives: tuple[Collective, ...], totals: Totals) -> RankProfile:
    memory = [(0.0, Phase.OTHER, 1.0), (5.0, Phase.FORWARD, 1.1), (45.0, Phase.BACKWARD, 1.6)]
    memory.append((90.0, Phase.OPTIMIZER, 1.2))
    samples = tuple(MemorySample(at_ms=t, phase=p, gib=g + 0.1 * rank) for t, p, g in memory)
    timeline = StepTimeline(
        step=0,
        begin_ms=0.0,
        end_ms=100.0,
        collectives=collectives,
        spans=_spans(),
        memory=samples,
    )
    return RankProfile(rank=rank, totals=(totals,), timeline=timeline, peak_memory_gib=1.7)


def _totals(exposed_ms: float, comm_ms: float, bound: tuple[float, ...], **kinds: KindTotals):
    first, last, chain, excess = bound
    return Totals(
        step_ms=100.0,
        compute_ms=100.0 - exposed_ms,
        num_transfers=sum(kind.num_transfers for kind in kinds.values()),
        sent_bytes=sum(kind.sent_bytes for kind in kinds.values()),
        comm_ms=comm_ms,
        exposed_ms=exposed_ms,
        first_edge_ms=first,
        last_edge_ms=last,
        chain_ms=chain,
        excess_ms=excess,
        by_kind=kinds,
    )


def _kind(num_transfers: int, comm_ms: float, exposed_ms: float) -> KindTotals:
    """Transfers of a MiB each."""
    return KindTotals(
        num_transfers=num_transfers,
        sent_bytes=num_transfers << 20,
        comm_ms=comm_ms,
        exposed_ms=exposed_ms,
    )


def _mode(
    mode: str,
    weight: int,
    totals: Totals,
    collectives: tuple[Collective, ...],
    reason: Reason,
    advice: str,
    **more: object,
) -> ModeProfile:
    """A mode whose worst wait is that for its second-to-last collective."""
    worst = collectives[-2]
    wait = Wait(
        **{
            name: getattr(worst, name)
            for name in (
                *("kind", "channel", "label", "block", "phase", "sent_bytes"),
                *("exposed_ms", "moving_ms", "others_ms", "queue_ms"),
            )
        },
        count=1,
        late_ms=worst.exposed_ms if reason is Reason.LATE else None,
        reason=reason,
        advice=advice,
    )
    return ModeProfile(
        mode=mode,
        tensor=2,
        weight=weight,
        data=1,
        pipeline=1,
        topology=f"mode {mode}\nworld 2",
        losses=(5.0,),
        summary=totals,
        ranks=tuple(_rank(rank, collectives, totals) for rank in range(2)),
        waits=(wait,),
        **more,  # type: ignore[arg-type]
    )


def _isp() -> ModeProfile:
    cases = (  # label, phase, launch, end, wait, exposed, edge
        ("embedding.weight", Phase.OPTIMIZER, -2.0, 7.0, 5.0, 2.0, Edge.FIRST),
        ("layers.1.attention.wo.weight", Phase.FORWARD, 20.0, 31.0, 28.0, 3.0, None),
        ("embedding.weight.grad", Phase.BACKWARD, 89.0, 94.0, 90.0, 4.0, Edge.LAST),
    )
    collectives = tuple(
        _collective(
            "reduce_scatter" if label.endswith(".grad") else "all_gather",
            "weight",
            label,
            block="layers.1" if label.startswith("layers") else "embedding",
            phase=phase,
            launch_ms=launch,
            end_ms=end,
            wait_ms=wait,
            exposed_ms=exposed,
            edge=edge,
        )
        for label, phase, launch, end, wait, exposed, edge in cases
    )
    kinds = {"all_gather": _kind(2, 20.0, 5.0), "reduce_scatter": _kind(1, 5.0, 4.0)}
    return _mode(
        "isp",
        2,
        _totals(9.0, 25.0, (2.0, 4.0, 0.0, 0.0), **kinds),
        collectives,
        Reason.LATE,
        "launched 3.0 ms too late: parallel.weight.launch_allgather_before=attn would hide it",
        plan_grid="action  phase\nstart",
    )


def _mtp() -> ModeProfile:
    sums = tuple(
        _collective(
            "all_reduce",
            "tensor",
            f"layers.{i}.attention.wo.y",
            block=f"layers.{i}",
            phase=Phase.FORWARD,
            launch_ms=begin,
            end_ms=begin + 8.0,
            wait_ms=begin,
            exposed_ms=8.0,
        )
        for i, begin in enumerate((15.0, 29.0))
    )
    return _mode(
        "mtp",
        1,
        _totals(16.0, 16.0, (0.0, 0.0, 16.0, 0.0), all_reduce=_kind(2, 16.0, 16.0)),
        sums,
        Reason.CHAIN,
        "mtp needs it before it can continue: isp has no such transfer",
    )
