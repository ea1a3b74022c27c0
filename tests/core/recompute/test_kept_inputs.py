"""The saved inputs of recomputed parts: which, where, and when they are copied back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.comm import CommLog
from isp.core.comm.host_offload import HostMemory, HostMemoryError, Stored
from isp.core.recompute.recompute import Recomputer
from isp.core.rng import RngStatesTracker, RngStream
from tests.planner.live import LiveBytes

CPU = torch.device("cpu")
ROWS, WIDTH = 64, 16
X_BYTES = ROWS * WIDTH * 8


class Net:
    """Parts in a row, with dropout from two streams, that record when they run."""

    def __init__(self, parts: int, *, rows: int = ROWS, **options: Any) -> None:
        self.tracker = RngStatesTracker(CPU)
        self.tracker.add(RngStream.EQUAL, 3)
        self.log = CommLog()
        self.log.collect()
        self.host = HostMemory(CPU, log=self.log)
        if options.pop("offload", False):
            options["offload_to"] = self.host
        self.recompute = Recomputer(tracker=self.tracker, **options)
        generator = torch.Generator().manual_seed(1)
        shape = (parts, WIDTH, WIDTH)
        self.weights = torch.randn(shape, dtype=torch.float64, generator=generator)
        self.weights.requires_grad_()
        self.x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
        self.events: list[str] = []
        self.fails_in = -1

    def part(self, number: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            self.events.append(str(number) + ("" if torch.is_grad_enabled() else "'"))
            if number == self.fails_in:
                raise RuntimeError("as the test wants")
            inner = F.dropout(torch.tanh(x @ self.weights[number]), 0.2)
            with self.tracker.fork(RngStream.EQUAL):
                return x + F.dropout(inner, 0.3)

        return run

    def forward(self) -> Tensor:
        x = self.x
        self.recompute.begin()
        for number in range(len(self.weights)):
            x = self.recompute(self.part(number), x)
        return x.sum()

    def step(self, fails_in: int) -> None:
        """Run a step whose backward fails in that part, if its forward has not."""
        y = self.forward()
        self.fails_in = fails_in
        y.backward()

    def gradient(self, passes: int = 1) -> Tensor:
        torch.manual_seed(0)
        y = self.forward()
        for remaining in reversed(range(passes)):
            torch.rand(3)  # numbers drawn in between must not change the recomputation
            y.backward(retain_graph=remaining > 0)
        assert self.weights.grad is not None
        return self.weights.grad


WAYS = {
    "offloaded": {"offload": True},
    "segments": {"segment": 3},
    "segments, offloaded": {"segment": 3, "offload": True},
}


def test_parts_are_recomputed_once_in_order() -> None:
    """Catches a part computed once too often: the last of a segment needs no second forward."""
    net = Net(5, segment=3)
    net.gradient()
    forward, backward = net.events[:5], net.events[5:]
    assert forward == ["0", "1", "2", "3", "4"]
    assert backward == ["3'", "4", "3", "0'", "1'", "2", "1", "0"]


def _copies(net: Net) -> list[str]:
    return [transfer.kind for transfer in net.log.take()]


def test_an_input_is_copied_back_one_part_ahead() -> None:
    """Catches inputs copied at their use, all at once, or in the order of the forward."""
    net = Net(4, offload=True)
    y = net.forward()
    assert _copies(net) == ["to_host"] * 4
    numbers: list[tuple[int, str]] = []
    inputs = net.recompute._host
    assert inputs is not None
    store = {id(ref()): number for number, ref in enumerate(inputs._passes[0])}
    fetch = Stored.fetch

    def noted(stored: Stored) -> None:
        if stored._here is None:
            numbers.append((store[id(stored)], net.events[-1]))
        fetch(stored)

    with mock.patch.object(Stored, "fetch", noted):
        y.backward()
    # The input of part 3 is on the device; that of part 2 is copied before part 3 reruns, etc.
    assert numbers == [(2, "3"), (1, "3"), (0, "2")]
    assert _copies(net) == ["from_host"] * 3


def test_inputs_of_several_forwards_are_copied_back_in_order() -> None:
    """Catches the last micro-batch copied back first; pipelines run backward in forward order."""
    net = Net(3, offload=True)
    torch.manual_seed(0)
    losses = [net.forward() for _ in range(3)]
    net.log.take()
    losses[0].backward()
    # All of the first forward, as none stayed on the device, and ahead the last of the second.
    assert _copies(net) == ["from_host"] * 4
    losses[1].backward()
    assert _copies(net) == ["from_host"] * 2  # the last one of the third forward is on the device
    losses[2].backward()
    assert _copies(net) == ["from_host"] * 2
    expected = Net(3)
    torch.manual_seed(0)
    for loss in [expected.forward() for _ in range(3)]:
        loss.backward()
    assert net.weights.grad is not None
    assert expected.weights.grad is not None
    assert torch.equal(net.weights.grad, expected.weights.grad)
    assert net.host.leased_bytes == 0
    assert net.host.reserved_bytes == 3 * 3 * X_BYTES


def _inputs_at_the_peak(parts: int, way: dict[str, Any]) -> float:
    """Return the device memory for inputs at the peak of a second step, in inputs of one part."""
    net = Net(parts, rows=16 * ROWS, **way)
    net.gradient()
    known = [net.weights, net.weights.grad, net.x]
    with LiveBytes() as live:
        net.gradient()
    weights = sum(x.nbytes for x in known if x is not None)
    return (live.peak - weights - net.host.reserved_bytes) / (16 * X_BYTES)


def test_offloaded_inputs_do_not_stay_on_the_device() -> None:
    """Catches other references to inputs, so that device memory grows with the number of parts."""
    few, many = 4, 9
    snapshots = (many - few) * 0.2  # where the random numbers of each part begin
    kept = {n: _inputs_at_the_peak(n, {}) for n in (few, many)}
    assert many - few <= kept[many] - kept[few] <= many - few + snapshots
    off = {n: _inputs_at_the_peak(n, {"offload": True}) for n in (few, many)}
    assert off[many] - off[few] <= snapshots
    segments = {n * n: _inputs_at_the_peak(n * n, {"segment": n}) for n in (2, 3)}
    assert segments[many] - segments[few] <= 2 + snapshots, "twice the root"
    both = {n: _inputs_at_the_peak(n, {"segment": 3, "offload": True}) for n in (9, 12)}
    assert both[12] - both[9] <= snapshots


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_frees_all_buffers(way: str) -> None:
    """Catches a cycle, or a list, that keeps tensors of a failed step or brings them into the
    next.
    """
    net = Net(6, **WAYS[way])
    streams = net.tracker.get_states()
    for fails_in, backward in ((4, False), (1, True)):
        gc.collect()
        gc.disable()
        try:
            net.fails_in = -1 if backward else fails_in
            with pytest.raises(RuntimeError, match="as the test wants"):
                net.step(fails_in)
            net.weights.grad = None
            assert net.host.leased_bytes == 0
        finally:
            gc.enable()
    net.fails_in = -1
    net.tracker.set_states(streams)
    assert torch.equal(net.gradient(), Net(6).gradient())


def test_too_little_host_memory_names_the_key() -> None:
    """Catches the allocator's message, which does not say what to change."""
    net = Net(2, offload=True)
    with (
        mock.patch("torch.zeros", side_effect=RuntimeError("no room\nat all")),
        pytest.raises(HostMemoryError, match=r"_offload: .*: no room: use .*_offload=false$"),
    ):
        net.forward()
    assert net.host.leased_bytes == net.host.reserved_bytes == 0


def test_parts_with_other_inputs_have_no_segments() -> None:
    """Catches an input recomputed from the wrong part."""
    net = Net(3, segment=2)
    x = net.recompute(net.part(0), net.x)
    with pytest.raises(ValueError, match=r"model.checkpoint_segment .* model.checkpoint_segment=0"):
        net.recompute(net.part(1), 2 * x)
