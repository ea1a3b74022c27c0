"""The layers with Megatron-LM's options against the unsharded ones, in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isp.checkpoint import Checkpointer, TrainState
from isp.comm import Channel, CommLog, Pending
from isp.comm.cargo import Cargo
from isp.layers.module import NamedParameter, init_weights, named_parameters
from isp.optim import MainGradients
from isp.parallel import Axis, Mode, ParallelConfig, TensorConfig, Topology
from isp.settings import CheckpointConfig
from isp.tensor_parallel import (
    IGNORED,
    ColumnParallelLinear,
    DeferredWeightGradients,
    IntoMainGradients,
    RngStatesTracker,
    RowParallelLinear,
    VocabParallelEmbedding,
    checkpoint,
    vocab_parallel_cross_entropy,
)
from tests.ranks import run_each, run_ranks

S, B, WIDTH, INNER = 8, 2, 16, 48
V = 23
WORLDS = [1, 4]
DTYPE = torch.float64
# Sums over the ranks are taken in another order than the unsharded matmul takes them.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def group(log: CommLog | None = None) -> Channel:
    return Channel(dist.group.WORLD, name="tensor", log=log)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def slice_of(x: Tensor, dim: int, channel: Channel) -> Tensor:
    return x.chunk(channel.size, dim)[channel.rank].clone()


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the unsharded linear."""
    leaves = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    y = F.linear(leaves["x"], leaves["weight"], leaves.get("bias"))
    y.backward(dy)
    grads = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"y": y.detach(), **grads}


def fill(layer: Any, weight: Tensor, bias: Tensor) -> None:
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.copy_(layer.layouts["weight"].shard(weight))
        if layer.bias is not None:
            layer.bias.copy_(layer.layouts["bias"].shard(bias))


COLUMN = {
    "plain": {},
    "no bias": {"bias": False},
    "gathered": {"gather_output": True},
    "bias not added": {"skip_bias_add": True},
    "gathered, bias not added": {"stride": 3, "gather_output": True, "skip_bias_add": True},
    "strided": {"stride": 2},
    "strided, gathered": {"stride": 3, "gather_output": True},
    "segments": {"segments": (32, 8, 8)},
    "segments, gathered": {"segments": (32, 8, 8), "gather_output": True},
    "sequence parallel": {"sequence_parallel": True},
    "batch first": {"sequence_parallel": True, "sequence_dim": 1},
    "weight at call": {"skip_weight_param_allocation": True},
}


ROW = {
    "plain": {},
    "no bias": {"bias": False},
    "split before": {"input_is_parallel": True},
    "bias not added": {"skip_bias_add": True},
    "strided": {"input_is_parallel": True, "stride": 2},
    "sequence parallel": {"input_is_parallel": True, "sequence_parallel": True},
    "batch first": {
        "input_is_parallel": True,
        "sequence_parallel": True,
        "sequence_dim": 1,
    },
}


LINEARS: dict[str, Any] = {
    "column": (ColumnParallelLinear, {}),
    "column, sequence parallel": (ColumnParallelLinear, {"sequence_parallel": True}),
    "row": (RowParallelLinear, {"input_is_parallel": True}),
}
NAMES = {name: name for name in LINEARS}


def _features(y: Tensor, layer: Any, dim: int) -> Tensor:
    """The part of the last dim of y that belongs to this rank's part of the weight's `dim`."""
    assert layer.layouts["weight"].dim == dim
    return torch.cat([y[..., a:b] for a, b in layer.layouts["weight"].intervals()], dim=-1)


def _column(rank: int, options: dict[str, Any]) -> None:
    channel, dim = group(), options.get("sequence_dim", 0)
    split, whole = options.get("sequence_parallel", False), options.get("gather_output", False)
    skipped = options.get("skip_bias_add", False)
    x, weight, bias = drawn(S, S, WIDTH), drawn(INNER, WIDTH, seed=2), drawn(INNER, seed=3)
    layer = ColumnParallelLinear(WIDTH, INNER, group=channel, dtype=DTYPE, **options)
    fill(layer, weight, bias)
    shard = layer.layouts["weight"].shard
    given = shard(weight).clone().requires_grad_() if layer.weight is None else None
    local_x = (slice_of(x, dim, channel) if split else x.clone()).requires_grad_()
    y, unadded = layer(local_x, given)
    assert (unadded is not None) is (skipped and layer.bias is not None)
    y = y if unadded is None else y + unadded
    dy = drawn(S, S, INNER, seed=4)
    y.backward(dy if whole else _features(dy, layer, 0))

    expected = plain(x, weight, bias if layer.bias is not None else None, dy)
    full_y = expected["y"]
    torch.testing.assert_close(y, full_y if whole else _features(full_y, layer, 0), **CLOSE)
    dx = slice_of(expected["dx"], dim, channel) if split else expected["dx"]
    torch.testing.assert_close(local_x.grad, dx, **CLOSE)
    own = layer.weight if given is None else given
    torch.testing.assert_close(own.grad, shard(expected["dweight"]), **CLOSE)
    if "dbias" in expected:
        local = layer.layouts["bias"].shard(expected["dbias"])
        torch.testing.assert_close(layer.bias.grad, local, **CLOSE)


def _row(rank: int, options: dict[str, Any]) -> None:
    channel, dim = group(), options.get("sequence_dim", 0)
    split, parallel = options.get("sequence_parallel", False), options.get("input_is_parallel")
    x, weight, bias = drawn(S, S, INNER), drawn(WIDTH, INNER, seed=2), drawn(WIDTH, seed=3)
    layer = RowParallelLinear(INNER, WIDTH, group=channel, dtype=DTYPE, **options)
    fill(layer, weight, bias)
    local_x = (_features(x, layer, 1) if parallel else x.clone()).requires_grad_()
    y, unadded = layer(local_x)
    if options.get("skip_bias_add"):
        assert unadded is layer.bias
        y = y + unadded
    else:
        assert unadded is None
    dy = drawn(S, S, WIDTH, seed=4)
    y.backward(slice_of(dy, dim, channel) if split else dy)

    expected = plain(x, weight, bias if layer.bias is not None else None, dy)
    full_y = expected["y"]
    torch.testing.assert_close(y, slice_of(full_y, dim, channel) if split else full_y, **CLOSE)
    dx = expected["dx"]
    torch.testing.assert_close(local_x.grad, _features(dx, layer, 1) if parallel else dx, **CLOSE)
    local = layer.layouts["weight"].shard(expected["dweight"])
    torch.testing.assert_close(layer.weight.grad, local, **CLOSE)
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, expected["dbias"], **CLOSE)


@pytest.mark.parametrize("world", WORLDS)
def test_column_equals_the_unsharded_linear(world: int) -> None:
    """Catches a part of outputs, of a gradient or of a fused weight in the wrong place."""
    run_each(world, _column, COLUMN)


@pytest.mark.parametrize("world", WORLDS)
def test_row_equals_the_unsharded_linear(world: int) -> None:
    """Catches a bias added by every rank, or a gradient of it that is one rank's part."""
    run_each(world, _row, ROW)


def _autocast(rank: int, name: str) -> None:
    layer_type, options = LINEARS[name]
    sequence_parallel = options.get("sequence_parallel", False)
    channel = group()
    layer = layer_type(WIDTH, INNER, group=channel, **options)
    x = drawn(S, B, WIDTH).float()
    local_x = slice_of(x, 0, channel) if sequence_parallel else x.clone()
    local_x = (_features(x, layer, 1) if name == "row" else local_x).requires_grad_()
    whole = layer_type(WIDTH, INNER, group=Channel.solo(), **options)
    with torch.no_grad():
        weight = drawn(INNER, WIDTH, seed=2).float()
        whole.weight.copy_(weight)
        fill(layer, weight, whole.bias)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(local_x)
        full_y = F.linear(leaf, whole.weight, whole.bias)
    assert y.dtype == full_y.dtype == torch.bfloat16
    y.sum().backward()
    full_y.sum().backward()
    dx = slice_of(leaf.grad, 0, channel) if sequence_parallel else leaf.grad
    dx = _features(dx, layer, 1) if name == "row" else dx
    # bfloat16 has 8 bits, and the parts of a sum, of up to 32, are rounded on each rank
    close = {"rtol": 2**-7, "atol": 32 * 2**-8}
    torch.testing.assert_close(local_x.grad, dx, **close)
    dw = layer.layouts["weight"].shard(whole.weight.grad)
    torch.testing.assert_close(layer.weight.grad, dw, **close)
    assert layer.bias.grad.dtype == torch.float32


def test_autocast_narrows_the_products() -> None:
    """Catches factors of different dtypes in backward, which autocast does not reach."""
    run_each(2, _autocast, NAMES)


def _second_derivatives(rank: int) -> None:
    channel = group()
    column = ColumnParallelLinear(WIDTH, INNER, group=channel, dtype=DTYPE)
    embedding = VocabParallelEmbedding(V, WIDTH, group=channel, dtype=DTYPE)
    ids = torch.arange(S)
    scale = torch.ones((), dtype=DTYPE, requires_grad=True)
    for first in (
        column(drawn(S, WIDTH) * scale)[0],
        embedding(ids) * scale,
        vocab_parallel_cross_entropy(drawn(S, V) * scale, ids, channel=channel),
    ):
        wanted = embedding.weight if first.shape == (S, WIDTH) else scale
        (grad,) = torch.autograd.grad(first.square().sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


def test_second_derivatives_are_refused() -> None:
    """Catches a gradient of a gradient that would miss the group."""
    run_ranks(2, _second_derivatives)


def _embedding(rank: int, options: dict[str, Any]) -> None:
    channel = group()
    ids = torch.randint(V, (S, B), generator=torch.Generator().manual_seed(7))
    table, dy = drawn(V, WIDTH), drawn(S, B, WIDTH, seed=2)
    layer = VocabParallelEmbedding(V, WIDTH, group=channel, dtype=DTYPE, **options)
    shard = layer.layouts["weight"].shard
    with torch.no_grad():
        layer.weight.copy_(shard(table))
    y = layer(ids)
    leaf = table.clone().requires_grad_()
    full_y = F.embedding(ids, leaf)
    full_y.backward(dy)
    assert leaf.grad is not None
    if options.get("reduce_scatter_embeddings"):
        full_y, dy = slice_of(full_y, 0, channel), slice_of(dy, 0, channel)
    y.backward(dy)
    torch.testing.assert_close(y, full_y, rtol=0, atol=0)  # all but one of the terms are zero
    torch.testing.assert_close(layer.weight.grad, shard(leaf.grad), **CLOSE)


EMBEDDING: dict[str, dict[str, Any]] = {
    "reduced": {},
    "reduce-scattered": {"reduce_scatter_embeddings": True},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("world", WORLDS)
def test_embedding_equals_the_whole_table(world: int) -> None:
    """Catches ids at the edges of a rank's rows, and a vocabulary that does not divide."""
    run_each(world, _embedding, EMBEDDING)


def _initial(rank: int) -> dict[str, list[Any]]:
    """Every layer's whole weight, put together from the ranks', by both ways of initialising."""
    channel = group()
    torch.manual_seed(3)
    layers = nn.ModuleDict(
        {
            "column": ColumnParallelLinear(WIDTH, INNER, group=channel, stride=2, dtype=DTYPE),
            "row": RowParallelLinear(
                INNER, WIDTH, group=channel, dtype=DTYPE, init_method=nn.init.xavier_normal_
            ),
            "embedding": VocabParallelEmbedding(V, WIDTH, group=channel, dtype=DTYPE),
        }
    )
    wholes = {"by state": _joined(layers)}
    init_weights(layers, seed=11)
    return {**wholes, "by name": _joined(layers)}


def _joined(layers: nn.Module) -> list[Any]:
    wholes = []
    for _, parameter, layout in named_parameters(layers):
        whole = torch.zeros(layout.global_shape, dtype=DTYPE)
        if not layout.sharded and dist.get_rank() > 0:
            local = torch.zeros_like(parameter)
        else:
            local = parameter.detach()
        begin = 0
        for start, stop in layout.intervals():
            part = local.narrow(layout.dim, begin, stop - start)
            whole.narrow(layout.dim, start, stop - start).copy_(part)
            begin += stop - start
        dist.all_reduce(whole)
        wholes.append(whole.tolist())
    return wholes


def test_initial_weights_are_equal_at_every_group_size() -> None:
    """Catches shards that are drawn by themselves, or pieces of different masters."""
    one = run_ranks(1, _initial)[0]
    assert len({str(w) for w in one["by state"]}) == len(one["by state"])
    for world in (4, 8):
        assert all(found == one for found in run_ranks(world, _initial))


def test_a_master_is_drawn_on_cpu_in_float32() -> None:
    """Catches a master weight that follows torch's default device, and so is none."""
    drawn_weights = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            layer = ColumnParallelLinear(WIDTH, INNER, group=Channel.solo())
        drawn_weights.append(layer.weight)
    assert torch.equal(*drawn_weights)


def _routes(rank: int, sequence_parallel: bool) -> None:
    channel = group()
    x, weight, bias = drawn(S, B, WIDTH), drawn(INNER, WIDTH, seed=2), drawn(INNER, seed=3)
    dys = [drawn(S, B, INNER, seed=seed) for seed in (4, 5, 6)]

    def run(route: str, limit: int | None = None) -> Tensor:
        layer = ColumnParallelLinear(
            WIDTH, INNER, group=channel, sequence_parallel=sequence_parallel, dtype=DTYPE
        )
        fill(layer, weight, bias)
        names = [NamedParameter("weight", layer.weight, layer.layouts["weight"])]
        main = MainGradients(names, {Axis.DATA: Channel.solo()})
        deferred = DeferredWeightGradients(main, limit=limit)
        if route == "into":
            layer.weight_gradients = IntoMainGradients(main)
        elif route == "deferred":
            layer.weight_gradients = deferred
        main.zero()
        local_x = slice_of(x, 0, channel) if sequence_parallel else x
        for dy in dys:
            layer(local_x)[0].backward(_features(dy, layer, 0))
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


def test_routes_of_the_weight_gradient_end_alike() -> None:
    """Catches a gradient that is lost, or added twice, on its way into the main gradient."""
    run_each(4, _routes, {"whole sequence": False, "sequence parallel": True})


class _Made(TorchDispatchMode):
    """Counts the tensors of a shape that operations make."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and tuple(out.shape) == self.shape:
            self.count += out.untyped_storage().data_ptr() not in held
        return out


def _made_gradients(rank: int) -> list[int]:
    """How many tensors of the weight's shape a backward pass makes, by route."""
    channel, counts = group(), []
    for into in (False, True):
        layer = ColumnParallelLinear(WIDTH, INNER, group=channel, bias=False, dtype=DTYPE)
        names = [NamedParameter("weight", layer.weight, layer.layouts["weight"])]
        main = MainGradients(names, {Axis.DATA: Channel.solo()})
        if into:
            layer.weight_gradients = IntoMainGradients(main)
        main.zero()
        y, _ = layer(drawn(S, B, WIDTH))
        with _Made(tuple(layer.weight.shape)) as made:
            y.sum().backward()
        counts.append(made.count)
    return counts


def test_a_product_into_the_main_gradient_makes_no_gradient() -> None:
    """Catches a weight gradient that is computed beside its main gradient, and added."""
    for at_once, into in run_ranks(2, _made_gradients):
        assert at_once >= 1
        assert into == 0


def _routed(rank: int, into: bool) -> None:
    """The route is taken by a recomputed use, and by a parameter that is given at the call."""
    channel, tracker = group(), RngStatesTracker(torch.device("cpu"))
    owner = ColumnParallelLinear(WIDTH, INNER, group=channel, bias=False, dtype=DTYPE)
    head = ColumnParallelLinear(
        WIDTH, INNER, group=channel, bias=False, dtype=DTYPE, skip_weight_param_allocation=True
    )
    x = drawn(S, B, WIDTH)
    names = [NamedParameter("weight", owner.weight, owner.layouts["weight"])]
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
        with _Made(tuple(owner.weight.shape)) as made:
            y.sum().backward()
        assert made.count == 0
        deferred.drain()
        main.reduce()
        ones = torch.ones(S * B, y.shape[-1], dtype=DTYPE)
        torch.testing.assert_close(main.grad(owner.weight), ones.T @ x.flatten(0, 1), **CLOSE)


def test_every_use_of_a_parameter_takes_the_route() -> None:
    """Catches a route that is left, in silence, in a recompute or with a tied weight."""
    run_each(2, _routed, {"deferred": False, "into": True})


def _weight_at_call_keeps_the_main_gradient_clean(rank: int) -> None:
    layer = ColumnParallelLinear(WIDTH, INNER, group=group(), dtype=DTYPE)
    names = [NamedParameter("weight", layer.weight, layer.layouts["weight"])]
    main = MainGradients(names, {Axis.DATA: Channel.solo()})
    layer.weight_gradients = IntoMainGradients(main)
    main.zero()
    given = drawn(*layer.weight.shape).requires_grad_()
    layer(drawn(S, B, WIDTH), given)[0].sum().backward()
    main.reduce()
    assert given.grad is not None
    assert given.grad.abs().sum() > 0
    assert main.grad(layer.weight).abs().sum() == 0


def test_a_weight_at_call_has_its_own_gradient() -> None:
    """Catches the gradient of a given weight that lands in the layer's main gradient."""
    run_ranks(2, _weight_at_call_keeps_the_main_gradient_clean)


def _saved_bytes(rank: int, name: str) -> dict[tuple[bool, bool], tuple[int, bool, int]]:
    """By (trained, dx wanted): bytes saved of x, whether W is saved, and weight gradients made."""
    layer_type, options = LINEARS[name]
    found = {}
    for trained in (True, False):
        for wanted in (True, False):
            layer = layer_type(WIDTH, INNER, group=group(), dtype=DTYPE, **options)
            layer.weight.requires_grad_(trained)
            saved: dict[int, int] = {}

            def keep(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
                saved[x.data_ptr()] = x.nbytes
                return x

            x = drawn(S, B, layer.weight.shape[1]).requires_grad_(wanted)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                y, _ = layer(x)
            with _Made(tuple(layer.weight.shape)) as made:
                y.sum().backward()
            assert (layer.weight.grad is not None) is trained
            assert (x.grad is not None) is wanted
            weight_saved = saved.pop(layer.weight.data_ptr(), 0) > 0
            found[trained, wanted] = (sum(saved.values()), weight_saved, made.count)
    return found


def test_only_what_a_gradient_needs_is_saved_and_computed() -> None:
    """Catches activations, weights and weight gradients kept or made that nobody wants."""
    for name, of_ranks in run_each(2, _saved_bytes, NAMES).items():
        local_x = S * B * WIDTH * DTYPE.itemsize // (2 if name == "row" else 1)
        for found in of_ranks:
            assert [saved for saved, _, _ in found.values()] == [local_x] * 2 + [0] * 2, name
            for (trained, wanted), (_, weight_saved, made) in found.items():
                assert weight_saved is wanted, name
                assert (made > 0) is trained, name


class _Told(Channel):
    """A channel that tells what sets out and when it is waited for."""

    def __init__(self, told: list[str]) -> None:
        super().__init__(dist.group.WORLD)
        self.told = told

    def _launch(self, kind: str, cargo: Cargo, *args: Any, **kwargs: Any) -> Pending:
        def arrived(x: Tensor) -> Tensor:
            self.told.append(f"{cargo} there")
            return x

        self.told.append(f"{cargo} sets out: {kind}")
        return super()._launch(kind, cargo, *args, **kwargs).then(arrived)


class _Products(TorchDispatchMode):
    """Tells of each matrix product, by the shape of what it gives."""

    def __init__(self, names: dict[tuple[int, ...], str], told: list[str]) -> None:
        super().__init__()
        self.names, self.told = names, told

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.told.append(self.names[tuple(out.shape)])
        return out


ORDERS = {
    "column": ["dx made", "dx sets out: all_reduce", "dw made", "dx there"],
    "column, sequence parallel": [
        "x sets out: all_gather",
        "dx made",
        "dx sets out: reduce_scatter",
        "x there",
        "dw made",
        "dx there",
    ],
    "row": ["dx made", "dw made"],
}


def _order(rank: int, name: str) -> list[str]:
    """What happens in a backward pass."""
    told: list[str] = []
    layer_type, options = LINEARS[name]
    layer = layer_type(WIDTH, INNER, group=_Told(told), bias=False, dtype=DTYPE, **options)
    features = layer.weight.shape[1]
    rows = S * B * (2 if options.get("sequence_parallel") else 1)
    y, _ = layer(drawn(S, B, features).requires_grad_())
    told.clear()
    with _Products({(rows, features): "dx made", tuple(layer.weight.shape): "dw made"}, told):
        y.sum().backward()
    return told


def test_transfers_hide_behind_products() -> None:
    """Catches a transfer that sets out too late, or is waited for with work left to do."""
    expected = {name: [order] * 2 for name, order in ORDERS.items()}
    assert run_each(2, _order, NAMES) == expected


def _misuse(rank: int) -> list[str]:
    channel, told = group(), []

    def refused(make: Any) -> None:
        with pytest.raises(ValueError) as fault:  # noqa: PT011  # the words are looked at below
            make()
        told.append(str(fault.value))

    layer = ColumnParallelLinear(WIDTH, INNER, group=channel)
    refused(lambda: layer(torch.zeros(S, B, WIDTH), torch.zeros(INNER, WIDTH)))
    bare = ColumnParallelLinear(WIDTH, INNER, group=channel, skip_weight_param_allocation=True)
    refused(lambda: bare(torch.zeros(S, B, WIDTH)))
    refused(lambda: ColumnParallelLinear(WIDTH, 7, group=channel))
    refused(lambda: ColumnParallelLinear(WIDTH, INNER, group=channel, segments=(INNER, 4)))
    refused(lambda: ColumnParallelLinear(WIDTH, INNER, group=channel, segments=(INNER - 3, 3)))
    refused(lambda: ColumnParallelLinear(WIDTH, INNER, group=channel, segments=(INNER,), stride=2))
    refused(lambda: RowParallelLinear(7, INNER, group=channel))
    refused(lambda: RowParallelLinear(WIDTH, INNER, group=channel, sequence_parallel=True))
    refused(lambda: RowParallelLinear(WIDTH, INNER, group=channel, stride=2))
    refused(lambda: VocabParallelEmbedding(1, WIDTH, group=channel))
    return told


def test_misuse_names_the_numbers() -> None:
    """Catches a shape or a contradiction that is found out in the middle of a matmul, or never."""
    told = run_ranks(2, _misuse)[0]
    words = [
        ["(48, 16)", "(24, 16)"],
        ["no weight of its own"],
        ["output_size=7", "2 ranks"],
        ["segments=(48, 4)", "output_size=48"],
        ["segment of 45", "output_size"],
        ["stride=2", "segments=(48,)"],
        ["input_size=7", "2 ranks"],
        ["input_is_parallel=True"],
        ["input_is_parallel=True"],
        ["num_embeddings=1", "2 ranks"],
    ]
    for text, expected in zip(told, words, strict=True):
        assert all(word in text for word in expected), text


def _toolkit(channel: Channel, fills: bool) -> nn.ModuleDict:
    layers = nn.ModuleDict(
        {
            "column": ColumnParallelLinear(WIDTH, INNER, group=channel, stride=3, dtype=DTYPE),
            "row": RowParallelLinear(INNER, WIDTH, group=channel, dtype=DTYPE),
            "embedding": VocabParallelEmbedding(V, WIDTH, group=channel, dtype=DTYPE),
        }
    )
    with torch.no_grad():
        for seed, (_, parameter, layout) in enumerate(named_parameters(layers)):
            parameter.copy_(layout.shard(drawn(*layout.global_shape, seed=seed)))
            if not fills:
                parameter.zero_()
    return layers


def _checkpointer(channel: Channel, layers: nn.Module, folder: Path) -> tuple[Any, TrainState]:
    sizes = TensorConfig(size=channel.size, mode=Mode.MTP)
    topology = Topology.create(dist.get_world_size(), ParallelConfig(tensor=sizes))
    parameters = list(named_parameters(layers))
    state = TrainState(parameters=parameters, optimizer=None, topology=topology)
    return Checkpointer(folder, CheckpointConfig(), world=Channel(dist.group.WORLD)), state


def _save(rank: int, folder: Path) -> None:
    channel = group()
    checkpointer, state = _checkpointer(channel, _toolkit(channel, fills=True), folder)
    checkpointer.save(1, state, tokens=0)
    checkpointer.wait()


def _load(rank: int, folder: Path) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    channel = Channel(pairs[rank // 2])
    layers = _toolkit(channel, fills=False)
    checkpointer, state = _checkpointer(channel, layers, folder)
    checkpointer.load(checkpointer.choose(), state)
    expected = dict(_toolkit(channel, fills=True).named_parameters())
    for name, parameter in layers.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_checkpoint_loads_over_another_group(tmp_path: Path) -> None:
    """Catches shards whose place in the whole weight is not known: fused ones, uneven ones."""
    run_ranks(8, _save, tmp_path)
    run_ranks(4, _load, tmp_path)


def _loss(rank: int, case: tuple[float, int]) -> None:
    smoothing, vocab = case
    log = CommLog()
    log.collect()
    channel = group(log)
    logits = drawn(S, B, vocab) * 5
    target = torch.randint(vocab, (S, B), generator=torch.Generator().manual_seed(7))
    target[0, 0] = target[3] = IGNORED
    dloss = drawn(S, B, seed=2)
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(
        leaf.flatten(0, 1), target.flatten(), label_smoothing=smoothing, reduction="none"
    ).view(S, B)
    expected.backward(dloss)
    assert leaf.grad is not None
    size = -(-vocab // channel.size)
    first = min(vocab, rank * size)
    own = slice(first, min(vocab, first + size))
    for reuse in (False, True):
        local = logits[..., own].contiguous()
        before = local.clone()
        head = local.clone().requires_grad_()
        local = head * 1  # as a layer's output, not a leaf
        kept = local.detach()
        loss = vocab_parallel_cross_entropy(
            local, target, smoothing, channel=channel, first=first, reuse_logits=reuse
        )
        assert torch.equal(kept, before) is not reuse
        moves = log.take()
        assert len(moves) == (0 if channel.size == 1 else 3)
        loss.backward(dloss)
        assert not log.take()
        torch.testing.assert_close(loss, expected.detach(), **CLOSE)
        torch.testing.assert_close(head.grad, leaf.grad[..., own], **CLOSE)


@pytest.mark.parametrize("world", WORLDS)
def test_loss_is_torchs(world: int) -> None:
    """Catches smoothing over a rank's part alone, a fourth reduction, and logits overwritten."""
    run_each(world, _loss, {str(case): case for case in product((0.0, 0.1), (48, 45))})


def _reused(rank: int, smoothing: float) -> list[int]:
    """How many buffers like the logits backward makes, without and with their reuse."""
    channel, counts = group(), []
    target = torch.arange(S)
    for reuse in (False, True):
        head = slice_of(drawn(S, 48), 1, channel).requires_grad_()
        loss = vocab_parallel_cross_entropy(
            head * 1, target, smoothing, channel=channel, reuse_logits=reuse
        ).sum()
        with _Made(tuple(head.shape)) as made:
            (once,) = torch.autograd.grad(loss, head, retain_graph=True)
        counts.append(made.count)
        if reuse:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            assert torch.equal(once, torch.autograd.grad(loss, head)[0])
    return counts


def test_reused_logits_end_as_their_gradient() -> None:
    """Catches a second buffer of the size of the logits, and a wrong gradient when walked twice."""
    for of_ranks in run_each(2, _reused, {"plain": 0.0, "smoothed": 0.1}).values():
        assert all(reused == kept - 1 for kept, reused in of_ranks)


def test_loss_refuses_a_smoothing_that_is_none() -> None:
    """Catches a percentage given for a share."""
    with pytest.raises(ValueError, match="label_smoothing=10"):
        vocab_parallel_cross_entropy(
            torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), 10, channel=Channel.solo()
        )


def _wide_inside(rank: int) -> None:
    """bfloat16 logits: the loss is float32's, the gradient bfloat16."""
    channel = group()
    logits = (drawn(S, B, 48) * 50).bfloat16()
    target = torch.randint(48, (S, B), generator=torch.Generator().manual_seed(7))
    local = slice_of(logits, 2, channel).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, channel=channel)
    loss.sum().backward()
    expected = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.flatten(), expected)
    assert local.grad is not None
    assert local.grad.dtype == torch.bfloat16


def test_loss_is_float32_inside() -> None:
    """Catches a softmax in the dtype of the logits."""
    run_ranks(4, _wide_inside)
