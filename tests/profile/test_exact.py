"""On steps with known intervals every reported number equals the expected one."""

from __future__ import annotations

import dataclasses

import pytest

from isp.core.comm.tag import Purpose, Tag
from isp.core.comm.transfer_log import covered
from isp.core.mesh.phase import Phase
from isp.profile.schema import Cost, Edge
from isp.profile.totals import step_collectives, timeline, totals
from tests.profile.records import (
    METRICS,
    QKV,
    aligned,
    gradient,
    mark,
    output,
    record,
    transfer,
    weight,
)

MARKS = (
    mark(0, Phase.OTHER),
    mark(10, Phase.FORWARD),
    mark(12, Phase.FORWARD, "embedding"),
    mark(13, Phase.FORWARD, "embedding", "embedding"),
    mark(20, Phase.FORWARD, "layers.0"),
    mark(21, Phase.FORWARD, "layers.0", "wqkv"),
    mark(40, Phase.LOSS),
    mark(45, Phase.BACKWARD),
    mark(46, Phase.BACKWARD, "layers.0"),
    mark(70, Phase.BACKWARD, "embedding"),
    mark(80, Phase.OPTIMIZER),
    mark(95, Phase.OTHER),
)
BEGINS = (0.0, 100.0)


def first_step():
    """Return a step: two first gathers, one exchange that compute needs, an overlapped and a last
    gradient, and metrics.
    """
    wqkv = "layers.0.attention.wqkv"
    cases = (  # kind, tag, phase, launch, end, wait, channel
        ("all_gather", weight("embedding"), Phase.OPTIMIZER, -5, 15, 13, "weight"),
        ("all_gather", weight(wqkv), Phase.OPTIMIZER, -4, 26, 22, "weight"),
        ("all_to_all", QKV, Phase.FORWARD, 30, 36, 30, "tensor"),
        ("reduce_scatter", gradient(wqkv), Phase.BACKWARD, 50, 60, 82, "weight"),
        ("reduce_scatter", gradient("embedding"), Phase.BACKWARD, 79, 87, 83, "weight"),
        ("all_reduce", METRICS, Phase.OPTIMIZER, 90, 92, 90, "world"),
    )
    return [
        transfer(kind, tag, phase=phase, launch=launch, end=end, wait=wait, channel=channel)
        for kind, tag, phase, launch, end, wait, channel in cases
    ]


def test_every_number_of_one_rank_is_exact():
    """Catches any interval that is cut, joined or attributed wrongly."""
    (times,) = aligned(record(BEGINS, first_step(), MARKS))
    table, wqkv, qkv, grad, last, metrics = step_collectives(times, 0)
    assert (table.launch_ms, table.end_ms, table.wait_ms) == pytest.approx((-5, 15, 13))
    assert (table.exposed_ms, wqkv.exposed_ms) == pytest.approx((2, 4))
    assert (wqkv.launch_ms, wqkv.start_ms, wqkv.moving_ms) == pytest.approx((-4, 15, 11))
    assert (grad.exposed_ms, last.exposed_ms) == pytest.approx((0, 4))
    assert [c.edge for c in (table, wqkv, last)] == [Edge.FIRST, Edge.FIRST, Edge.LAST]
    assert (qkv.edge, grad.edge, metrics.edge) == (None, None, None)
    assert [c.phase for c in (table, qkv, grad)] == ["forward", "forward", "backward"]
    assert [c.block for c in (table, wqkv, qkv)] == ["embedding", "layers.0", "stamped"]
    assert [c.cost for c in (wqkv, qkv, metrics)] == [Cost.AHEAD, Cost.CHAIN, Cost.OUTSIDE]

    total = totals(times, 0)
    assert (total.step_ms, total.exposed_ms, total.compute_ms) == pytest.approx((100, 18, 82))
    assert (total.num_transfers, total.sent_bytes) == (6, 600)
    assert total.comm_ms == pytest.approx((26 + 5) + 6 + 10 + 8 + 2)
    assert total.exposed_share == pytest.approx(0.18)
    assert total.first_edge_ms == pytest.approx(2 + 4)
    assert total.last_edge_ms == pytest.approx(4)
    assert (total.chain_ms, total.excess_ms) == pytest.approx((6, 0))
    assert total.exposed_over_bound == pytest.approx(18 / 16)
    gathers = total.by_kind["all_gather"]
    assert (gathers.num_transfers, gathers.sent_bytes) == (2, 200)
    assert (gathers.comm_ms, gathers.exposed_ms) == pytest.approx((31, 6))


def shifted(transfers, marks, seconds: float):
    """Return the transfer, moved in time."""
    moved = [
        dataclasses.replace(
            t,
            launched=t.launched + seconds,
            ended=t.ended + seconds,
            wait_began=t.wait_began + seconds,
        )
        for t in transfers
    ]
    return moved, [dataclasses.replace(m, at=m.at + seconds) for m in marks]


def test_a_transfer_belongs_to_the_step_that_waits_for_it():
    """Catches first gathers counted in the step that launched them, or in no step."""
    again, later = shifted(first_step(), MARKS, 0.1)
    marks = [*MARKS, *later]
    (times,) = aligned(record((0.0, 100.0, 200.0), [*first_step(), *again], marks))
    assert times.collectives[6].launch_ms < times.begins[1]
    first, second = totals(times, 0), totals(times, 1)
    assert second.exposed_ms == pytest.approx(first.exposed_ms)
    assert second.first_edge_ms == pytest.approx(first.first_edge_ms)
    assert (first.num_transfers, second.num_transfers) == (6, 6)


def test_waiting_is_split_into_queue_other_ranks_and_transfer():
    """Catches a slow rank, or the previous transfer, reported as a slow link."""
    phase = {"phase": Phase.FORWARD, "channel": "tensor"}

    def of_rank(late: float):
        return record(
            BEGINS,
            [
                transfer("all_reduce", output("a"), launch=10, end=20, wait=40, **phase),
                transfer("all_reduce", output("b"), launch=12, end=50, wait=15, **phase),
                transfer(
                    "all_reduce", output("c"), launch=60 + late, end=75, wait=62 + late, **phase
                ),
            ],
            MARKS,
        )

    times = aligned(of_rank(0), of_rank(9), of_rank(4))
    early, late, _ = (own.collectives for own in times)
    assert (early[1].queue_ms, early[1].others_ms) == pytest.approx((5, 0))
    assert (early[2].others_ms, late[2].others_ms) == pytest.approx((7, 0))
    assert (early[2].moving_ms, late[2].moving_ms) == pytest.approx((6, 6))
    assert totals(times[0], 0).chain_ms == pytest.approx(30 + (6 - 2))
    late = record((3.0, 103.0), *shifted(of_rank(9).transfers, MARKS, 3e-3))
    (shifted_back, *_) = aligned(of_rank(0), late, leads=(0, 3))
    assert shifted_back.collectives[2].others_ms == pytest.approx(7)


def test_a_receive_waits_for_its_sender():
    """Catches a receive matched with its rank's own sends, or timed from when it is posted.

    Rank 1 sends at 22 what rank 0 has waited for since 10, and receives what was sent long before.
    """
    kinds = {"phase": Phase.OTHER, "channel": "tensor"}
    one, two = (
        Tag(Purpose.STAGE_ACTIVATION, tensor=f"{what} of micro-batch 0 from stage {stage}")
        for what, stage in (("activations", 1), ("gradient", 0))
    )
    first = [
        transfer("recv", one, launch=1, end=30, wait=10, **kinds),
        transfer("send", two, launch=31, end=60, wait=60, **kinds),
    ]
    second = [
        transfer("recv", two, launch=5, end=50, wait=50, **kinds),
        transfer("send", one, launch=22, end=40, wait=40, **kinds),
    ]
    times = aligned(record((0.0, 100.0), first, MARKS), record((0.0, 100.0), second, MARKS))
    blocked, _ = times[0].collectives
    assert (blocked.exposed_ms, blocked.others_ms) == (pytest.approx(20), pytest.approx(12))
    assert (blocked.moving_ms, blocked.queue_ms) == (pytest.approx(8), 0)
    found = [totals(own, 0) for own in times]
    assert [own.comm_ms for own in found] == [pytest.approx(20), 0]


def test_the_bound_includes_transfers_that_exceed_compute():
    """Catches a bound that calls transfers avoidable although there is not enough compute."""
    gather = transfer(
        "all_gather", weight("layers.1.w"), phase=Phase.FORWARD, launch=11, end=51, wait=26
    )
    (times,) = aligned(record(BEGINS, [gather], MARKS))
    assert totals(times, 0).excess_ms == pytest.approx(40 - (35 - 25))


def test_the_timeline_has_no_gaps_or_overlaps():
    """Catches spans that overlap or leave gaps, and times that do not start at the given zero."""
    (times,) = aligned(record(BEGINS, first_step(), MARKS))
    found = timeline(times, 0, number=3, zero=times.begins[0] - 1)
    assert (found.step, found.begin_ms, found.end_ms) == (3, pytest.approx(1), pytest.approx(101))
    spans = [(s.block, s.phase, round(s.begin_ms), round(s.end_ms)) for s in found.spans]
    assert spans[:4] == [
        ("other work", "other work", 1, 11),
        ("forward", "forward", 11, 13),
        ("embedding", "forward", 13, 21),
        ("layers.0", "forward", 21, 41),
    ]
    for before, after in zip(found.spans, found.spans[1:], strict=False):
        assert before.end_ms == after.begin_ms
    assert found.spans[-1].end_ms == pytest.approx(101)
    assert found.collectives[0].launch_ms == pytest.approx(-4)
    assert len(found.memory) == len(MARKS) - 2


def test_time_under_two_transfers_counts_once():
    """Catches time with two transfers in flight that is counted twice."""
    (times,) = aligned(record(BEGINS, first_step(), MARKS))
    first, second = ((c.start_ms, c.end_ms) for c in times.collectives[:2])
    assert covered([second, first]) == pytest.approx(31)
    assert covered([first, first]) == pytest.approx(20)
    assert covered([]) == 0
