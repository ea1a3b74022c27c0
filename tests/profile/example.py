"""A small profile made by hand: two modes on two ranks, one measured step of 100 ms."""

from __future__ import annotations

from itertools import pairwise

from isp.comm.tag import Purpose
from isp.parallel.phase import Phase
from isp.profile import (
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


def _isp() -> ModeProfile:
    weight, grad = "layers.1.attention.wo.weight", "embedding.weight.grad"
    gathers = (
        _collective(
            "all_gather",
            "weight",
            "embedding.weight",
            phase=Phase.OPTIMIZER,
            launch_ms=-2.0,
            end_ms=7.0,
            wait_ms=5.0,
            exposed_ms=2.0,
            edge=Edge.FIRST,
        ),
        _collective(
            "all_gather",
            "weight",
            weight,
            block="layers.1",
            phase=Phase.FORWARD,
            launch_ms=20.0,
            end_ms=31.0,
            wait_ms=28.0,
            exposed_ms=3.0,
        ),
        _collective(
            "reduce_scatter",
            "weight",
            grad,
            phase=Phase.BACKWARD,
            launch_ms=89.0,
            end_ms=94.0,
            wait_ms=90.0,
            exposed_ms=4.0,
            edge=Edge.LAST,
        ),
    )
    totals = Totals(
        step_ms=100.0,
        compute_ms=91.0,
        num_transfers=3,
        sent_bytes=3 << 20,
        comm_ms=25.0,
        exposed_ms=9.0,
        first_edge_ms=2.0,
        last_edge_ms=4.0,
        chain_ms=0.0,
        excess_ms=0.0,
        by_kind={
            "all_gather": KindTotals(
                num_transfers=2, sent_bytes=2 << 20, comm_ms=20.0, exposed_ms=5.0
            ),
            "reduce_scatter": KindTotals(
                num_transfers=1, sent_bytes=1 << 20, comm_ms=5.0, exposed_ms=4.0
            ),
        },
    )
    late = Wait(
        kind="all_gather",
        channel="weight",
        label=weight,
        block="layers.1",
        phase=Phase.FORWARD,
        count=1,
        sent_bytes=1 << 20,
        exposed_ms=3.0,
        moving_ms=11.0,
        others_ms=0.0,
        queue_ms=0.0,
        late_ms=3.0,
        reason=Reason.LATE,
        advice=(
            "launched 3.0 ms too late: parallel.weight.launch_allgather_before=attn would hide it"
        ),
    )
    return ModeProfile(
        mode="isp",
        tensor=2,
        weight=2,
        data=1,
        pipeline=1,
        topology="mode isp\nworld 2",
        losses=(5.0,),
        summary=totals,
        ranks=tuple(_rank(rank, gathers, totals) for rank in range(2)),
        waits=(late,),
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
    totals = Totals(
        step_ms=100.0,
        compute_ms=84.0,
        num_transfers=2,
        sent_bytes=2 << 20,
        comm_ms=16.0,
        exposed_ms=16.0,
        first_edge_ms=0.0,
        last_edge_ms=0.0,
        chain_ms=16.0,
        excess_ms=0.0,
        by_kind={
            "all_reduce": KindTotals(
                num_transfers=2, sent_bytes=2 << 20, comm_ms=16.0, exposed_ms=16.0
            )
        },
    )
    chain = Wait(
        kind="all_reduce",
        channel="tensor",
        label="layers.0.attention.wo.y",
        block="layers.0",
        phase=Phase.FORWARD,
        count=1,
        sent_bytes=1 << 20,
        exposed_ms=8.0,
        moving_ms=8.0,
        others_ms=0.0,
        queue_ms=0.0,
        late_ms=None,
        reason=Reason.CHAIN,
        advice="mtp needs it before it can go on: isp has no such transfer",
    )
    return ModeProfile(
        mode="mtp",
        tensor=2,
        weight=1,
        data=1,
        pipeline=1,
        topology="mode mtp\nworld 2",
        losses=(5.0,),
        summary=totals,
        ranks=tuple(_rank(rank, sums, totals) for rank in range(2)),
        waits=(chain,),
    )
