"""Backward of the linears: destination of weight gradients, saved tensors, and overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.comm import Channel, Pending
from isp.core.comm.tag import Tag
from isp.core.mesh import Axis
from isp.core.optim.main_grads import MainGradients
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.tensor_parallel import (
    ColumnParallelLinear,
    DeferredWeightGradients,
    IntoMainGradients,
    RngStatesTracker,
    checkpoint,
)
from tests.core.megatron.layers import (
    CLOSE,
    DTYPE,
    INNER,
    LINEARS,
    NAMES,
    WIDTH,
    B,
    Made,
    S,
    drawn,
    features,
    fill,
    group,
    plain,
    slice_of,
)
from tests.ranks import run_each, run_ranks
from tests.saved import saving
from tests.toolkit import Operations


def _routes(rank: int, sequence_parallel: bool) -> None:
    channel = group()
    x, weight, bias = drawn(S, B, WIDTH), drawn(INNER, WIDTH, seed=2), drawn(INNER, seed=3)
    dys = [drawn(S, B, INNER, seed=seed) for seed in (4, 5, 6)]

    def run(route: str, limit: int | None = None) -> Tensor:
        layer = ColumnParallelLinear(
            WIDTH, INNER, group=channel, sequence_parallel=sequence_parallel, dtype=DTYPE
        )
        fill(layer, weight, bias)
        names = [ShardedParameter("weight", layer.weight, layer.layouts["weight"])]
        main = MainGradients(names, {Axis.DATA: Channel.solo()})
        deferred = DeferredWeightGradients(main, limit=limit)
        if route == "into":
            layer.weight_gradients = IntoMainGradients(main)
        elif route == "deferred":
            layer.weight_gradients = deferred
        main.zero()
        local_x = slice_of(x, 0, channel) if sequence_parallel else x
        for dy in dys:
            layer(local_x)[0].backward(features(dy, layer, 0))
        put_off = 0 if route != "deferred" else len(dys) if limit is None else min(limit, len(dys))
        assert len(deferred) == put_off
        deferred.drain(1)
        assert len(deferred) == max(0, put_off - 1)
        deferred.drain()
        main.reduce()
        return main.grad(layer.weight).clone()

    expected = sum(plain(x, weight, bias, dy)["dweight"] for dy in dys)
    assert isinstance(expected, Tensor)
    reference = run("at once")
    size, begin = INNER // channel.size, channel.rank * (INNER // channel.size)
    torch.testing.assert_close(reference, expected[begin : begin + size], **CLOSE)
    torch.testing.assert_close(run("into"), reference, **CLOSE)  # added up inside the product
    for limit in (None, 0, 1, 2, 3):
        torch.testing.assert_close(run("deferred", limit), reference, **CLOSE)


def test_all_routes_give_the_same_weight_gradient() -> None:
    """Catches a gradient that is lost, or added twice, on its way to the main gradient."""
    run_each(4, _routes, {"whole sequence": False, "sequence parallel": True})


def _routed(rank: int, into: bool) -> None:
    """Check that a recomputed layer, and a parameter passed in the call, use the route."""
    channel, tracker = group(), RngStatesTracker(torch.device("cpu"))
    owner = ColumnParallelLinear(WIDTH, INNER, group=channel, bias=False, dtype=DTYPE)
    head = ColumnParallelLinear(
        WIDTH, INNER, group=channel, bias=False, dtype=DTYPE, skip_weight_param_allocation=True
    )
    x = drawn(S, B, WIDTH)
    names = [ShardedParameter("weight", owner.weight, owner.layouts["weight"])]
    main = MainGradients(names, {Axis.DATA: Channel.solo()})
    uses: list[Callable[[Tensor], Tensor]] = [
        lambda x: owner(x)[0],
        lambda x: checkpoint(lambda x: owner(x)[0], False, x, tracker=tracker),
        lambda x: head(x, owner.weight)[0],
    ]
    for use in uses:
        deferred = DeferredWeightGradients(main)
        owner.weight_gradients = head.weight_gradients = (
            IntoMainGradients(main) if into else deferred
        )
        main.zero()
        y = use(x.clone().requires_grad_())
        with Made(tuple(owner.weight.shape)) as made:
            y.sum().backward()
        assert made.count == 0
        deferred.drain()
        main.reduce()
        ones = torch.ones(S * B, y.shape[-1], dtype=DTYPE)
        torch.testing.assert_close(main.grad(owner.weight), ones.T @ x.flatten(0, 1), **CLOSE)


def test_every_call_with_a_parameter_takes_the_route() -> None:
    """Catches a route that a recomputation or a tied weight silently does not take."""
    run_each(2, _routed, {"deferred": False, "into": True})


def _weight_at_call_keeps_the_main_gradient_clean(rank: int) -> None:
    layer = ColumnParallelLinear(WIDTH, INNER, group=group(), dtype=DTYPE)
    names = [ShardedParameter("weight", layer.weight, layer.layouts["weight"])]
    main = MainGradients(names, {Axis.DATA: Channel.solo()})
    layer.weight_gradients = IntoMainGradients(main)
    main.zero()
    given = drawn(*layer.weight.shape).requires_grad_()
    layer(drawn(S, B, WIDTH), given)[0].sum().backward()
    main.reduce()
    assert given.grad is not None
    assert given.grad.abs().sum() > 0
    assert main.grad(layer.weight).abs().sum() == 0


def test_a_weight_passed_in_the_call_has_its_own_gradient() -> None:
    """Catches the gradient of a passed weight added to the layer's main gradient."""
    run_ranks(2, _weight_at_call_keeps_the_main_gradient_clean)


def _saved_bytes(rank: int, name: str) -> dict[tuple[bool, bool], tuple[int, bool, int]]:
    """Return by (trained, needs dx): bytes saved of x, whether W is saved, and weight gradients
    made.
    """
    layer_type, options = LINEARS[name]
    found = {}
    for trained in (True, False):
        for needs_dx in (True, False):
            layer = layer_type(WIDTH, INNER, group=group(), dtype=DTYPE, **options)
            layer.weight.requires_grad_(trained)
            x = drawn(S, B, layer.weight.shape[1]).requires_grad_(needs_dx)
            with saving() as kept:
                y, _ = layer(x)
            with Made(tuple(layer.weight.shape)) as made:
                y.sum().backward()
            assert (layer.weight.grad is not None) is trained
            assert (x.grad is not None) is needs_dx
            saved = {t.data_ptr(): t.nbytes for t in kept}
            weight_saved = saved.pop(layer.weight.data_ptr(), 0) > 0
            found[trained, needs_dx] = (sum(saved.values()), weight_saved, made.count)
    return found


def test_only_what_a_gradient_needs_is_saved_and_computed() -> None:
    """Catches activations, weights and weight gradients that are saved or computed without need."""
    for name, of_ranks in run_each(2, _saved_bytes, NAMES).items():
        local_x = S * B * WIDTH * DTYPE.itemsize // (2 if name == "row" else 1)
        for found in of_ranks:
            assert [saved for saved, _, _ in found.values()] == [local_x] * 2 + [0] * 2, name
            for (trained, needs_dx), (_, weight_saved, made) in found.items():
                assert weight_saved is needs_dx, name
                assert (made > 0) is trained, name


class _Recorded(Channel):
    """A channel that records when each transfer is launched and waited for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(dist.group.WORLD)
        self.events = events

    def _launch(self, kind: str, tag: Tag, *args: Any, **kwargs: Any) -> Pending:
        def arrived(x: Tensor) -> Tensor:
            self.events.append(f"{tag} there")
            return x

        self.events.append(f"{tag} launched: {kind}")
        return super()._launch(kind, tag, *args, **kwargs).then(arrived)


ORDERS = {
    "column": ["dx made", "dx launched: all_reduce", "dw made", "dx there"],
    "column, sequence parallel": [
        "x launched: all_gather",
        "dx made",
        "dx launched: reduce_scatter",
        "x there",
        "dw made",
        "dx there",
    ],
    "row": ["dx made", "dw made"],
}


def _order(rank: int, name: str) -> list[str]:
    """Return the operations and transfers of a backward pass in order."""
    events: list[str] = []
    layer_type, options = LINEARS[name]
    layer = layer_type(WIDTH, INNER, group=_Recorded(events), bias=False, dtype=DTYPE, **options)
    features = layer.weight.shape[1]
    rows = S * B * (2 if options.get("sequence_parallel") else 1)
    y, _ = layer(drawn(S, B, features).requires_grad_())
    events.clear()
    products = {(rows, features): "dx made", tuple(layer.weight.shape): "dw made"}

    def note(name: str, _: Any, out: Any) -> None:
        if name in ("mm", "addmm"):
            events.append(products[tuple(out.shape)])

    with Operations(note):
        y.sum().backward()
    return events


def test_transfers_overlap_with_products() -> None:
    """Catches a transfer that is launched too late, or waited for before the remaining work."""
    expected = {name: [order] * 2 for name, order in ORDERS.items()}
    assert run_each(2, _order, NAMES) == expected
