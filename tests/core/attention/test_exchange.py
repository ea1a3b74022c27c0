"""The all-to-all exchanges of attention, against slices of one tensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.attention.all_to_all import (
    Cut,
    Exchange,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    launch,
)
from isp.core.comm import Channel
from isp.core.internevo import SeqAllToAll
from tests.ranks import run_ranks

SHAPES = [((1, 8, 8, 3), 2, 1), ((2, 8, 4, 3), 2, 1), ((2, 8, 4, 3), 1, 2), ((8, 4), -1, 0)]


def _channel(world: int) -> Channel:
    return Channel(dist.group.WORLD) if world > 1 else Channel.solo()


def _run_shapes(rank: int, world: int) -> list[bool]:
    channel = _channel(world)
    channel.log.collect()
    good = []
    for shape, scatter, gather in SHAPES:
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)

        def part(dim: int, whole: Tensor = whole) -> Tensor:
            return whole.chunk(world, dim)[rank].clone()

        x = part(gather).requires_grad_()
        out = SeqAllToAll.apply(channel, x, scatter, gather)
        (grad,) = torch.autograd.grad(out, x, part(scatter) * 2, retain_graph=True)
        (ones,) = torch.autograd.grad(out.sum(), x)
        later = SeqAllToAll.launch(channel, x, scatter, gather).wait()
        good += [torch.equal(out, part(scatter)), torch.equal(grad, x * 2), torch.equal(later, out)]
        good.append(torch.equal(ones, torch.ones_like(x)))
        good.append(len(channel.log.take()) == (4 if world > 1 else 0))
    return good


@pytest.mark.parametrize("world", [1, 2, 4])
def test_scatter_and_gather_any_two_dims(world: int) -> None:
    """Catches swapped dims, mixed batches, more than one message a tensor, and the gradient of a
    sum, which is one number expanded, sent without being made contiguous.
    """
    for good in run_ranks(world, _run_shapes, world):
        assert good == [True] * 5 * len(SHAPES)


def _run_sp2hp(rank: int, world: int) -> list[bool]:
    channel = _channel(world)
    whole = torch.randn(8, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = whole.chunk(world, 0)[rank].clone().requires_grad_()
    hidden = all_to_all_sp2hp(tokens, channel)
    back = all_to_all_hp2sp(hidden, channel)
    (grad,) = torch.autograd.grad(back, tokens, tokens.detach() * 3)
    return [
        torch.equal(hidden, whole.chunk(world, -1)[rank]),
        torch.equal(back, tokens),
        torch.equal(grad, tokens * 3),
    ]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sp2hp_and_hp2sp_are_inverses(world: int) -> None:
    """Catches sp2hp and hp2sp that do not invert each other, forward or backward."""
    for good in run_ranks(world, _run_sp2hp, world):
        assert good == [True] * 3


def _run_replicated(rank: int, world: int) -> tuple[bool, float]:
    """Check <out, dy> == <x, dx> over all ranks, for ranges that overlap and leave one empty."""
    channel = _channel(world)
    ranges = (range(3), range(2, 4), range(2, 5), range(5, 5))
    exchange = Exchange(channel, (Cut(2, ranges), Cut(2, ranges)), Cut.even(1, 8, world))
    torch.manual_seed(rank)
    xs = [torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    ys = launch(exchange, xs)()
    dys = [torch.randn_like(y) for y in ys]
    dxs = torch.autograd.grad(ys, xs, dys)
    inner = [sum((a * b).sum() for a, b in pairs) for pairs in (zip(ys, dys), zip(xs, dxs))]  # noqa: B905
    total = channel.all_reduce(torch.stack([torch.as_tensor(i) for i in inner])).wait()
    shapes = all(y.shape == (2, 8, len(ranges[rank]), 3) for y in ys)
    return shapes, float((total[0] - total[1]).abs() / total[0].abs())


def test_gradients_of_replicated_slices_are_summed() -> None:
    """Catches a backward that is not the transpose of the forward, where slices overlap."""
    for shapes, error in run_ranks(4, _run_replicated, 4):
        assert shapes
        assert error < 1e-12


def _run_errors(rank: int, world: int) -> list[str]:
    channel = _channel(world)
    messages = []
    for scatter, gather in ((2, 1), (1, 1)):
        try:
            SeqAllToAll.apply(channel, torch.zeros(1, 4, 3), scatter, gather)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_sizes_that_do_not_divide_are_refused() -> None:
    """Catches a dim that would silently be truncated."""
    for messages in run_ranks(2, _run_errors, 2):
        assert "dim 2 of 3 is not divisible by 2 ranks: pad it to 4" in messages[0]
        assert "the same dim 1" in messages[1]


def _run_failure(rank: int, world: int) -> list[str]:
    dist.barrier()  # both are connected
    if rank == 1:
        dist.destroy_process_group()
        return []  # ends before its part of the exchange
    exchange = Exchange(_channel(world), (Cut.even(2, 4, world),), Cut.even(1, 4, world))
    arrive = launch(exchange, (torch.randn(1, 2, 4, 3, requires_grad=True),))
    raised = []
    for _ in range(2):
        try:
            arrive()
        except (RuntimeError, AssertionError) as error:
            raised.append(type(error).__name__)
    return raised


def test_a_failed_exchange_stays_failed() -> None:
    """Catches a failed transfer whose second wait returns uninitialized memory."""
    assert run_ranks(2, _run_failure, 2, timeout_seconds=30)[0] == [
        "CollectiveError",
        "AssertionError",
    ]


def _differentiate_twice(rank: int, world: int) -> list[str]:
    channel, said = _channel(world), []
    for exchange in (SeqAllToAll.apply, lambda *args: SeqAllToAll.launch(*args).wait()):
        x = torch.ones(world, 2 * world, requires_grad=True)
        y = exchange(channel, x, 1, 0).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        try:
            dx.sum().backward()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_second_derivative_is_refused() -> None:
    """Catches gradients of gradients that silently stop at the exchange."""
    for said in run_ranks(2, _differentiate_twice, 2):
        assert len(said) == 2
        assert all("differentiate twice" in words for words in said)
