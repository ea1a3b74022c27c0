"""A small hand-made profile: two modes on two ranks, one measured step of 100 ms."""

from __future__ import annotations

from collections.abc import Sequence

from isp.core.comm import TimedTransfer
from isp.core.comm.tag import Tag
from isp.core.mesh import Mode, ParallelConfig, WeightConfig
from isp.core.mesh.config import TensorConfig
from isp.core.mesh.phase import Phase
from isp.profile import ModeProfile, Profile, RankProfile
from isp.profile.totals import timeline, totals
from isp.profile.waits import worst_waits
from tests.profile.records import aligned, gradient, mark, output, record, transfer, weight

__all__ = ["example_profile"]

MARKS = (
    mark(0, Phase.OTHER),
    mark(5, Phase.FORWARD, "embedding"),
    mark(10, Phase.FORWARD, "layers.0"),
    mark(11, Phase.FORWARD, "layers.0", "wqkv"),
    mark(14, Phase.FORWARD, "layers.0", "attn"),
    mark(20, Phase.FORWARD, "layers.0", "wo"),
    mark(25, Phase.FORWARD, "layers.1"),
    mark(26, Phase.FORWARD, "layers.1", "wqkv"),
    mark(38, Phase.FORWARD, "head"),
    mark(42, Phase.LOSS),
    mark(45, Phase.BACKWARD, "head"),
    mark(50, Phase.RECOMPUTE, "layers.1"),
    mark(58, Phase.BACKWARD, "layers.1"),
    mark(70, Phase.BACKWARD, "layers.0"),
    mark(85, Phase.BACKWARD, "embedding"),
    mark(90, Phase.OPTIMIZER),
)


def example_profile() -> Profile:
    """Return a profile of mtp, which waits for all-reduces, and isp, which overlaps most
    gathers.
    """
    sums = [
        _transfer("all_reduce", output(f"layers.{i}.attention.wo"), launch, launch + 8, launch)
        for i, launch in enumerate((15, 29))
    ]
    first = _transfer("all_gather", weight("embedding"), -2, 7, 5)
    late = _transfer("all_gather", weight("layers.1.attention.wo"), 20, 31, 28)
    last = _transfer("reduce_scatter", gradient("embedding"), 89, 94, 90)
    return Profile(
        created="2026-11-21T12:00:00",
        torch="2.13.0",
        device="AMD EPYC",
        world_size=2,
        warmup_steps=2,
        num_steps=1,
        config="model: {num_layers: 2}\n",
        modes=(
            _mode(Mode.MTP, 1, sums),
            _mode(Mode.ISP, 2, [first, late, last], plan_grid="action  phase\nstart"),
        ),
    )


def _transfer(kind: str, tag: Tag, launch: float, end: float, wait: float) -> TimedTransfer:
    """Return a transfer of 1 MiB."""
    phase = Phase.BACKWARD if kind == "reduce_scatter" else Phase.FORWARD
    channel = "tensor" if kind == "all_reduce" else "weight"
    times = {"launch": launch, "end": end, "wait": wait}
    return transfer(kind, tag, phase=phase, channel=channel, sent_bytes=1 << 20, **times)


def _mode(
    mode: Mode, weight: int, transfers: Sequence[TimedTransfer], plan_grid: str | None = None
) -> ModeProfile:
    """Return a mode in which both ranks have the same `transfers`."""
    parallel = ParallelConfig(
        tensor=TensorConfig(size=2, mode=mode), weight=WeightConfig(size=weight)
    )
    both = aligned(*[record((0, 100), transfers, MARKS)] * 2)
    return ModeProfile(
        mode=mode,
        tensor=2,
        weight=weight,
        data=1,
        pipeline=1,
        topology=f"mode {mode}\nworld 2",
        losses=(5.0,),
        summary=totals(both[0], 0),
        ranks=tuple(
            RankProfile(
                rank=rank,
                totals=(totals(own, 0),),
                timeline=timeline(own, 0, number=0, zero=0.0),
                peak_memory_gib=1.7,
            )
            for rank, own in enumerate(both)
        ),
        waits=worst_waits(both, [0], parallel),
        plan_grid=plan_grid,
    )
