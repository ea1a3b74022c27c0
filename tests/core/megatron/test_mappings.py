"""The mappings against a plain model of each transfer, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp import tensor_parallel as tp
from isp.core.comm import Channel
from tests.ranks import run_ranks

WORLD = 4
UNEVEN = (3, 0, 1, 5)
"""One rank has nothing."""


class Move(Enum):
    """The operations on a tensor, named as torch's collectives."""

    STAY = auto()
    ALL_REDUCE = auto()
    SPLIT = auto()
    GATHER = auto()
    REDUCE_SCATTER = auto()
    EXCHANGE = auto()


class Case(NamedTuple):
    """A public mapping, and its transfers as the public surface declares them."""

    function: Callable[..., Tensor]
    forward: Move
    backward: Move
    dim: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012
    uneven: str = ""
    """The option that takes the sizes of uneven parts."""


def _case(name: str, moves: str, dim: int = 0, *, uneven: str = "", **options: Any) -> Case:
    forward, backward = (Move[word] for word in moves.split())
    options |= {"dim": 1} if dim == 1 else {}
    return Case(getattr(tp, name), forward, backward, dim, options, uneven)


OUT, IN = "output_split_sizes", "input_split_sizes"
TO_TOKENS = "scatter_to_sequence_parallel_region"
ALL_TOKENS = "gather_from_sequence_parallel_region"
SUM_TOKENS = "reduce_scatter_to_sequence_parallel_region"
# fmt: off
CASES = {
    "copy": _case("copy_to_tensor_model_parallel_region", "STAY ALL_REDUCE"),
    "reduce": _case("reduce_from_tensor_model_parallel_region", "ALL_REDUCE STAY"),
    "scatter features": _case("scatter_to_tensor_model_parallel_region", "SPLIT GATHER", -1),
    "gather features": _case("gather_from_tensor_model_parallel_region", "GATHER SPLIT", -1),
    "scatter tokens": _case(TO_TOKENS, "SPLIT GATHER"),
    "scatter tokens of dim 1": _case(TO_TOKENS, "SPLIT GATHER", 1),
    "gather tokens": _case(ALL_TOKENS, "GATHER REDUCE_SCATTER", uneven=OUT),
    "gather tokens of dim 1": _case(ALL_TOKENS, "GATHER REDUCE_SCATTER", 1, uneven=OUT),
    "gather tokens, replicated":
        _case(ALL_TOKENS, "GATHER SPLIT", uneven=OUT, tensor_parallel_output_grad=False),
    "reduce-scatter tokens": _case(SUM_TOKENS, "REDUCE_SCATTER GATHER", uneven=IN),
    "reduce-scatter tokens of dim 1":
        _case(SUM_TOKENS, "REDUCE_SCATTER GATHER", 1, uneven=IN),
    "gather features, partial":
        _case("all_gather_last_dim_from_tensor_parallel_region", "GATHER REDUCE_SCATTER", -1),
    "reduce-scatter features":
        _case("reduce_scatter_last_dim_to_tensor_parallel_region", "REDUCE_SCATTER GATHER", -1),
    "all-to-all": _case("all_to_all", "EXCHANGE EXCHANGE"),
}
# fmt: on


def _model(move: Move, xs: Sequence[Tensor], dim: int, parts: Sequence[int]) -> list[Tensor]:
    """Return the result on each rank if rank r has xs[r]; `parts`: the lengths of the cut dim."""
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
    """Return each rank's input: small whole numbers, whose float64 sums are exact."""
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
    # A rank's tensor need not be flat.
    mine = torch.full((2, 4), float(rank))
    expected = torch.arange(WORLD).repeat_interleave(8).float()
    assert torch.equal(tp.gather_split_1d_tensor(mine, channel), expected)


def _run(rank: int) -> None:
    """Run all checks in one set of ranks."""
    for name, case in CASES.items():
        for uneven in (False, True) if case.uneven else (False,):
            for strided in (False, True):
                try:
                    _check_case(case, rank, uneven=uneven, strided=strided)
                except Exception as error:
                    raise AssertionError(f"{name}, {uneven=}, {strided=}: {error}") from error
    _check_uneven_all_to_all(rank)
    _check_flat_pieces(rank)


def test_mappings_match_their_models() -> None:
    """Catches a wrong transfer, sum, order or cut, forward or backward; a changed input; a transfer
    too many; sizes not swapped in backward; flat pieces out of order.
    """
    run_ranks(WORLD, _run)


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
        with pytest.raises(ValueError, match=r"divisible|cut|do not fit") as raised:
            fails()
        messages.append(str(raised.value))
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = tp.gather_from_tensor_model_parallel_region(x, channel).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()
    return messages


def test_sizes_that_do_not_fit_and_second_derivatives_are_refused() -> None:
    """Catches a dim silently truncated, and second derivatives that would not be summed over the
    group.
    """
    messages = run_ranks(WORLD, _misuse)[0]
    assert (
        "dim -1 of shape (4, 7) is not divisible by the 4 ranks of the tensor group" in messages[0]
    )
    assert "their sum must be 8" in messages[2]
    assert "[2, 2, 2] do not fit: rank" in messages[3]


@pytest.mark.parametrize("name", CASES)
def test_a_group_of_one_costs_nothing(name: str) -> None:
    """Catches a copy, an autograd node or a transfer where no transfer is needed."""
    channel = Channel.solo()
    channel.log.collect()
    x = torch.randn(2, 4, 6, requires_grad=True)
    assert CASES[name].function(x, channel, **CASES[name].options) is x
    assert channel.log.take() == []
