"""Planned updates of whole matrices equal what a run sends, stores and multiplies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from isp.core.comm.tag import Purpose
from isp.core.mesh import Axis, Mode
from isp.core.optim.config import OptimizerConfig
from isp.planner.costs import Costs
from isp.planner.counts import traffic
from isp.planner.fabric import DeviceSpec
from isp.planner.memory import moments, states
from isp.planner.report import newton_schulz_of
from model.config import ModelConfig
from tests.planner.test_counts import case_of
from tests.ranks import run_each
from tests.train.runs import Layout, Meshes, Task, make_run

MUON = OptimizerConfig(name="muon")
MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
)
LAYOUTS = {
    "isp": Layout(tensor=2, weight=2, data=2),
    "fsp": Layout(mode=Mode.FSP, tensor=2, data=2),
    "zero1": Layout(data=4),
    "pipeline": Layout(pipeline=2, weight=2, data=2, micro=2),
}


def _counted(rank: int, layout: Layout) -> tuple[int, int, int, int, int]:
    """Return transfers of matrices with bytes, bytes of states, and FLOPs here and on all ranks."""
    mesh = Meshes(rank).of(layout)
    run = make_run(mesh, layout, Task(model=MODEL), dtype=torch.float32, config=MUON)
    mesh.log.collect()
    run.numbers(range(1))
    sent = [t.sent_bytes for t in mesh.log.take() if t.tag.purpose is Purpose.MATRIX]
    kept = run.optimizer.state_dict()["parameters"].values()
    states = [x for of in kept for name, x in of["tensors"].items() if name != "master"]
    flops = torch.tensor([sum(b.flops for b in run.optimizer.matrices.buckets)])
    own = int(flops)
    mesh[Axis.STAGE].all_reduce_(flops).wait()
    run.close()
    return len(sent), sum(sent), sum(x.nbytes for x in states), own, int(flops)


def test_planned_matrix_updates_equal_those_of_a_run() -> None:
    """Catches rows sent differently than planned, adamw's states planned for muon, and a matrix
    that is multiplied twice or on unevenly loaded ranks.
    """
    for name, of_ranks in run_each(4, _counted, LAYOUTS).items():
        case = replace(case_of(LAYOUTS[name], Task(model=MODEL), "float32"), optimizer=MUON)
        for rank, (calls, sent, kept, own, every) in enumerate(of_ranks):
            assert tuple(traffic(case, rank).by_purpose[Purpose.MATRIX]) == (calls, sent), name
            assert states(case, case.place(rank)).optimizer == kept, name
            place: Any = case.place(rank)
            costs = Costs(case, place, DeviceSpec.__new__(DeviceSpec))
            assert costs.of_matrices == every
            assert own * case.topology.stage < every * 1.5, "homes are even enough"
            update = next(m for m in moments(case, rank) if m.moment == "the update")
            assert update.work > sent / calls
    assert "all matrices of its stage" in newton_schulz_of(case)
