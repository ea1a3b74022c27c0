"""Recomputed parts against plain ones, bit for bit with dropout, and what they save."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from isp.core.comm import Channel
from isp.tensor_parallel import (
    CheckpointWithoutOutput,
    RngStream,
    checkpoint,
    model_parallel_manual_seed,
)
from tests.ranks import run_ranks
from tests.saved import saved_bytes

CPU = torch.device("cpu")
ROWS, WIDTH = 8, 16
X_BYTES = ROWS * WIDTH * 8
W_BYTES = WIDTH * WIDTH * 8

Forward = Callable[[Tensor], Tensor]


class Net:
    """A part with dropout from three streams, and a consumer of its output."""

    def __init__(self, rank: int = 0) -> None:
        self.tracker = model_parallel_manual_seed(3, tensor_rank=rank, device=CPU)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
        shape = (2, WIDTH, WIDTH)
        self.w, self.v = torch.randn(shape, dtype=torch.float64, generator=generator).unbind()
        self.rank = rank

    def part(self, x: Tensor) -> Tensor:
        """Save several tensors, and draw from every stream."""
        x = F.dropout(F.gelu(x @ self.v), 0.3)
        with self.tracker.fork(RngStream.EQUAL):
            x = F.dropout(x.sin(), 0.3)
        with self.tracker.fork():
            return F.dropout(x, 0.3)

    def run(self, forward: Forward, *, passes: int = 1) -> tuple[list[Tensor], int]:
        """Return output, gradients and final stream states; and the bytes saved."""
        torch.manual_seed(self.rank)
        leaves = [t.clone().requires_grad_() for t in (self.x, self.w, self.v)]
        x, self.w, self.v = leaves
        y, saved = saved_bytes(lambda: forward(x))
        streams = [*self.tracker.get_states().values(), torch.get_rng_state()]
        found = [y]
        for remaining in reversed(range(passes)):
            torch.rand(3)  # numbers drawn in between must not change the recomputation
            y.square().sum().backward(retain_graph=remaining > 0)
            found += [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
        torch.set_rng_state(streams[-1])
        assert all(
            torch.equal(a, b)
            for a, b in zip(self.tracker.get_states().values(), streams, strict=False)
        ), "backward has moved a stream"
        return [t.detach() for t in (*found, *streams)], saved


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def plain(net: Net) -> Forward:
    return lambda x: net.part(x) @ net.w


def checkpointed(net: Net, channel: Channel | None = None) -> Forward:
    return lambda x: checkpoint(
        lambda x: net.part(x) @ net.w, channel is not None, x, tracker=net.tracker, channel=channel
    )


def without_output(net: Net, **options: Any) -> Forward:
    def forward(x: Tensor) -> Tensor:
        part = CheckpointWithoutOutput(tracker=net.tracker, **options)
        y = part.checkpoint(net.part, x)
        z = y @ net.w
        part.discard_output_and_register_recompute(z)
        assert (y.untyped_storage().nbytes() > 0) == net.tracker.replays
        return z

    return forward


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("how", [checkpointed, without_output])
def test_a_recompute_repeats_the_forward(how: Callable[[Net], Forward], passes: int) -> None:
    """Catches other random numbers in the recomputation, streams left in another state, and
    contexts that only work for the first of two backward passes.
    """
    net, other = Net(), Net()
    expected, _ = net.run(plain(net), passes=passes)
    found, _ = other.run(how(other), passes=passes)
    assert same(found, expected)


def test_a_part_inside_a_fork_draws_the_same_numbers_again() -> None:
    """Catches a recomputation, which runs outside of that fork, with other random numbers."""

    def in_fork(net: Net, forward: Forward) -> Forward:
        def run(x: Tensor) -> Tensor:
            with net.tracker.fork(RngStream.EQUAL):
                return F.dropout(forward(x), 0.5)

        return run

    net = Net()
    expected, _ = net.run(in_fork(net, plain(net)))
    for how in (checkpointed, without_output):
        other = Net()
        found, _ = other.run(in_fork(other, how(other)))
        assert same(found, expected)


def test_a_recomputed_part_saves_only_its_input() -> None:
    """Catches memory that is claimed to be saved but is not."""
    saved = {}
    for name, how in {"all": plain, "checkpoint": checkpointed, "part": without_output}.items():
        net = Net()
        saved[name] = net.run(how(net))[1]
    assert saved["all"] >= 7 * X_BYTES + 2 * W_BYTES
    assert saved["checkpoint"] == X_BYTES, "the argument"
    assert saved["part"] == X_BYTES + W_BYTES, "the argument, and the consumer's weight"


def _distributed(rank: int) -> tuple[int, list[str]]:
    channel = Channel(dist.group.WORLD)
    channel.log.collect()
    net, other, whole = Net(rank), Net(rank), Net(rank)
    expected, _ = net.run(plain(net))
    found, saved = other.run(checkpointed(other, channel))
    assert same(found, expected)
    assert same(whole.run(checkpointed(whole))[0], expected)
    kinds = [t.kind for t in channel.log.take()]

    # No other reference keeps the whole input of the second part alive.
    x = net.x.clone().requires_grad_()
    middle = checkpointed(net, channel)(x)
    end = checkpointed(net, channel)(middle.tanh())
    inputs = weakref.ref(middle)
    del middle
    gone = inputs() is None
    end.sum().backward()
    assert gone
    assert x.grad is not None
    return saved, kinds


def test_each_rank_saves_a_part_of_the_input() -> None:
    """Catches an input that is saved whole, restored wrongly, or gathered more than once."""
    for saved, kinds in run_ranks(4, _distributed):
        assert saved == X_BYTES // 4
        assert kinds == ["all_gather"]


def _odd(rank: int) -> str:
    net, channel = Net(rank), Channel(dist.group.WORLD)
    with pytest.raises(ValueError, match="is not divisible") as raised:
        checkpoint(net.part, True, net.x[:7, :15], tracker=net.tracker, channel=channel)
    return str(raised.value)


def test_an_input_that_cannot_be_distributed_is_refused() -> None:
    """Catches elements lost where the input does not divide over the ranks."""
    assert run_ranks(2, _odd) == ["105 is not divisible by 2"] * 2


class Phases:
    """Records when a recomputation is entered and left."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def announce(self) -> Iterator[None]:
        self.events.append("recompute")
        try:
            yield
        finally:
            self.events.append("end")

    def noted(self, net: Net) -> Forward:
        def part(x: Tensor) -> Tensor:
            self.events.append("part")
            return net.part(x)

        return part


@pytest.mark.parametrize("whole", [True, False])
def test_a_recompute_is_announced_to_the_communicator(whole: bool) -> None:
    """Catches a communicator that takes a recomputation for a forward, and parts computed too
    often.
    """
    net, phases = Net(), Phases()
    part = phases.noted(net)

    def forward(x: Tensor) -> Tensor:
        options = {"tracker": net.tracker, "announce": phases.announce}
        if whole:
            return checkpoint(part, False, x, **options) @ net.w
        between = CheckpointWithoutOutput(**options)
        z = between.checkpoint(part, x) @ net.w
        between.discard_output_and_register_recompute(z)
        return z

    net.run(forward, passes=2)
    assert phases.events == ["part", *(["recompute", "part", "end"] * 2)]


class SavesViews(torch.autograd.Function):
    """x [N, M], w [O, M] -> x w^T; saves x in two halves, as grouped linears do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(*x.tensor_split(2), w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        first, second, w = ctx.saved_tensors
        return dy @ w, dy.T @ torch.cat((first, second))


def test_views_of_the_output_are_restored_with_it() -> None:
    """Catches a restored output whose views still refer to the freed memory."""
    found = []
    for drop in (False, True):
        net = Net()

        def forward(x: Tensor, net: Net = net, drop: bool = drop) -> Tensor:
            part = CheckpointWithoutOutput(tracker=net.tracker)
            y = part.checkpoint(net.part, x) if drop else net.part(x)
            z: Tensor = SavesViews.apply(y, net.w)
            if drop:
                part.discard_output_and_register_recompute(z)
            return z

        found.append(net.run(forward))
    assert same(found[0][0], found[1][0])
    assert found[1][1] == X_BYTES + W_BYTES


def test_outputs_that_share_memory_are_restored() -> None:
    """Catches outputs that are views of one tensor and are restored over each other."""
    found = []
    for drop in (False, True):
        net = Net()

        def forward(x: Tensor, net: Net = net, drop: bool = drop) -> Tensor:
            def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                a, b = net.part(x).chunk(2, -1)
                return a, b, b.exp()

            part = CheckpointWithoutOutput(tracker=net.tracker)
            a, b, c = part.checkpoint(split, x) if drop else split(x)
            z = (a * b * c) @ net.w[: WIDTH // 2]
            if drop:
                part.discard_output_and_register_recompute(z)
            return z

        found.append(net.run(forward))
    assert same(found[0][0], found[1][0])


def test_misuse_is_refused() -> None:
    """Catches an argument whose memory is freed, and an output that nothing would restore."""
    net = Net()
    x = net.x.clone().requires_grad_()
    fresh = CheckpointWithoutOutput(tracker=net.tracker)
    with pytest.raises(RuntimeError, match="no output yet"):
        fresh.discard_output_and_register_recompute(x)
    with pytest.raises(ValueError, match="shares its memory with an argument"):
        fresh.checkpoint(lambda x: x.view(-1), x)
    y = fresh.checkpoint(net.part, x)
    with pytest.raises(ValueError, match="requires no gradient"):
        fresh.discard_output_and_register_recompute(y.detach())
    with pytest.raises(RuntimeError, match="used once"):
        fresh.checkpoint(net.part, x)
    assert y.untyped_storage().nbytes() == X_BYTES
    z = y @ net.w
    fresh.discard_output_and_register_recompute(z)
    with pytest.raises(RuntimeError, match="dropped already"):
        fresh.discard_output_and_register_recompute(z)


@pytest.mark.parametrize("backward", [True, False])
def test_a_step_leaves_no_reference_cycle(backward: bool) -> None:
    """Catches a reference cycle through the autograd graph, which no collector can see."""
    net = Net()
    x = net.x.clone().requires_grad_()
    z = without_output(net)(x)
    if backward:
        z.sum().backward()
    gone = weakref.ref(x)
    del x, z
    assert gone() is None


def test_a_failed_recompute_restores_the_streams() -> None:
    """Catches a tracker left in the state of a failed recomputation."""
    net = Net()

    def fails_later(x: Tensor) -> Tensor:
        y = net.part(x).exp()
        if failing:
            raise ZeroDivisionError
        return y.exp()

    failing = False
    y = checkpoint(fails_later, False, net.x.clone().requires_grad_(), tracker=net.tracker)
    failing, before = True, net.tracker.snapshot()
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    after = net.tracker.snapshot()
    assert torch.equal(after.generator, before.generator)
    assert all(torch.equal(s, after.streams[name]) for name, s in before.streams.items())


def test_a_recomputed_part_may_be_nested() -> None:
    """Catches an output dropped in a recomputation, which backward would then read."""
    net, other = Net(), Net()
    expected, _ = net.run(lambda x: plain(net)(x).sin(), passes=2)

    def inside(x: Tensor) -> Tensor:
        return without_output(other)(x).sin()  # saves more, so the recompute goes on past the part

    found, saved = other.run(
        lambda x: checkpoint(inside, False, x, tracker=other.tracker), passes=2
    )
    assert same(found, expected)
    assert saved == X_BYTES
