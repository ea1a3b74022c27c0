"""Layouts of 1,024 ranks, from start to end in one process, over groups that transfer nothing.

Pipelines are left out, since stages send each other the shapes of their tensors.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from isp.core.comm import Channel, Mesh
from isp.core.mesh import Axis, Mode
from isp.planner.counts import traffic
from isp.planner.memory import states
from model.config import ModelConfig
from tests.planner.cases import Counts, counted, plan_case
from tests.ranks import run_ranks
from tests.train.runs import Layout, Task, make_run

WORLD = 1024
MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    intermediate_size=128,
    checkpoint=0.5,
)
LAYOUTS = {
    "isp": Layout(tensor=8, weight=64, data=128, micro=2),
    "isp, zero1 4": Layout(tensor=4, weight=16, data=256, zero1=4),
    "msp": Layout(mode=Mode.MSP, tensor=8, data=128, zero1=16),
    "mtp": Layout(mode=Mode.MTP, tensor=4, data=256),
}
RANK = 777


class _FakeMesh(Mesh):
    """A mesh whose host group also has the fake backend, which needs no other rank."""

    def open_host(self, axis: Axis, name: str) -> Channel:
        return self[Axis.WORLD]


def _one_rank(_: int, layout: Layout, rank: int) -> tuple[Counts, int]:
    """Return the counts of a step on `rank`, and bytes of weights, gradients and optimizer."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    mesh = _FakeMesh(layout.topology(), rank)
    run = make_run(mesh, layout, Task(model=MODEL))
    grad_norm = run.optimizer.grad_norm

    def finite() -> float:  # fake groups send nothing, so buffers have arbitrary contents
        grad_norm()
        return 1.0

    run.optimizer.grad_norm = finite  # type: ignore[method-assign]
    run.numbers(range(1))
    mesh.log.collect()
    run.numbers(range(2, 3))
    transfers = counted(mesh.log)
    shards = run.optimizer.state_dict()["parameters"].values()
    held = sum(item.parameter.nbytes for item in run.parameters) * 2
    held += sum(x.nbytes for s in shards for kind, x in s["tensors"].items() if kind != "master")
    return transfers, held


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_of_1024_ranks_equals_its_plan(name: str) -> None:
    """Catches group arithmetic, shards or counts that are only right for a few ranks."""
    layout = LAYOUTS[name]
    assert layout.world == WORLD
    ((transfers, held),) = run_ranks(1, _one_rank, layout, RANK)
    case = plan_case(layout, MODEL, "float64", on_cpu=False)
    planned = traffic(case, RANK).by_channel
    # the step starts after the broadcast of the data
    planned.pop(("broadcast", Axis.TENSOR.value), None)
    assert transfers == planned
    assert held == states(case, case.place(RANK)).states
