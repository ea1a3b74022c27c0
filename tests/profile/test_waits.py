"""Explanations of waits, and advice: only what the measurement supports."""

from __future__ import annotations

import pytest

from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh import Mode, ParallelConfig, WeightConfig
from isp.core.mesh.config import LaunchPoint, OverlapUnit, TensorConfig
from isp.core.mesh.phase import Phase
from isp.profile.schema import Reason
from isp.profile.waits import worst_waits
from tests.profile.records import QKV, aligned, gradient, mark, output, record, transfer, weight

WQKV = weight("layers.1.attention.wqkv")
MARKS = (
    mark(0, Phase.FORWARD),
    mark(1, Phase.FORWARD, "layers.0"),
    mark(2, Phase.FORWARD, "layers.0", "wqkv"),
    mark(20, Phase.FORWARD, "layers.0", "attn"),
    mark(30, Phase.FORWARD, "layers.0", "wo"),
    mark(40, Phase.FORWARD, "layers.0", "w1"),
    mark(50, Phase.FORWARD, "layers.1"),
    mark(51, Phase.FORWARD, "layers.1", "wqkv"),
    mark(80, Phase.BACKWARD, "layers.1"),
    mark(95, Phase.OPTIMIZER),
)


def _wait(*transfers, weight=None, mode=Mode.ISP, others=()):
    """Return the worst wait in a step of 100 ms with these transfers; `others` are on a second
    rank.
    """
    records = [record((0, 100), transfers, MARKS)]
    records += [record((0, 100), others, MARKS)] if others else []
    parallel = ParallelConfig(tensor=TensorConfig(mode=mode), weight=weight or WeightConfig())
    return worst_waits(aligned(*records), [0], parallel)[0]


def _advice(*transfers) -> str:
    """Return the advice on the gather, which need not be the worst wait."""
    waits = worst_waits(aligned(record((0, 100), transfers, MARKS)), [0], ParallelConfig())
    return next(wait.advice for wait in waits if wait.label == str(WQKV))


def _gather(launch: float, end: float, *, wait: float = 52):
    return transfer("all_gather", WQKV, phase=Phase.FORWARD, launch=launch, end=end, wait=wait)


def test_the_latest_launch_point_that_would_hide_a_gather_is_named():
    """Catches an earlier launch point than needed, which costs memory, and one that is too late."""
    late = _wait(_gather(31, 55))
    assert (late.reason, late.late_ms) == (Reason.LATE, pytest.approx(3))
    change = "parallel.weight.launch_allgather_before=attn"
    assert late.advice == f"launched 3.0 ms too late: {change} would hide it"
    assert "launch_allgather_before=wqkv " in _wait(_gather(31, 75)).advice


def test_no_launch_point_is_recommended_that_would_not_suffice():
    """Catches advice not tried on the timeline: 60 ms fit before no launch point."""
    wait = _wait(_gather(31, 91))
    assert (wait.reason, wait.late_ms) == (Reason.TOO_LONG, None)
    assert "launch_allgather_before" not in wait.advice
    text = "each takes 60.0 ms from launch to end, with 21.0 ms of compute between launch and use"
    assert text in wait.advice
    assert "2.9x the tokens" in wait.advice


def test_advice_considers_other_transfers_on_the_link():
    """Catches advice that ignores the exchange with which the earlier gather would collide."""
    alone, exchange = _gather(31, 55), {"phase": Phase.FORWARD, "channel": "tensor"}
    busy = transfer("all_to_all", QKV, launch=19, end=29, wait=19, **exchange)
    assert "launch_allgather_before=attn" in _wait(alone).advice
    # After it, launched at attn, the gather would arrive at 29 + 31.
    assert "launch_allgather_before=wqkv" in _advice(_gather(31, 62), busy)
    longer = transfer("all_to_all", QKV, launch=19, end=35, wait=19, **exchange)
    # Overlapping with it, launched at wqkv, at 2 + 37 + 16.
    assert "launch_allgather_before" not in _advice(_gather(31, 68), longer)


def test_settings_that_launch_late_are_named_first():
    """Catches a recommended launch point where the plan does not prefetch at all."""
    at_use = WeightConfig(overlap=False)
    assert "parallel.weight.overlap=true" in _wait(_gather(52, 70), weight=at_use).advice
    module = WeightConfig(forward_overlap_per=OverlapUnit.MODULE)
    assert "forward_overlap_per=layer" in _wait(_gather(41, 55), weight=module).advice
    first = WeightConfig(launch_allgather_before=LaunchPoint.WQKV)
    assert _wait(_gather(3, 60), weight=first).reason is Reason.TOO_LONG


def test_a_long_gather_for_backward_suggests_weights_that_stay():
    """Catches such advice for a gather that forward needs, or where weights stay already."""
    stay = "reshard_after_forward=false"
    times = {"launch": 70, "end": 95, "wait": 82}
    again = transfer("all_gather", WQKV, phase=Phase.BACKWARD, **times)
    assert stay in _wait(again).advice
    assert stay not in _wait(again, weight=WeightConfig(reshard_after_forward=False)).advice
    assert stay not in _wait(transfer("all_to_all", QKV, phase=Phase.BACKWARD, **times)).advice
    assert stay not in _wait(_gather(3, 91)).advice


def test_a_wait_for_a_late_rank_is_explained():
    """Catches a rank that is late reported as a slow transfer."""
    late = transfer("all_gather", WQKV, phase=Phase.FORWARD, launch=60, end=64, wait=62)
    first = WeightConfig(launch_allgather_before=LaunchPoint.WQKV)
    wait = _wait(_gather(31, 64), others=(late,), weight=first)
    assert wait.reason is Reason.OTHER_RANKS
    assert (wait.others_ms, wait.moving_ms) == pytest.approx((8 / 2, 4))
    assert wait.advice == "4.0 ms for the last rank to join, usually rank 1"


def test_an_earlier_launch_helps_all_ranks():
    """Catches ranks reported as late for a gather that all of them launch too late."""
    late = transfer("all_gather", WQKV, phase=Phase.FORWARD, launch=60, end=64, wait=61)
    wait = _wait(_gather(31, 64), others=(late,))
    # launched at attn, it would arrive at 60 - 11 + 4
    assert "launch_allgather_before=wqkv" in wait.advice
    assert wait.late_ms == pytest.approx(12)


def test_a_wait_for_an_earlier_transfer_is_explained():
    """Catches a gather queued after a gradient reported as too long."""
    grad = transfer(
        "reduce_scatter", gradient("layers.1.w"), phase=Phase.BACKWARD, launch=81, end=89, wait=97
    )
    gather = transfer("all_gather", WQKV, phase=Phase.BACKWARD, launch=82, end=90, wait=83)
    wait = _wait(grad, gather)
    assert wait.reason is Reason.QUEUE
    assert "after reduce_scatter of layers.1.w.weight.grad" in wait.advice
    assert "own_reduce_group=true" in wait.advice
    own = _wait(grad, gather, weight=WeightConfig(own_reduce_group=True))
    assert "own_reduce_group" not in own.advice


def test_transfers_that_compute_needs_at_once_are_reported_so():
    """Catches a claim that the sum of a row linear in mtp could be overlapped."""
    wait = _wait(
        transfer(
            "all_reduce",
            output("layers.0.attention.wo"),
            phase=Phase.FORWARD,
            channel="tensor",
            launch=35,
            end=45,
            wait=35,
        ),
        mode=Mode.MTP,
    )
    assert wait.reason is Reason.CHAIN
    assert wait.advice.startswith("mtp needs it at once")


@pytest.mark.parametrize(
    ("purpose", "said"),
    [
        (Purpose.HEADS, "attention needs it at once: only parallel.tensor.size"),
        (Purpose.KEYS, "attention needs it at once: only parallel.sequence_2D"),
        (Purpose.SCAN_HEADS, "a scan needs it at once: parallel.sequence_scan=state"),
        (Purpose.STATES, "a scan needs it at once: parallel.sequence_scan=heads"),
        (Purpose.HALO, "a convolution needs it at once: its size depends on the kernel"),
    ],
)
def test_advice_for_sequence_exchanges_names_the_right_keys(purpose, said):
    """Catches a scan or a convolution with the advice for attention, or with none."""
    times = {"phase": Phase.FORWARD, "channel": "tensor", "launch": 35, "end": 45, "wait": 35}
    wait = _wait(transfer("all_to_all", Tag(purpose), **times))
    assert wait.reason is Reason.CHAIN
    assert wait.advice.startswith(said)


def test_first_and_last_transfers_of_a_step_get_no_advice():
    """Catches the ends of a step reported as something to improve."""
    first = transfer(
        "all_gather", weight("embedding"), phase=Phase.OPTIMIZER, launch=-9, end=6, wait=1.5
    )
    last = transfer(
        "reduce_scatter", gradient("embedding"), phase=Phase.BACKWARD, launch=94, end=99, wait=96
    )
    reasons = {
        w.label: w.reason
        for w in worst_waits(
            aligned(record((0, 100), [first, last], MARKS)),
            [0],
            ParallelConfig(),
        )
    }
    assert reasons == {
        "embedding.weight": Reason.FIRST_EDGE,
        "embedding.weight.grad": Reason.LAST_EDGE,
    }
