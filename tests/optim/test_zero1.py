"""The sharded optimizer against plain torch.optim.AdamW on whole parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from isp.comm import Mesh
from isp.optim import MainGradients, StepResult, Zero1Optimizer
from isp.parallel import Axis, Mode, ParallelConfig, Topology
from isp.parallel.config import PipelineConfig, TensorConfig, WeightConfig, Zero1Config
from isp.settings import OptimizerConfig
from tests.optim.places import Spec, full_loss, loss, place
from tests.ranks import run_ranks

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1)
STEPS = 4
SPECS = [
    Spec("even", (8, 3), dim=0),
    Spec("uneven", (5, 3), dim=0),  # 3 + 2 rows on two ranks, then 2 + 1 + 0 + 0 or so in zero1
    Spec("few", (2, 2), dim=0),
    Spec("wide", (3, 8), dim=1),
    Spec("fused", (10, 2), dim=0, segments=(6, 2, 2)),
    Spec("bias", (7,), dim=0),
    Spec("norm", (4,)),
    Spec("scalar", (1,)),
]
STAGED = [spec._replace(stage=i % 2) for i, spec in enumerate(SPECS)]


def topology(world: int, *, weight: int = 1, pipeline: int = 1, zero1: int = -1) -> Topology:
    return Topology.create(
        world,
        ParallelConfig(
            tensor=TensorConfig(mode=Mode.ISP),
            weight=WeightConfig(size=weight),
            pipeline=PipelineConfig(size=pipeline),
            zero1=Zero1Config(size=zero1),
        ),
    )


def _train(
    rank: int,
    ranks: Topology,
    specs: list[Spec],
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
) -> tuple[list[StepResult], dict[str, Any]]:
    """Results of every step, and this rank's shards at the end."""
    mesh = Mesh(ranks, rank)
    here = [s for s in specs if s.stage == mesh[Axis.PIPELINE].rank]
    items = [place(spec, mesh, dtype) for spec in here]
    gradients = MainGradients(items, mesh, bucket_bytes=64)
    optimizer = Zero1Optimizer(gradients, mesh, CONFIG, bucket_bytes=64, **options)
    results = []
    for step in range(STEPS):
        gradients.zero()
        gradients.expect_last()
        loss(items, here, mesh, step + 1).backward()
        gradients.reduce()
        results.append(optimizer.step(CONFIG.lr * (step + 1)))
    return results, {name: parameter.detach().numpy() for name, parameter, _ in items}


def reference(
    specs: list[Spec], stage_ranks: int, max_norm: float = 0.0
) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and weights of plain AdamW on whole parameters."""
    whole = {s.name: s.full(0).requires_grad_() for s in specs}
    groups = [
        {"params": [p for p in whole.values() if p.dim() > 1]},
        {"params": [p for p in whole.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (CONFIG.beta1, CONFIG.beta2)
    adamw = torch.optim.AdamW(groups, betas=betas, eps=CONFIG.eps, weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        adamw.zero_grad()
        for spec in specs:
            full_loss(spec, whole[spec.name], step + 1, stage_ranks).backward()
        limit = max_norm or math.inf
        norms.append(torch.nn.utils.clip_grad_norm_(whole.values(), limit).item())
        for group in adamw.param_groups:
            group["lr"] = CONFIG.lr * (step + 1)
        adamw.step()
    return norms, {name: p.detach() for name, p in whole.items()}


LAYOUTS = {
    "one process": topology(1),
    "zero1 1 of 4": topology(4, zero1=1),
    "zero1 2 of 4": topology(4, zero1=2),
    "zero1 4 of 4": topology(4, zero1=4),
    "weight 2, zero1 2": topology(4, weight=2),
    "weight 4": topology(4, weight=4),
}


def _assert_parity(ranks: Topology, specs: list[Spec], max_norm: float) -> None:
    results = run_ranks(ranks.world_size, _train, ranks, specs, {"max_norm": max_norm})
    norms, whole = reference(specs, ranks.stage, max_norm)
    assert max_norm < min(norms)
    for rank, (steps, shards) in enumerate(results):
        # 1e-9: the layouts add the same squares and gradients in other orders
        assert [s.grad_norm for s in steps] == pytest.approx(norms, rel=1e-9)
        assert not any(s.skipped for s in steps)
        for spec in (s for s in specs if s.stage == ranks.index(Axis.PIPELINE, rank)):
            expected = spec.layout(ranks.weight, ranks.index(Axis.WEIGHT, rank)).shard(
                whole[spec.name]
            )
            found = torch.from_numpy(shards[spec.name])
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("name", LAYOUTS)
def test_parity_with_plain_adamw(name: str, max_norm: float):
    """Catches rows updated twice or by nobody, wrong clipping, decayed norms, wrong squares."""
    _assert_parity(LAYOUTS[name], SPECS, max_norm)


def test_parity_over_pipeline_stages():
    """Catches a norm of one stage only, which clips each stage by its own factor."""
    _assert_parity(topology(4, weight=2, pipeline=2), STAGED, 1.0)
