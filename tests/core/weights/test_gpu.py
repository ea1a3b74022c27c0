"""Streams, buffers and dtypes of the communicator on a GPU.

One GPU has no link to another, so most tests use a channel that copies on a stream of its own, as
NCCL does, after kernels that sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.comm import Channel, Pending
from isp.core.comm.tag import UNNAMED, Tag
from isp.core.mesh.config import LaunchPoint, OverlapUnit, Prefetch
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.uses import sequential_actions
from tests.core.weights.echo import Net, echo_layers, leased_bytes

pytestmark = pytest.mark.gpu

LONG_CYCLES = 1_000_000_000
"""About half a second at 2 GHz."""
SHORT_CYCLES = 2_000_000
"""About a millisecond: longer than the host takes to queue a layer."""
ONE = sequential_actions(1)


class WireChannel(Channel):
    """Rank 1 of two with equal data; transfers run on a stream of their own.

    As with NCCL, a transfer waits for the stream that launched it, and a wait makes the current
    stream wait. Rank 1, because the last rank has the padded shards.
    """

    def __init__(self, *, cycles: int = 0) -> None:
        super().__init__(None, name="weight")
        self.size, self.rank = 2, 1
        self.cycles = cycles
        self.stream = torch.cuda.Stream()
        self.done: dict[str, torch.cuda.Event] = {}
        """Events at the end of the last transfer of each label."""

    def all_gather_into(self, out: Tensor, x: Tensor, *, tag: Tag = UNNAMED) -> Pending:
        with self._transfer(str(tag)):
            out.view(2, -1).copy_(x.view(-1))
        return self._pending(str(tag), out, x)

    def reduce_scatter_into(
        self, out: Tensor, x: Tensor, *, received: Tensor | None = None, tag: Tag = UNNAMED
    ) -> Pending:
        with self._transfer(str(tag)):
            out.copy_(x.view(2, *out.shape)[1]).mul_(2)
        return self._pending(str(tag), out, x)

    @contextmanager
    def _transfer(self, label: str) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.cycles:
                torch.cuda._sleep(self.cycles)
            yield
            self.done[label] = torch.cuda.Event()
            self.done[label].record()

    def _pending(self, label: str, out: Tensor, x: Tensor) -> Pending:
        event = self.done[label]

        def wait() -> Tensor:
            event.wait()
            return out

        return Pending(wait, keep=(x,))


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def gpu_net(
    channel: Channel,
    *,
    dtype: torch.dtype = torch.float64,
    overlap: bool = True,
    pool: bool = True,
    launch: LaunchPoint = LaunchPoint.WO,
    unit: OverlapUnit = OverlapUnit.LAYER,
    num_recomputed: int = 0,
    vocab_size: int = 8,
) -> tuple[Net, ISPCommunicator]:
    """Return a declared net on the GPU, with biases and poisoned buffers."""
    communicator = ISPCommunicator(
        channel,
        ISPCommModelConfig(device=gpu()),
        prefetch=Prefetch(unit=unit, launch=launch, overlap=overlap),
        enable_memory_pool=pool,
        poison=True,
    )
    layers = echo_layers(communicator, channel, dtype=dtype, device=gpu())
    net = Net(layers, bias=True, num_recomputed=num_recomputed, vocab_size=vocab_size)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.25)
    communicator.declare([net.declared()])
    return net, communicator


def ids() -> Tensor:
    """Return tokens; the copy to the GPU blocks, so it happens before other work is queued."""
    return torch.tensor([[1, 2, 3, 1], [4, 5, 6, 0]], device=gpu())


def make_compute_slow(net: Net) -> None:
    """Add a sleep before each layer in forward and backward, so that host and link run ahead."""

    def sleep(*_: object) -> None:
        torch.cuda._sleep(SHORT_CYCLES)

    def sleep_in_backward(_: nn.Module, __: object, y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(sleep)

    for block in net.blocks:
        for layer in (block.wqkv, block.wo):
            layer.register_forward_pre_hook(sleep)
            layer.register_forward_hook(sleep_in_backward)
    net.head.register_forward_pre_hook(sleep)


@torch.no_grad()
def update(net: Net) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter -= 0.01 * parameter.grad
        parameter.grad = None


def three_steps(net: Net, communicator: ISPCommunicator, micro_batches: int = 2) -> list[Tensor]:
    """Return outputs and weights of three steps that contain no host synchronization."""
    outputs, tokens = [], ids()
    for _ in range(3):
        communicator.begin(sequential_actions(micro_batches))
        for m in range(micro_batches):
            outputs.append(net(tokens.roll(m)))
            outputs[-1].square().sum().backward()
        communicator.finish()
        update(net)
    torch.cuda.synchronize()
    assert leased_bytes(communicator) == 0
    return [t.detach().cpu() for t in (*outputs, *net.parameters())]


@pytest.mark.parametrize(
    ("pool", "launch"), [(False, LaunchPoint.WO), (True, LaunchPoint.WQKV)], ids=str
)
def test_a_gather_does_not_wait_for_queued_compute(pool: bool, launch: LaunchPoint) -> None:
    """Catches gathers queued after compute, which would not overlap with it.

    Without the pool, or at a launch point where no buffer has been freed yet, a gather needs
    nothing from compute: those of block b are launched before the compute of block a begins.
    """
    channel = WireChannel()
    net, communicator = gpu_net(channel, pool=pool, launch=launch)
    three_steps(net, communicator)  # everything is loaded and allocated
    communicator.pool.reset_lazy_pools()
    tokens, slept = ids(), torch.cuda.Event()
    torch.cuda._sleep(1)
    communicator.begin(ONE)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    slept.record()
    net.blocks[0](net.embedding(tokens))
    gathered = channel.done["b.wo.weight"]
    gathered.synchronize()
    assert not slept.query(), "the gather was over only after the compute that was queued before it"
    torch.cuda.synchronize()
    communicator.drain()


@pytest.mark.parametrize("unit", OverlapUnit)
@pytest.mark.parametrize("num_recomputed", [0, 2])
@pytest.mark.parametrize("pool", [True, False])
def test_buffers_outlive_their_readers(unit: OverlapUnit, num_recomputed: int, pool: bool) -> None:
    """Catches a freed buffer overwritten by the next gather, or by NaN, while kernels still read
    it.

    Compute sleeps before every layer and the link does not, so each buffer is gathered into long
    before its last reader has run. With 7 rows of vocabulary, padded shards are sent as well.
    """
    wanted_net, plain = gpu_net(WireChannel(), overlap=False, vocab_size=7)
    expected = three_steps(wanted_net, plain)
    assert all(t.isfinite().all() for t in expected)
    net, communicator = gpu_net(
        WireChannel(), unit=unit, num_recomputed=num_recomputed, pool=pool, vocab_size=7
    )
    make_compute_slow(net)
    found = three_steps(net, communicator)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if pool:
        assert communicator.pool.reuses > 0


def publish_late(net: Net) -> torch.cuda.Event:
    """Double all weights on another stream after a long sleep; record an event at the end."""
    stream = torch.cuda.Stream()
    done = torch.cuda.Event()
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES // 4)
        for parameter in net.parameters():
            parameter.mul_(2)
        done.record()
    return done


@pytest.mark.parametrize("ask", [True, False])
def test_gathers_wait_for_the_stream_that_updates_the_weights(ask: bool) -> None:
    """Catches a prerequisite for which compute waits but gathers do not."""
    net, communicator = gpu_net(WireChannel())
    three_steps(net, communicator)
    other, tokens = gpu_net(WireChannel())[0], ids()
    with torch.no_grad():
        for p, q in zip(other.parameters(), net.parameters(), strict=True):
            p.copy_(2 * q)
        expected = other(tokens)
    torch.cuda.synchronize()
    published = publish_late(net)
    if ask:
        communicator.register_prerequisite_for_forward_prefetch_hooks(lambda _: published.wait())
    communicator.begin(ONE)
    with torch.no_grad():
        found = net(tokens)
    torch.cuda.synchronize()
    assert torch.equal(found, expected) is ask


@pytest.mark.parametrize("announced", [False, True])
def test_gathers_wait_for_weights_written_by_compute(announced: bool) -> None:
    """Catches a gather at the time of use, of changed or undeclared weights, that runs too
    early.
    """
    net, communicator = gpu_net(WireChannel())
    stranger = echo_layers(communicator, WireChannel(), device=gpu()).column(4, (4,), std=0.5)
    nn.init.ones_(stranger.weight)
    x, tokens = torch.ones(1, 4, dtype=torch.float64, device=gpu()), ids()
    if announced:
        communicator.begin(ONE)
    torch.cuda._sleep(LONG_CYCLES // 4)
    with torch.no_grad():
        for parameter in (*net.parameters(), stranger.weight):
            parameter.mul_(2)  # queued after the sleep, on the compute stream
        also = stranger(x)
        found = net(tokens)
    torch.cuda.synchronize()
    full = stranger.weight.detach().repeat(2, 1)
    assert torch.equal(also, F.linear(x, full))
    with torch.no_grad():
        torch.testing.assert_close(found, net(tokens), rtol=0, atol=0)


def test_a_step_has_no_host_synchronization() -> None:
    """Catches any host wait for the device, after which the host no longer runs ahead."""
    tokens = ids()
    for recomputed in (0, 3):
        net, communicator = gpu_net(WireChannel(), num_recomputed=recomputed)
        three_steps(net, communicator)
        torch.cuda.set_sync_debug_mode("error")
        try:
            communicator.begin(sequential_actions(2))
            for _ in range(2):
                net(tokens).square().sum().backward()
            communicator.finish()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_reset_lazy_pools_waits_for_the_readers() -> None:
    """Catches freed buffers returned to the allocator, and reused by others, while they are
    read.
    """
    net, communicator = gpu_net(WireChannel())
    make_compute_slow(net)
    tokens = ids()
    expected = net.plainly(tokens).detach()
    communicator.begin(ONE)
    with torch.no_grad():
        found = net(tokens)
    communicator.drain()
    communicator.pool.reset_lazy_pools()
    with torch.cuda.stream(communicator._gatherer._stream):  # where the buffers were allocated
        others = [torch.empty(4, 4, dtype=torch.float64, device=gpu()) for _ in range(64)]
        for other in others:
            other.fill_(torch.nan)
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
