"""Main gradients: both ways of delivery, when they are final, and when they are reduced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isp.core.comm import Channel, CommLog
from isp.core.mesh import Axis
from isp.core.mesh.layout import ParameterLayout
from isp.core.optim.main_grads import MainGradients
from isp.core.weights.sharded_parameter import ShardedParameter
from tests.ranks import run_ranks

SOLO = {axis: Channel.solo(axis) for axis in Axis}


def make(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, axis: Axis = Axis.DATA
) -> list[ShardedParameter]:
    return [
        ShardedParameter(
            f"p{i}",
            nn.Parameter(torch.arange(1.0, 1 + torch.Size(s).numel()).view(s).to(dtype)),
            ParameterLayout(global_shape=s, reduce_over=axis),
        )
        for i, s in enumerate(shapes)
    ]


class Deferred(torch.autograd.Function):
    """w * x whose gradient of w is promised for later, with None returned to autograd."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, gradients: MainGradients, due: list) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.gradients, ctx.due = gradients, due
        return x * w

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, w = ctx.saved_tensors
        ctx.gradients.promise(w)
        ctx.due.append((w, x * dy))
        return dy * w, None, None, None


def test_gradients_of_micro_batches_and_shared_weights_are_summed():
    """Catches a gradient that overwrites an earlier one, and one that stays in p.grad."""
    items = make((3,), (2, 2))
    gradients = MainGradients(items, SOLO)
    (a, b), c = (item.parameter for item in items), 5.0
    for step in range(2):
        gradients.zero()
        for scale in (1.0, 2.0):
            (a.sum() * scale + (a * a).sum() + b.sum() * c).backward()
            assert a.grad is None, step
        gradients.reduce()
        assert torch.equal(gradients.grad(a), 3 + 4 * a.detach())
        assert torch.equal(gradients.grad(b), torch.full_like(b, 2 * c))


@pytest.mark.parametrize("last", [False, True])
def test_promised_gradients_may_arrive_after_backward(last: bool):
    """Catches a hook that takes None for "no gradient" while one is promised."""
    items = make((3,))
    w = items[0].parameter
    gradients = MainGradients(items, SOLO)
    gradients.zero()
    due: list[tuple[nn.Parameter, Tensor]] = []
    if last:
        gradients.expect_last()
    x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    y = Deferred.apply(Deferred.apply(x, w, gradients, due), w, gradients, due)
    (y + w).sum().backward()
    with pytest.raises(RuntimeError, match=r"not delivered.*p0"):
        gradients.reduce()
    for parameter, gradient in due:
        gradients.add(parameter, gradient)
    gradients.reduce()
    assert len(due) == 2
    assert torch.equal(gradients.grad(w), (2 * x * w + 1).detach())


def test_a_promised_gradient_is_received_in_the_main_gradient():
    """Catches gradients added meanwhile that are lost, overwritten, or summed in the parameter's
    dtype.
    """
    items = make((1, 1), dtype=torch.bfloat16)
    w, gradients = items[0].parameter, MainGradients(items, SOLO)
    assert gradients.promise(w, torch.bfloat16) is None, "main gradients are wider"
    place = gradients.promise(w, torch.float32)
    assert place is not None
    assert gradients.promise(w, torch.float32) is None, "received already"
    place.fill_(torch.nan)  # half of it has arrived, say
    gradients.add(w, torch.ones(1, 1))
    for scale in (256.0, *[0.5] * 8):
        (w * scale).sum().backward()
        assert w.grad is None
    dy, x = torch.full((1, 1), 2.0), torch.full((1, 1), 3.0)
    gradients.add_product(w, dy, x)  # keeps no promise
    gradients.withdraw(w)
    with pytest.raises(AssertionError, match="a gradient of p0 is in flight"):
        gradients.grad(w)
    gradients.add(w, place.fill_(1000.0))
    gradients.reduce()
    assert gradients.grad(w).item() == 1000 + 1 + 256 + 4 + 6

    gradients.zero()
    assert gradients.promise(w, torch.float32) is not None
    w.sum().backward()
    gradients.withdraw(w)
    with pytest.raises(RuntimeError, match=r"not delivered.*p0"):
        gradients.reduce()
    gradients.abandon()
    gradients.zero()
    w.sum().backward()
    gradients.reduce()
    assert gradients.grad(w).item() == 1


def test_a_parameter_without_a_gradient_has_zero():
    """Catches the gradient of the last step where this step has none."""
    items = make((3,), (3,))
    gradients = MainGradients(items, SOLO)
    for used in (0, 1):
        gradients.zero()
        items[used].parameter.sum().backward()
        gradients.reduce()
        assert gradients.grad(items[used].parameter).eq(1).all()
        assert gradients.grad(items[1 - used].parameter).eq(0).all()


def test_late_gradients_raise():
    """Catches gradients added to a bucket that has already been reduced."""
    items = make((3,))
    w = items[0].parameter
    gradients = MainGradients(items, SOLO)
    gradients.expect_last()
    w.sum().backward()
    for late in (
        lambda: w.sum().backward(),
        lambda: gradients.promise(w),
        lambda: gradients.add(w, w.detach()),
    ):
        with pytest.raises(RuntimeError, match="p0 came after its last one"):
            late()
    gradients.reduce()
    with pytest.raises(RuntimeError, match="p0 came after its last one"):
        w.sum().backward()
    with pytest.raises(RuntimeError, match="reduced already"):
        gradients.reduce()
    gradients.zero()
    w.sum().backward()
    gradients.reduce()
    assert gradients.grad(w).eq(1).all()


def test_no_sync_is_restored_after_an_exception():
    """Catches no_sync left on after its body raises."""
    items = make((3,))
    gradients = MainGradients(items, SOLO)
    w = items[0].parameter
    gradients.expect_last()

    def fails() -> None:
        with gradients.no_sync():
            w.sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    w.sum().backward()
    with pytest.raises(RuntimeError, match="after its last one"):
        w.sum().backward()


def test_frozen_repeated_and_foreign_parameters_are_refused():
    """Catches parameters without a gradient, listed twice, or on another device that are
    accepted.
    """
    frozen, shared, wrong = make((3,)), make((3,)), make((3,))
    frozen[0].parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="p0 requires no gradient"):
        MainGradients(frozen, SOLO)
    with pytest.raises(ValueError, match="q is also p0: pass a shared parameter once"):
        MainGradients([shared[0], replace(shared[0], name="q")], SOLO)
    layout = ParameterLayout(global_shape=(4,), reduce_over=Axis.DATA)
    with pytest.raises(ValueError, match=r"p0 has shape \(3,\), but its ParameterLayout .* \(4,\)"):
        MainGradients([replace(wrong[0], layout=layout)], SOLO)
    with pytest.raises(ValueError, match="bucket_bytes=-1"):
        MainGradients(wrong, SOLO, bucket_bytes=-1)


def _reduce_on(rank: int, bucket_bytes: int, overlap: bool) -> tuple[list[list], list[str]]:
    """Return gradients and launches of a step; the loss of rank 1 does not reach parameter p1."""
    log = CommLog()
    stage = Channel(torch.distributed.group.WORLD, name="stage", log=log)
    items = make((3, 2), (5,), (2, 2)) + [
        replace(n, name="norm") for n in make((3,), axis=Axis.STAGE)
    ]
    channels = {Axis.DATA: Channel(torch.distributed.group.WORLD, log=log), Axis.STAGE: stage}
    gradients = MainGradients(items, channels, bucket_bytes=bucket_bytes)
    for step in range(2):
        log.collect()
        gradients.zero()
        for last in (False, True):
            if last and overlap:
                gradients.expect_last()
            scale = (rank + 1) * (step + 1)
            used = [n.parameter for n in items if rank == 0 or n.name != "p1"]
            torch.stack([(p * p).sum() * scale for p in used]).sum().backward()
        gradients.reduce()
    return [gradients.grad(n.parameter).tolist() for n in items], [t.label for t in log.take()]


@pytest.mark.parametrize(
    ("bucket_bytes", "launches"),
    [
        (0, ["norm .. norm", "p2 .. p2", "p1 .. p1", "p0 .. p0"]),
        (40, ["p2 .. p1", "p0 .. p0", "norm .. norm"]),
        (10**6, ["norm .. norm", "p2 .. p0"]),
    ],
)
def test_ranks_reduce_in_the_same_order(bucket_bytes: int, launches: list[str]):
    """Catches ranks that launch in the order of their own readiness, and overlap that changes
    sums.
    """
    overlapped = run_ranks(2, _reduce_on, bucket_bytes, True)
    plain = run_ranks(2, _reduce_on, bucket_bytes, False)
    for (gradients, labels), (reference, plain_labels) in zip(overlapped, plain, strict=True):
        assert labels == plain_labels
        assert sorted(labels) == sorted(f"gradients {x}" for x in launches)
        assert gradients == reference
    assert overlapped[0][1] == overlapped[1][1]
    for i, item in enumerate(make((3, 2), (5,), (2, 2), (3,))):
        ranks = 1 if i == 1 else 3  # rank 0 once, rank 1 twice
        assert overlapped[0][0][i] == (8 * ranks * item.parameter).tolist()


def _scattered(rank: int, bucket_bytes: int) -> tuple[list[Any], list[list[int]], list[tuple]]:
    """Return whole sums, shapes of this rank's rows, and the transfers of each of two equal
    steps.
    """
    log = CommLog()
    ranks = Channel(torch.distributed.group.WORLD, log=log)
    items, channels = make(*ROWS), {Axis.DATA: ranks, Axis.WEIGHT_DATA: ranks}
    gradients = MainGradients(items, channels, bucket_bytes=bucket_bytes, rows_of=ranks)
    for _ in range(2):
        log.collect()
        gradients.zero()
        gradients.expect_last()
        torch.stack(
            [(n.parameter * n.parameter).sum() * (rank + 1) for n in items]
        ).sum().backward()
        gradients.reduce()
        moved = [(t.kind, t.sent_bytes) for t in log.take()]
    own = [list(gradients.summed(n.parameter).shape) for n in items]
    return [gradients.whole(n.parameter).tolist() for n in items], own, moved


ROWS = ((17, 2), (9,), (1, 2), (4, 2))
"""Shapes, of which two ranks have 9 and 8, 5 and 4, 1 and 0, and 2 rows each."""


@pytest.mark.parametrize(
    ("bucket_bytes", "moved"),
    [
        (0, ["rows 4", "all 2", "rows 5", "rows 18"]),
        (100, ["rows 9", "rows 18", "all 2"]),
        (10**6, ["all 2", "rows 27"]),
    ],
)
def test_replicas_get_the_sums_of_their_own_rows(bucket_bytes: int, moved: list[str]):
    """Catches rows of another rank or parameter, padding taken for a sum, and sums sent to all
    ranks.

    A parameter of one row cannot be split, so all ranks get its sum.
    """
    kinds = {"rows": "reduce_scatter", "all": "all_reduce"}
    transfers = [(kinds[kind], 8 * int(elements)) for kind, elements in map(str.split, moved)]
    rows = [[[9, 2], [5], [1, 2], [2, 2]], [[8, 2], [4], [0, 2], [2, 2]]]
    for rank, (sums, own, found) in enumerate(run_ranks(2, _scattered, bucket_bytes)):
        assert sums == [(6 * n.parameter).tolist() for n in make(*ROWS)]
        assert own == rows[rank]
        assert found == transfers


def _as_one(rank: int, shapes: list[tuple[int, ...]], gives: list[int]) -> list[Any]:
    """Return sums and own rows of three parameters that are reduced as one, declared out of
    order.
    """
    ranks = Channel(torch.distributed.group.WORLD)
    (whole, other), three = make((sum(n for n, _ in shapes), 2), (3, 2)), make(*shapes)
    ahead = [sum(n for n, _ in shapes[:i]) for i in range(3)]
    layouts = [replace(item.layout, rows_before=n) for item, n in zip(three, ahead, strict=True)]
    three = [
        replace(item, name=f"m{i}", whole=whole, layout=layout)
        for i, (item, layout) in enumerate(zip(three, layouts, strict=True))
    ]
    items, channels = [*three[1:], other, three[0]], {Axis.DATA: ranks, Axis.WEIGHT_DATA: ranks}
    gradients = MainGradients(items, channels, bucket_bytes=0, rows_of=ranks)
    gradients.zero()
    for number in gives:
        place = gradients.promise(whole.parameter, torch.float64)
        value = (number + rank) * whole.parameter.detach()
        gradients.add(whole.parameter, value if place is None else place.copy_(value))
    gradients.expect_last()
    gradients.collect(whole.parameter)
    gradients.reduce()
    own = [list(gradients.summed(item.parameter).shape) for item in three]
    return [torch.cat([gradients.whole(item.parameter) for item in three]).tolist(), own]


@pytest.mark.parametrize(
    ("shapes", "own"),
    [([(4, 2), (0, 2), (2, 2)], [2, 0, 1]), ([(3, 2), (0, 2), (2, 2)], [(2, 1), 0, 1])],
)
def test_parameters_reduced_as_one_share_a_gradient(shapes: Any, own: list[Any]):
    """Catches rows of another parameter, and padding between parameters where rows do not
    divide.
    """
    (whole,) = make((sum(n for n, _ in shapes), 2))
    for rank, (sums, rows) in enumerate(run_ranks(2, _as_one, shapes, [3, 1])):
        assert sums == (10 * whole.parameter).tolist()  # 3 + 1 of rank 0, 4 + 2 of rank 1
        expected = [n if isinstance(n, int) else n[rank] for n in own]
        assert rows == [[n, 2] for n in expected]
