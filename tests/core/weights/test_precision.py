"""The dtype and order in which gradients are summed, and the dtype in which they are delivered.

One linear with bfloat16 weights on four ranks, each with its own samples.
"""

from __future__ import annotations

import time
from functools import reduce
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from isp.core.comm import Mesh
from isp.core.comm.channel import DryChannel
from isp.core.layers.linear import ParallelLinear
from isp.core.layers.module import bind_names, named_parameters
from isp.core.mesh import Axis
from isp.core.mesh.layout import ParameterLayout
from isp.core.optim.main_grads import MainGradients
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.gather_reduce import ErrorLatch, GradientReducer, ShardedParameter
from isp.core.weights.gradients import ParameterGradients
from isp.core.weights.pool import MemoryPool
from isp.planner.rank import Heard
from tests.ranks import run_ranks
from tests.toolkit import CPU, ToolkitLayers, weight_mesh

WORLD, I, O, TOKENS, MICRO = 4, 6, 8, 5, 2  # noqa: E741


class Recorder(ParameterGradients):
    """Keeps the delivered gradients before they are added to others."""

    def __init__(self) -> None:
        self.delivered: list[Tensor] = []

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.delivered.append(gradient.clone())


class Setting(NamedTuple):
    mesh: Mesh
    layer: ParallelLinear
    communicator: ISPCommunicator


def setting(
    mesh: Mesh,
    *,
    reduce_dtype: torch.dtype | None = torch.float32,
    dtype: torch.dtype = torch.bfloat16,
    sum_locally: bool | None = None,
) -> Setting:
    communicator = ISPCommunicator(
        mesh[Axis.WEIGHT],
        ISPCommModelConfig(device=CPU, reduce_dtype=reduce_dtype),
        reduce_channel=mesh.open(Axis.WEIGHT, "reduce", sum_locally=sum_locally),
        poison=True,
    )
    layers = ToolkitLayers(weight=mesh[Axis.WEIGHT], communicator=communicator, dtype=dtype)
    layer = layers.column(I, (O,), std=0.1)
    bind_names(nn.ModuleDict({"layer": layer}))
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(mesh.rank))
    return Setting(mesh, layer, communicator)


def samples(rank: int, micro: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [TOKENS, I] and dy [TOKENS, O] of a rank; large and small alternate, so all sums
    round.
    """
    random = torch.Generator().manual_seed(10 * rank + micro)
    scale = (4096.0, 1 / 64, -4096.0, 1 / 64)[rank]
    x = torch.randn(TOKENS, I, generator=random) * scale
    return x.to(dtype), torch.randn(TOKENS, O, generator=random).to(dtype)


def products(micro: int, dtype: torch.dtype) -> list[Tensor]:
    """Return each rank's full dW."""
    pairs = (samples(rank, micro, dtype) for rank in range(WORLD))
    return [dy.T @ x for x, dy in pairs]


def shard_of(full: Tensor, rank: int) -> Tensor:
    return full.chunk(WORLD)[rank]


def run_backward(s: Setting, micro: int, delay: float = 0.0) -> None:
    x, dy = samples(s.mesh.rank, micro, s.layer.weight.dtype)
    y = s.layer(x.unsqueeze(0))
    time.sleep(delay)
    y.backward(dy.unsqueeze(0))


def in_float32_in_rank_order(mesh: Mesh) -> None:
    parts = [[p.float() for p in products(m, torch.bfloat16)] for m in range(MICRO)]
    expected = [shard_of(reduce(torch.add, p), mesh.rank) for p in parts]
    narrow = [shard_of(reduce(torch.add, [q.bfloat16() for q in p]), mesh.rank) for p in parts]
    backwards = [shard_of(reduce(torch.add, p[::-1]), mesh.rank) for p in parts]
    assert not torch.equal(expected[0], narrow[0].float())  # else nothing is tested here
    assert not torch.equal(expected[0], backwards[0])

    for delays in ((0.0, 0.0, 0.0, 0.0), (0.02, 0.0, 0.01, 0.0), (0.0, 0.01, 0.0, 0.02)):
        s = setting(mesh)
        recorder = Recorder()
        s.communicator.deliver_to(recorder)
        for micro in range(MICRO):
            run_backward(s, micro, delays[mesh.rank])
        s.communicator.finish()
        assert [g.dtype for g in recorder.delivered] == [torch.float32] * MICRO
        assert all(torch.equal(a, b) for a, b in zip(recorder.delivered, expected, strict=True))

    s = setting(mesh)
    gradients = MainGradients(named_parameters(nn.ModuleDict({"layer": s.layer})), mesh)
    s.communicator.deliver_to(gradients)
    for micro in range(MICRO):
        if micro == MICRO - 1:
            gradients.expect_last()
        run_backward(s, micro)
    s.communicator.finish()
    gradients.reduce()
    main = gradients.grad(s.layer.weight)
    assert main.dtype == torch.float32
    assert torch.equal(main, expected[0] + expected[1])
    assert s.layer.weight.grad is None


def in_the_gradients_own_dtype(mesh: Mesh) -> None:
    s = setting(mesh, reduce_dtype=None)
    recorder = Recorder()
    s.communicator.deliver_to(recorder)
    run_backward(s, 0)
    s.communicator.finish()
    (found,) = recorder.delivered
    assert found.dtype == torch.bfloat16
    summed = reduce(torch.add, [p.float() for p in products(0, torch.bfloat16)])
    assert torch.equal(found, shard_of(summed, mesh.rank).bfloat16())  # rounded once, at the end


def run_precision(rank: int) -> None:
    mesh = weight_mesh(rank, WORLD)
    in_float32_in_rank_order(mesh)
    in_the_gradients_own_dtype(mesh)


def test_bfloat16_gradients_are_summed_in_rank_order_and_rounded_once() -> None:
    """Catches sums rounded at each addition, in order of arrival, or cast before delivery."""
    run_ranks(WORLD, run_precision)


@pytest.mark.parametrize(("sum_locally", "item_bytes"), [(True, 2), (False, 4)])
def test_bytes_in_flight_count_the_sent_dtype(sum_locally: bool, item_bytes: int) -> None:
    """Catches bfloat16 gradients counted where float32 copies of them are sent and kept."""
    channel = DryChannel("weight", WORLD, 0, Heard(), sum_locally=sum_locally)
    limit = 2 * O * I * item_bytes
    reducer = GradientReducer(
        {Axis.WEIGHT: channel},
        MemoryPool(),
        ErrorLatch(),
        dtype=torch.float32,
        max_bytes_in_flight=limit,
    )
    layout = ParameterLayout(global_shape=(O, I), parts=WORLD, reduce_over=Axis.WEIGHT_DATA)
    weight = nn.Parameter(torch.empty(layout.local_shape, dtype=torch.bfloat16, device="meta"))
    sharded = ShardedParameter("layer.weight", weight, layout)
    for count in (1, 2, 2):
        grad = torch.empty(O, I, dtype=torch.bfloat16, device="meta")
        reducer.add(sharded, grad)
        assert reducer.bytes_in_flight == count * O * I * item_bytes
    reducer.finish()
    assert reducer.bytes_in_flight == 0
