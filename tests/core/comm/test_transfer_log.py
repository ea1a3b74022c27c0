"""The log of transfers: what it keeps and times for its observers, and no cost without them."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from isp.core.comm import Channel, CommLog, TimedTransfer, streams
from isp.core.comm.tag import Tag
from isp.core.comm.transfer_log import Observer
from tests.ranks import run_ranks
from tests.streams import Device

CPU = torch.device("cpu")


class _Seen(list[TimedTransfer], Observer):
    """An observer that keeps all transfers."""

    def launched(self, transfer: TimedTransfer) -> None:
        self.append(transfer)

    def entered(self, phase: str, block: str) -> None:
        pass


def _moves(channel: Channel, number: int) -> None:
    for _ in range(number):
        channel.all_reduce(torch.ones(4), tag=Tag(tensor="x")).wait()


def _unasked(rank: int) -> None:
    channel = Channel(dist.group.WORLD)
    _moves(channel, 3)
    assert channel.log.transfers == []
    with pytest.raises(RuntimeError, match=r"call collect\(\)"):
        channel.log.take()
    channel.log.collect()
    _moves(channel, 2)
    assert [t.kind for t in channel.log.take()] == ["all_reduce"] * 2
    assert channel.log.take() == channel.log.transfers == []


def test_a_log_without_observers_keeps_nothing() -> None:
    """Catches a user's training loop whose memory grows with every collective."""
    run_ranks(2, _unasked)


def _ended_without_a_wait(rank: int, listens: bool) -> bool:
    channel, seen = Channel(dist.group.WORLD), _Seen()
    channel.log.observer, channel.log.listens = seen, listens
    pending = channel.all_reduce(torch.ones(4))
    _moves(channel, 1)  # after the all-reduce
    for _ in range(100 if listens else 10):
        time.sleep(0.01)
        if seen[0].ended:
            break
    ended = seen[0].ended > 0
    pending.wait()
    assert seen[0].ended > 0
    return ended


def test_gloo_threads_call_python_only_if_the_log_listens() -> None:
    """Catches a script aborted at exit because a transfer in flight calls into Python."""
    for listens in (True, False):
        assert run_ranks(2, _ended_without_a_wait, listens) == [listens] * 2


def _untimed(rank: int) -> None:
    with Device() as device:
        channel, seen = Channel(dist.group.WORLD), _Seen()
        channel.log.collect()  # collecting counts, but does not time
        _moves(channel, 3)
        assert (device.timed, device.made) == ([], [])
        assert [t.exposed for t in channel.log.take()] == [0, 0, 0]
        other = Channel(dist.group.WORLD)
        other.log.watch(seen, CPU)
        _moves(other, 2)
        other.log.settle()
        assert all(t.ended > t.launched > 0 for t in seen)
        other.log.unwatch()
        timed = len(device.timed)
        _moves(other, 2)
        assert len(device.timed) == timed
        assert len(seen) == 2


def test_a_device_is_timed_only_with_an_observer() -> None:
    """Catches CUDA events and streams that slow every collective, and timing that continues
    afterwards.
    """
    run_ranks(2, _untimed)


def _side_by_side(rank: int) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    with Device() as device:
        log, side = CommLog(), streams.new(CPU)
        log.collect(CPU)
        long, short = (Channel(group, log=log) for group in groups)
        del device.timed[:]
        first = long.all_reduce(torch.ones(4), tag=Tag(tensor="long"))
        second = short.all_reduce(torch.ones(4), tag=Tag(tensor="short"))
        _, end, _, short_end = device.timed
        [wire] = [s for s in end.counts if s.name == "wire 1"]
        assert wire not in short_end.counts, "the end of the other channel's transfer"
        with streams.on(side):
            first.wait()
        second.wait()
        waited = {t.label: t for t in log.take_waited()}
        assert waited["long"].exposed == 0 < waited["short"].exposed
        assert waited["long"].launched < waited["short"].launched


def test_each_channel_has_its_own_times() -> None:
    """Catches a transfer that seems to end with a longer, earlier one of another group, and the
    wait of a stream without compute counted as exposed.
    """
    run_ranks(2, _side_by_side)


def _under_way(rank: int) -> None:
    with Device() as device:
        channel = Channel(dist.group.WORLD)
        channel.log.collect(CPU)
        _moves(channel, 1)
        for event, milliseconds in zip(device.timed[-4:], (0, 2, 1, 4), strict=True):
            event.at = device.timed[0].at + milliseconds / 1e3
        device.timed[-1].over = False
        assert channel.log.take_waited() == []
        device.timed[-1].over = True
        [transfer] = channel.log.take_waited()
        assert transfer.exposed == pytest.approx(3e-3)
        assert transfer.duration == pytest.approx(2e-3)
        assert channel.log.take() == []


def test_the_host_does_not_block_on_waits_of_the_device() -> None:
    """Catches a host that blocks in each step until the weights of the next step have arrived."""
    run_ranks(2, _under_way)


def test_times_stay_precise_after_hours() -> None:
    """Catches times measured from the first event in float32, which have an error of 4 ms after 10
    h.
    """
    with Device():
        log = CommLog()
        log.collect(CPU)
        assert log.clock is not None
        begin = log.clock.mark().at
        times = []
        for step in range(600):
            event = log.clock.mark()
            event.at = begin + 60.1 * step
            times.append(log.clock(event))
    assert [b - a for a, b in pairwise(times)] == pytest.approx([60.1] * 599, abs=1e-5)
