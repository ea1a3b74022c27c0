"""The layers with Megatron-LM's options against unsharded ones, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from isp.core.comm import Channel
from isp.core.layers.module import named_parameters
from isp.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from tests.core.megatron.layers import (
    CLOSE,
    DTYPE,
    INNER,
    LINEARS,
    NAMES,
    WIDTH,
    WORLDS,
    B,
    S,
    drawn,
    features,
    fill,
    group,
    plain,
    slice_of,
)
from tests.ranks import run_each, run_ranks

V = 23


COLUMN = {
    "plain": {},
    "no bias": {"bias": False},
    "gathered": {"gather_output": True},
    "bias not added": {"skip_bias_add": True},
    "gathered, bias not added": {"stride": 3, "gather_output": True, "skip_bias_add": True},
    "strided": {"stride": 2},
    "strided, gathered": {"stride": 3, "gather_output": True},
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
    "batch first": {"input_is_parallel": True, "sequence_parallel": True, "sequence_dim": 1},
}


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
    y.backward(dy if whole else features(dy, layer, 0))

    expected = plain(x, weight, bias if layer.bias is not None else None, dy)
    full_y = expected["y"]
    torch.testing.assert_close(y, full_y if whole else features(full_y, layer, 0), **CLOSE)
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
    local_x = (features(x, layer, 1) if parallel else x.clone()).requires_grad_()
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
    torch.testing.assert_close(local_x.grad, features(dx, layer, 1) if parallel else dx, **CLOSE)
    local = layer.layouts["weight"].shard(expected["dweight"])
    torch.testing.assert_close(layer.weight.grad, local, **CLOSE)
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, expected["dbias"], **CLOSE)


@pytest.mark.parametrize("world", WORLDS)
def test_a_column_linear_equals_the_unsharded_linear(world: int) -> None:
    """Catches a part of the output, of a gradient or of a fused weight in the wrong place."""
    run_each(world, _column, COLUMN)


@pytest.mark.parametrize("world", WORLDS)
def test_a_row_linear_equals_the_unsharded_linear(world: int) -> None:
    """Catches a bias added by every rank, and a bias gradient that is one rank's part."""
    run_each(world, _row, ROW)


def _autocast(rank: int, name: str) -> None:
    layer_type, options = LINEARS[name]
    sequence_parallel = options.get("sequence_parallel", False)
    channel = group()
    layer = layer_type(WIDTH, INNER, group=channel, **options)
    x = drawn(S, B, WIDTH).float()
    local_x = slice_of(x, 0, channel) if sequence_parallel else x.clone()
    local_x = (features(x, layer, 1) if name == "row" else local_x).requires_grad_()
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
    dx = features(dx, layer, 1) if name == "row" else dx
    # bfloat16 has 8 bits, and the parts of a sum, of up to 32, are rounded on each rank
    close = {"rtol": 2**-7, "atol": 32 * 2**-8}
    torch.testing.assert_close(local_x.grad, dx, **close)
    dw = layer.layouts["weight"].shard(whole.weight.grad)
    torch.testing.assert_close(layer.weight.grad, dw, **close)
    assert layer.bias.grad.dtype == torch.float32


def test_autocast_casts_forward_and_backward() -> None:
    """Catches factors of different dtypes in backward, which autocast does not cover."""
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
        leaf = embedding.weight if first.shape == (S, WIDTH) else scale
        (grad,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


def test_second_derivatives_are_refused() -> None:
    """Catches a gradient of a gradient that would not be summed over the group."""
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
def test_an_embedding_equals_the_unsharded_table(world: int) -> None:
    """Catches ids at the edges of a rank's rows, and a vocabulary that does not divide."""
    run_each(world, _embedding, EMBEDDING)


def _initial(rank: int) -> list[Any]:
    """Return every layer's whole weight, assembled from all ranks."""
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
    return _joined(layers)


def _joined(layers: nn.Module) -> list[Any]:
    wholes = []
    for item in named_parameters(layers):
        parameter, layout = item.parameter, item.layout
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
    """Catches shards that each rank draws independently, or parts of different master weights."""
    one = run_ranks(1, _initial)[0]
    assert len({str(w) for w in one}) == len(one)
    for world in (4, 8):
        assert all(found == one for found in run_ranks(world, _initial))


def test_a_master_is_drawn_on_cpu_in_float32() -> None:
    """Catches a master weight on torch's default device, where its values would differ."""
    drawn_weights = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            layer = ColumnParallelLinear(WIDTH, INNER, group=Channel.solo())
        drawn_weights.append(layer.weight)
    assert torch.equal(*drawn_weights)


def _misuse(rank: int) -> list[str]:
    channel, faults = group(), []

    def refused(make: Any) -> None:
        with pytest.raises(ValueError) as fault:  # noqa: PT011  # the words are looked at below
            make()
        faults.append(str(fault.value))

    layer = ColumnParallelLinear(WIDTH, INNER, group=channel)
    refused(lambda: layer(torch.zeros(S, B, WIDTH), torch.zeros(INNER, WIDTH)))
    bare = ColumnParallelLinear(WIDTH, INNER, group=channel, skip_weight_param_allocation=True)
    refused(lambda: bare(torch.zeros(S, B, WIDTH)))
    refused(lambda: ColumnParallelLinear(WIDTH, 7, group=channel))
    refused(lambda: ColumnParallelLinear(WIDTH, INNER, group=channel, stride=5))
    refused(lambda: RowParallelLinear(7, INNER, group=channel))
    refused(lambda: RowParallelLinear(WIDTH, INNER, group=channel, sequence_parallel=True))
    refused(lambda: RowParallelLinear(WIDTH, INNER, group=channel, stride=2))
    refused(lambda: VocabParallelEmbedding(1, WIDTH, group=channel))
    half, whole = torch.zeros(S, B, WIDTH // 2), torch.zeros(S, B, WIDTH)
    split, _ = ColumnParallelLinear(INNER, WIDTH, group=channel)(torch.zeros(S, B, INNER))
    refused(lambda: layer(half))
    refused(lambda: layer(torch.zeros(S, B, 5)))
    refused(lambda: RowParallelLinear(WIDTH, INNER, group=channel)(split))
    refused(lambda: RowParallelLinear(WIDTH, INNER, group=channel)(torch.zeros(S, B, 5)))
    row = RowParallelLinear(WIDTH, INNER, group=channel, input_is_parallel=True)
    refused(lambda: row(whole))
    refused(lambda: row(torch.zeros(S, B, 5)))
    assert row(split)[0].shape == (S, B, INNER)
    assert RowParallelLinear(WIDTH, INNER, group=channel)(whole)[0].shape == (S, B, INNER)
    return faults


def test_misuse_is_refused_with_the_numbers() -> None:
    """Catches a wrong shape or contradicting options that fail in a matmul, or never."""
    faults = run_ranks(2, _misuse)[0]
    words = [
        ["(48, 16)", "(24, 16)"],
        ["no weight of its own"],
        ["output_size=7", "2 ranks"],
        ["stride=5", "output_size=48"],
        ["input_size=7", "2 ranks"],
        ["input_is_parallel=True"],
        ["input_is_parallel=True"],
        ["num_embeddings=1", "2 ranks"],
        ["[8, 2, 8] has 8 features, expected input_size=16", "or gather_output=True there"],
        ["[8, 2, 5] has 5 features, expected input_size=16", "with all its features"],
        ["8 features, expected input_size=16", "make the layer with input_is_parallel=True"],
        ["5 features, expected input_size=16", "pass x with all its features"],
        ["16 features, expected input_size=16 / 2 ranks = 8", "with input_is_parallel=False"],
        ["5 features, expected input_size=16 / 2 ranks = 8", "pass this rank's features"],
    ]
    for text, expected in zip(faults, words, strict=True):
        assert all(word in text for word in expected), text
