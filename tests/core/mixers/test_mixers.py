"""Convolutions and scans on 1 to 4 ranks against token by token loops on one: every gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel
from isp.core.mesh.sequence_split import SequenceSplit, Slice
from isp.core.mixers.convolution import convolve
from isp.core.mixers.placement import Placement, rank_slices
from isp.core.mixers.scan import scan_by_heads, scan_by_state
from isp.core.mixers.state_space import Mamba2
from tests.core.mixers import reference
from tests.ranks import run_ranks

TOLERANCE = 1e-12  # float64, sums in another order

STRADDLING = (1, 2, 23, 3, 1, 17, 9, 8)


KINDS = {
    "delta": reference.delta_kind(6, 2),
    "delta, fewer heads than ranks": reference.delta_kind(3, 3),
    "kda": reference.delta_kind(4, 4, per_feature=True),
    "mamba2": reference.mamba2_kind(6, 2),
    "mamba2, one head": reference.mamba2_kind(1, 1),
    "selective": reference.selective_kind(5),
}

PLANS: dict[str, Callable[[int], SequenceSplit]] = {
    "contiguous": lambda p: _contiguous(STRADDLING, [64 // p] * p),
    "uneven": lambda p: _contiguous(STRADDLING, [*range(p - 1), 64 - sum(range(p - 1))]),
    "one document": lambda p: _contiguous((64,), [64 // p] * p),
    "whole documents": lambda p: _contiguous((64 // p,) * p, [64 // p] * p),
    "heads x context": lambda p: _of_context(STRADDLING, p),
    "scattered": lambda p: _scattered(STRADDLING, p),
}


def _contiguous(lengths: tuple[int, ...], sizes: list[int]) -> SequenceSplit:
    ends = [0, *accumulate(sizes)]
    starts = [0, *accumulate(lengths)]
    cut = [
        [
            Slice(d, max(0, a - s), min(n, b - s))
            for d, (n, s) in enumerate(zip(lengths, starts, strict=False))
            if max(0, a - s) < min(n, b - s)
        ]
        for a, b in pairwise(ends)
    ]
    return SequenceSplit(lengths, tuple(map(tuple, cut)))


def _of_context(lengths: tuple[int, ...], size: int) -> SequenceSplit:
    """Return the split of a run with 2 context ranks and `size` / 2 head ranks, or of one rank."""
    context = _Sized(2 if size % 2 == 0 else 1)
    ranks = SequenceRanks(head=_Sized(size // context.size), context=context)  # type: ignore[arg-type]
    bounds = tuple(accumulate(lengths, initial=0))
    return (
        rank_slices(ranks, size, (1, sum(lengths)), bounds)
        if size > 1
        else _contiguous(lengths, [64])
    )


class _Sized(NamedTuple):
    size: int


def _scattered(lengths: tuple[int, ...], size: int) -> SequenceSplit:
    slices = [Slice(d, b, min(b + 3, n)) for d, n in enumerate(lengths) for b in range(0, n, 3)]
    return SequenceSplit(lengths, tuple(tuple(slices[rank::size]) for rank in range(size)))


@cache  # filled before ranks fork, so that they inherit it
def _plain(name: str, lengths: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    kind = KINDS[name]
    xs = kind.tensors(sum(lengths), 3)
    number, constants = kind.number, xs[kind.number :]
    out = reference.by_document(lambda *a: kind.plain(*a, *constants), lengths, *xs[:number])
    out.backward(_seed(out))
    return out.detach(), [x.grad for x in xs]  # type: ignore[misc]


def _seed(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)


def _on_rank(rank: int, cases: list[tuple[str, str, str]], size: int) -> list[Any]:
    channel = Channel(dist.group.WORLD, name="tensor")
    found = []
    for kind_name, plan_name, way in cases:
        kind, plan = KINDS[kind_name], PLANS[plan_name](size)
        placement = Placement(channel, plan)
        number, xs = kind.number, kind.tensors(sum(plan.lengths), 3)
        own = torch.from_numpy(plan.order).split(placement.sizes)[rank]
        mine = [x.detach()[own].requires_grad_() for x in xs[:number]]
        inputs = kind.inputs([*mine, *xs[number:]])
        scan = scan_by_heads if way == "heads" else scan_by_state
        out = scan(kind.recurrence, inputs, placement)
        expected, gradients = _plain(kind_name, plan.lengths)
        out.backward(_seed(expected)[own])
        errors = [_far(out.detach(), expected[own])]
        errors += [_far(x.grad, g[own]) for x, g in zip(mine, gradients, strict=False)]
        for x, g in zip(xs[number:], gradients[number:], strict=True):
            total = torch.zeros_like(x) if x.grad is None else x.grad
            dist.all_reduce(total)
            errors.append(_far(total, g))
        found.append(max(errors))
    return found


def _far(x: Tensor | None, y: Tensor) -> float:
    assert x is not None
    return float((x - y).abs().max() / y.abs().max().clamp(min=1)) if y.numel() else 0.0


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_scans_equal_a_loop_over_tokens(size: int) -> None:
    """Catches wrong states, states carried across documents, lost gradients, a rank that hangs."""
    cases = [
        (kind, plan, way)
        for kind in KINDS
        for plan in PLANS
        for way in ("heads", "state")
        if 64 % size == 0 or plan in ("uneven", "scattered")
    ]
    for kind, plan, _ in cases:
        _plain(kind, PLANS[plan](size).lengths)
    for errors in run_ranks(size, _on_rank, cases, size):
        wrong = {c: e for c, e in zip(cases, errors, strict=True) if not e <= TOLERANCE}
        assert wrong == {}


CONVOLUTIONS = {"K=4": (4, 1, True), "K=2, no bias": (2, 1, False), "K=3, dilated": (3, 5, True)}
"""Taps, dilation, bias."""


def _convolved_on_rank(rank: int, cases: list[tuple[str, str]], size: int) -> list[float]:
    channel = Channel(dist.group.WORLD, name="tensor")
    found = []
    for name, plan_name in cases:
        (taps, dilation, has_bias), plan = CONVOLUTIONS[name], PLANS[plan_name](size)
        placement = Placement(channel, plan)
        generator = torch.Generator().manual_seed(5)
        shapes = (sum(plan.lengths), 5), (5, taps), (5,)
        x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        run = partial(
            reference.convolution,
            weight=leaves[1],
            bias=leaves[2] if has_bias else None,
            dilation=dilation,
        )
        expected = reference.by_document(run, plan.lengths, leaves[0])
        expected.backward(_seed(expected))
        own = torch.from_numpy(plan.order).split(placement.sizes)[rank]
        mine = [t.requires_grad_() for t in (x[own], weight, bias)]
        out = convolve(mine[0], mine[1], mine[2] if has_bias else None, placement, dilation)
        out.backward(_seed(expected)[own])
        errors = [
            _far(out.detach(), expected.detach()[own]),
            _far(mine[0].grad, leaves[0].grad[own]),
        ]
        for t, leaf in list(zip(mine, leaves, strict=True))[1 : 2 + has_bias]:
            dist.all_reduce(t.grad)
            errors.append(_far(t.grad, leaf.grad))
        found.append(max(errors))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_convolutions_equal_a_loop_over_tokens(size: int) -> None:
    """Catches a halo of another document or of too few tokens, and one without a gradient."""
    cases = [(c, plan) for c in CONVOLUTIONS for plan in PLANS]
    for errors in run_ranks(size, _convolved_on_rank, cases, size):
        assert {c: e for c, e in zip(cases, errors, strict=True) if not e <= TOLERANCE} == {}


@pytest.mark.parametrize("name", ["delta", "kda", "mamba2"])
def test_weak_decays_after_strong_ones_keep_their_precision(name: str) -> None:
    """Catches float32 decays computed as differences of sums, where 1e5 and 1e-3 leave 0."""
    kind, xs = KINDS[name], [x.detach().float() for x in KINDS[name].tensors(64, 3)]
    strong = torch.arange(64).view(-1, *(1 for _ in xs[1].shape[1:])) % 32 == 5
    time = torch.where(strong, 1e5, 1e-3).expand_as(xs[1])
    recurrence, xs[1] = kind.recurrence, -time
    if name == "mamba2":
        recurrence, xs[1] = Mamba2(dt_softplus=False), time
        xs[4], xs[6] = torch.full_like(xs[4], -1), torch.zeros_like(xs[6])  # A, the bias of dt

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        of_dtype = [x.to(dtype) for x in xs]
        inputs = kind.inputs(of_dtype)
        out, states = recurrence.scan(inputs, [64], None)
        summary = recurrence.summary(inputs, [64])[0]
        return out, states, recurrence.after(summary, torch.ones_like(states[0]), inputs)

    for single, double in zip(run(torch.float32), run(torch.float64), strict=True):
        assert _far(single.double(), double) < 1e-5


@pytest.mark.parametrize("name", ["delta", "kda", "mamba2", "selective"])
def test_backward_of_a_scan_is_linear_in_its_length(name: str) -> None:
    """Catches chunks sliced one by one, each of which has a gradient as long as the sequence."""
    kind = KINDS[name]

    def taken(tokens: int) -> int:
        inputs = kind.inputs(kind.tensors(tokens, 3))
        lengths = [tokens // 2] * 2
        out, _ = kind.recurrence.scan(inputs, lengths, None)
        found, rest = set(), [out.grad_fn]
        while rest:
            if (node := rest.pop()) is not None and node not in found:
                found.add(node)
                rest += [following for following, _ in node.next_functions]
        return sum(node.name().startswith(("Select", "Slice")) for node in found)

    assert taken(512) == taken(256)


def _kda_by_heads_on_rank(rank: int, size: int) -> list[bool]:
    sizes = [*range(size - 1), 64 - sum(range(size - 1))]
    placement = Placement(
        Channel(dist.group.WORLD, name="tensor"), _contiguous((16, 32, 16), sizes)
    )
    kind = reference.delta_kind(4, 4, key=16, value=16, per_feature=True)
    whole, own = kind.tensors(64, 3), slice(*placement.ends[rank : rank + 2])
    mine = [x.detach()[own].requires_grad_() for x in whole]
    inputs = kind.inputs(whole)
    expected, _ = kind.recurrence.scan(inputs, placement.split.lengths, None)
    out = scan_by_heads(kind.recurrence, kind.inputs(mine), placement)
    expected.backward(_seed(expected))
    out.backward(_seed(expected)[own])
    pairs = [
        (out, expected[own]),
        *((x.grad, y.grad[own]) for x, y in zip(mine, whole, strict=True)),
    ]
    return [torch.equal(x, y) for x, y in pairs]


@pytest.mark.parametrize("size", [3, 4])
def test_kda_split_by_heads_has_the_bits_of_one_rank(size: int) -> None:
    """Catches sums over ranks, and other chunks, where each head is independent.

    Document lengths fill whole vectors, since torch rounds the remainder in another way.
    """
    for alike in run_ranks(size, _kda_by_heads_on_rank, size):
        assert alike == [True] * 6
