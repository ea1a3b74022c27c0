"""The mappings against a plain model of each move: forward, backward, and the two as duals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp import tensor_parallel as tp
from isp.comm import Channel
from tests.ranks import run_ranks

WORLD = 4
UNEVEN = (3, 0, 1, 5)
"""One rank has nothing."""


class Move(Enum):
    """What becomes of a tensor; the words of torch's collectives."""

    STAY = auto()
    ALL_REDUCE = auto()
    SPLIT = auto()
    GATHER = auto()
    REDUCE_SCATTER = auto()
    EXCHANGE = auto()


class Case(NamedTuple):
    """A public mapping, and what the surface says of it."""

    function: Callable[..., Tensor]
    forward: Move
    backward: Move
    dim: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012
    uneven: str = ""
    """The option that takes the sizes of uneven parts."""


CASES = {
    "copy": Case(tp.copy_to_tensor_model_parallel_region, Move.STAY, Move.ALL_REDUCE),
    "reduce": Case(tp.reduce_from_tensor_model_parallel_region, Move.ALL_REDUCE, Move.STAY),
    "scatter features": Case(
        tp.scatter_to_tensor_model_parallel_region, Move.SPLIT, Move.GATHER, -1
    ),
    "gather features": Case(
        tp.gather_from_tensor_model_parallel_region, Move.GATHER, Move.SPLIT, -1
    ),
    "scatter tokens": Case(tp.scatter_to_sequence_parallel_region, Move.SPLIT, Move.GATHER),
    "scatter tokens of dim 1": Case(
        tp.scatter_to_sequence_parallel_region, Move.SPLIT, Move.GATHER, 1, {"dim": 1}
    ),
    "gather tokens": Case(
        tp.gather_from_sequence_parallel_region,
        Move.GATHER,
        Move.REDUCE_SCATTER,
        uneven="output_split_sizes",
    ),
    "gather tokens of dim 1": Case(
        tp.gather_from_sequence_parallel_region,
        Move.GATHER,
        Move.REDUCE_SCATTER,
        1,
        {"dim": 1},
        uneven="output_split_sizes",
    ),
    "gather tokens, replicated": Case(
        tp.gather_from_sequence_parallel_region,
        Move.GATHER,
        Move.SPLIT,
        options={"tensor_parallel_output_grad": False},
        uneven="output_split_sizes",
    ),
    "reduce-scatter tokens": Case(
        tp.reduce_scatter_to_sequence_parallel_region,
        Move.REDUCE_SCATTER,
        Move.GATHER,
        uneven="input_split_sizes",
    ),
    "reduce-scatter tokens of dim 1": Case(
        tp.reduce_scatter_to_sequence_parallel_region,
        Move.REDUCE_SCATTER,
        Move.GATHER,
        1,
        {"dim": 1},
        uneven="input_split_sizes",
    ),
    "gather features, partial": Case(
        tp.all_gather_last_dim_from_tensor_parallel_region, Move.GATHER, Move.REDUCE_SCATTER, -1
    ),
    "reduce-scatter features": Case(
        tp.reduce_scatter_last_dim_to_tensor_parallel_region, Move.REDUCE_SCATTER, Move.GATHER, -1
    ),
    "all-to-all": Case(tp.all_to_all, Move.EXCHANGE, Move.EXCHANGE),
}

DUALS = [
    ("copy", "reduce"),
    ("scatter features", "gather features"),
    ("scatter tokens", "gather tokens, replicated"),
    ("gather tokens", "reduce-scatter tokens"),
    ("gather features, partial", "reduce-scatter features"),
    ("all-to-all", "all-to-all"),
]


def _model(move: Move, xs: Sequence[Tensor], dim: int, parts: Sequence[int]) -> list[Tensor]:
    """What each rank gets if rank r has xs[r]; parts are the lengths of the cut dim."""
    match move:
        case Move.STAY:
            return list(xs)
        case Move.ALL_REDUCE:
            return [torch.stack(list(xs)).sum(0)] * len(xs)
        case Move.SPLIT:
            return [x.split(list(parts), dim)[r] for r, x in enumerate(xs)]
        case Move.GATHER:
            return [torch.cat(list(xs), dim)] * len(xs)
        case Move.REDUCE_SCATTER:
            return list(torch.stack(list(xs)).sum(0).split(list(parts), dim))
        case Move.EXCHANGE:
            pieces = [x.split(list(parts), dim) for x in xs]
            return [torch.cat([of[r] for of in pieces], dim) for r in range(len(xs))]


def _inputs(move: Move, dim: int, parts: Sequence[int], seed: int) -> list[Tensor]:
    """Each rank's tensor for a move: small whole numbers, whose float64 sums are exact."""
    whole = move in (Move.SPLIT, Move.REDUCE_SCATTER, Move.EXCHANGE)
    generator = torch.Generator().manual_seed(seed)
    xs = []
    for part in parts:
        shape = [3, 5, 4]
        shape[dim] = sum(parts) if whole else part
        if move in (Move.STAY, Move.ALL_REDUCE):
            shape = [3, 5, 4]
        xs.append(torch.randint(-9, 9, shape, generator=generator).double())
    return xs


def _non_contiguous(x: Tensor) -> Tensor:
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not strided.is_contiguous() or x.numel() < 2
    return strided


def _check_case(case: Case, rank: int, *, uneven: bool, strided: bool) -> None:
    channel = Channel(dist.group.WORLD)
    parts = UNEVEN if uneven else (2,) * WORLD
    options = {**case.options, **({case.uneven: list(parts)} if uneven else {})}
    lay = _non_contiguous if strided else torch.Tensor.contiguous
    xs = [lay(x) for x in _inputs(case.forward, case.dim, parts, seed=1)]
    ys = _model(case.forward, xs, case.dim, parts)
    dys = [lay(torch.full_like(y, float(r + 1)).cumsum(-1)) for r, y in enumerate(ys)]
    dxs = _model(case.backward, dys, case.dim, parts)
    x, dy = xs[rank].clone(memory_format=torch.preserve_format).requires_grad_(), dys[rank]
    dy_before = dy.clone()
    channel.log.collect()
    y = case.function(x, channel, **options)
    there = [t.kind for t in channel.log.take()]
    (dx,) = torch.autograd.grad(y, x, dy)
    back = [t.kind for t in channel.log.take()]
    assert torch.equal(y, ys[rank])
    assert torch.equal(dx, dxs[rank])
    assert torch.equal(x, xs[rank])
    assert torch.equal(dy, dy_before)
    assert len(there) == (case.forward not in (Move.STAY, Move.SPLIT))
    assert len(back) == (case.backward not in (Move.STAY, Move.SPLIT))
    if case.forward is not Move.STAY and x.numel():
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def _check_dual(name: str, partner: str, rank: int) -> None:
    """Forward of one is backward of the other, on the same data."""
    channel, case, dual = Channel(dist.group.WORLD), CASES[name], CASES[partner]
    parts = (2,) * WORLD
    x = _inputs(case.forward, case.dim, parts, seed=2)[rank].requires_grad_()
    y = case.function(x, channel, **case.options)
    dy = _inputs(case.backward, case.dim, parts, seed=3)[rank]
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, dual.function(dy, channel, **dual.options))


def _check_uneven_all_to_all(rank: int) -> None:
    channel = Channel(dist.group.WORLD)
    counts = [[(3 * i + 2 * j) % 4 for j in range(WORLD)] for i in range(WORLD)]
    xs = [100.0 * i + torch.arange(sum(counts[i]) * 2).double().view(-1, 2) for i in range(WORLD)]
    pieces = [x.split(row) for x, row in zip(xs, counts, strict=True)]
    sent, received = counts[rank], [row[rank] for row in counts]
    x = xs[rank].clone().requires_grad_()
    y = tp.all_to_all(x, channel, output_split_sizes=received, input_split_sizes=sent)
    assert torch.equal(y, torch.cat([of[rank] for of in pieces]))
    (dx,) = torch.autograd.grad(y, x, y.detach() * 2)
    assert torch.equal(dx, x * 2)


def _check_flat_pieces(rank: int) -> None:
    channel = Channel(dist.group.WORLD)
    whole = torch.arange(6 * WORLD).view(2, 3 * WORLD).double()
    for x in (whole, whole.T):
        chunk = tp.split_tensor_into_1d_equal_chunks(x, channel)
        assert torch.equal(chunk, x.flatten().chunk(WORLD)[rank])
        assert torch.equal(tp.gather_split_1d_tensor(chunk, channel), x.flatten())
    view = tp.split_tensor_into_1d_equal_chunks(whole, channel)
    copy = tp.split_tensor_into_1d_equal_chunks(whole, channel, new_buffer=True)
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert copy.untyped_storage().nbytes() == whole.untyped_storage().nbytes() // WORLD
    # What a rank gives need not be flat.
    mine = torch.full((2, 4), float(rank))
    expected = torch.arange(WORLD).repeat_interleave(8).float()
    assert torch.equal(tp.gather_split_1d_tensor(mine, channel), expected)


def _run(rank: int) -> dict[str, int]:
    """All checks in one set of ranks; how many of each there were."""
    done = {"moves": 0, "duals": 0}
    for name, case in CASES.items():
        for uneven in (False, True) if case.uneven else (False,):
            for strided in (False, True):
                try:
                    _check_case(case, rank, uneven=uneven, strided=strided)
                except Exception as error:
                    raise AssertionError(f"{name}, {uneven=}, {strided=}: {error}") from error
                done["moves"] += 1
    for pair in DUALS:
        for name, partner in (pair, pair[::-1]):
            _check_dual(name, partner, rank)
            done["duals"] += 1
    _check_uneven_all_to_all(rank)
    _check_flat_pieces(rank)
    return done


def test_mappings_on_ranks() -> None:
    """Catches a wrong move, sum, order or cut, forward or backward; duals that are not; writing to
    an input; a transfer too many; sizes not swapped on the way back; flat pieces out of order.
    """
    for done in run_ranks(WORLD, _run):
        assert done == {"moves": 2 * 14 + 2 * 5, "duals": 2 * len(DUALS)}


def test_every_mapping_has_a_dual() -> None:
    """Catches a mapping without a dual, and one that is not checked against it."""
    moves = {(case.forward, case.backward) for case in CASES.values()}
    assert {pair[::-1] for pair in moves} == moves
    assert {name for pair in DUALS for name in pair} == {n for n, c in CASES.items() if c.dim != 1}


def _misuse(rank: int) -> list[str]:
    channel = Channel(dist.group.WORLD, name="tensor")
    messages = []
    for fails in (
        lambda: tp.scatter_to_tensor_model_parallel_region(torch.zeros(4, 7), channel),
        lambda: tp.reduce_scatter_to_sequence_parallel_region(torch.zeros(7), channel),
        lambda: tp.reduce_scatter_to_sequence_parallel_region(
            torch.zeros(8), channel, input_split_sizes=[1, 2, 3, 3]
        ),
        lambda: tp.gather_from_sequence_parallel_region(
            torch.zeros(2), channel, output_split_sizes=[2, 2, 2]
        ),
        lambda: tp.all_to_all(torch.zeros(6), channel),
        lambda: tp.split_tensor_into_1d_equal_chunks(torch.zeros(3, 3), channel),
    ):
        with pytest.raises(ValueError, match=r"divide|cut|are not those") as raised:
            fails()
        messages.append(str(raised.value))
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = tp.gather_from_tensor_model_parallel_region(x, channel).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()
    return messages


def test_sizes_that_do_not_fit_and_second_derivatives_are_refused() -> None:
    """Catches a dim cut short in silence, and second derivatives that would miss the group."""
    messages = run_ranks(WORLD, _misuse)[0]
    assert (
        "dim -1 of shape (4, 7) does not divide by the 4 ranks of the tensor group" in messages[0]
    )
    assert "their sum must be 8" in messages[2]
    assert "[2, 2, 2] are not those of 4 ranks" in messages[3]


@pytest.mark.parametrize("name", CASES)
def test_a_group_of_one_costs_nothing(name: str) -> None:
    """Catches a copy, a node of the graph or a transfer where nothing has to move."""
    channel = Channel.solo()
    channel.log.collect()
    x = torch.randn(2, 4, 6, requires_grad=True)
    assert CASES[name].function(x, channel, **CASES[name].options) is x
    assert channel.log.take() == []
