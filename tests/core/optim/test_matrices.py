"""Updates of whole matrices against a plain Muon, in layouts that cut them at any row."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isp.core.comm import Mesh
from isp.core.mesh import Axis, Mode
from isp.core.mesh.layout import Matrices
from isp.core.optim.config import GradScalerConfig, MuonConfig, OptimizerConfig, ParamGroupConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.matrices import _homes, make_orthogonal, matrices_of, newton_schulz
from isp.core.optim.update_rules import values_of
from isp.core.optim.zero1 import Zero1Optimizer
from isp.parity.forked import RankError
from isp.parity.reference import orthogonal
from tests.core.optim.places import Spec, go_backward, place
from tests.core.optim.test_zero1 import STEPS, reference
from tests.ranks import run_each
from tests.toolkit import topology
from tests.train.jobs import numbers, run_folders, run_forked, write_job

MUON = OptimizerConfig(
    name="muon",
    lr=1e-2,
    adamw_beta2=0.9,
    adamw_weight_decay=0.2,
    muon=MuonConfig(lr=2e-2, adjust_lr_fn="match_rms_adamw"),
    param_groups=(
        ParamGroupConfig(pattern="slow", lr=1e-3, weight_decay=0.0),
        ParamGroupConfig(pattern="head", rule="muon"),
        ParamGroupConfig(pattern="gated", split=(1, 1)),
        ParamGroupConfig(pattern="left", rule="adamw"),
    ),
)
ONE = Matrices()
SPECS = [
    Spec("slow", (7, 5), dim=0, matrices=ONE),  # 4 + 3 rows, then 2 + 2 + 2 + 1 or so in zero1
    Spec("wide", (3, 9), dim=1, matrices=ONE),
    Spec("whole", (4, 6), matrices=ONE),  # whole on each rank, like experts in mtp, msp and fsp
    Spec("norm", (4,)),
    Spec(
        "qkv",
        (10, 4),
        dim=0,
        segments=(6, 2, 2),
        matrices=Matrices(sizes=(6, 2, 2)),
        cuts=(np.s_[:6], np.s_[6:8], np.s_[8:]),
    ),
    Spec("table", (6, 3), dim=0, matrices=Matrices(of_block=False)),
    Spec("head", (6, 3), dim=0, matrices=Matrices(of_block=False)),
    Spec("left", (6, 3), dim=0, matrices=ONE),
    Spec("shared", (6, 3), dim=0),  # tied, so not updated as a matrix
    Spec(
        "turned.gated",
        (3, 2, 8),
        dim=0,
        matrices=Matrices(dim=-1),
        cuts=tuple(np.s_[e, :, part] for e in range(3) for part in (slice(4), slice(4, 8))),
    ),
]
STAGED = [spec._replace(stage=i % 2) for i, spec in enumerate(SPECS)]
LAYOUTS = {
    "zero1 4": topology(4),
    "zero1 2": topology(4, zero1=2),
    "replicas alone": topology(4, zero1=1),
    "weight 2": topology(4, weight=2),
    "weight 2, replicas alone": topology(4, weight=2, zero1=1),
    "weight 4": topology(4, weight=4),
    "msp": topology(4, tensor=2, mode=Mode.MSP),
    "pipeline": topology(4, weight=2, pipeline=2),
}


def _train(rank: int, case: Any) -> Any:
    ranks, config, *others = case
    dtype, max_norm = others or (torch.float64, 1.0)
    mesh = Mesh(ranks, rank)
    specs = STAGED if ranks.pipeline > 1 else SPECS
    here = [s for s in specs if s.stage == mesh[Axis.PIPELINE].rank]
    items = [place(spec, mesh, dtype) for spec in here]
    gradients = MainGradients(items, mesh, bucket_bytes=64, rows_of=mesh[Axis.ZERO1])
    optimizer = Zero1Optimizer(
        gradients,
        mesh,
        config,
        max_norm=max_norm,
        names=[spec.name for spec in specs],
        bucket_bytes=64,
        stream_bytes=256,
    )
    factors = (1.0,) if optimizer.scaler is None else (math.inf, 1.0)
    for step, factor in product(range(STEPS), factors):
        gradients.zero()
        gradients.expect_last()
        go_backward(items, specs, mesh, step + 1, lambda x, f=factor: optimizer.scale_loss(x) * f)
        gradients.reduce()
        assert optimizer.step(config.lr * (step + 1)).skipped is (factor != 1)
    return {item.name: item.parameter.detach().double().numpy() for item in items}


def test_updates_equal_plain_muon() -> None:
    """Catches rows of other ranks, a matrix cut at wrong rows, and a rate or rule of other
    matrices.

    Most buckets have fewer matrices than ranks, some rows do not divide, and some ranks have none.
    """
    found = run_each(4, _train, {name: (ranks, MUON) for name, ranks in LAYOUTS.items()})
    alone = run_each(1, _train, {"alone": (topology(1), MUON)})
    cases = [(topology(1), alone["alone"]), *((LAYOUTS[name], of) for name, of in found.items())]
    for ranks, of_ranks in cases:
        specs = STAGED if ranks.pipeline > 1 else SPECS
        _, whole = reference(specs, ranks, 1.0, MUON)
        for rank, shards in enumerate(of_ranks):
            for spec in (s for s in specs if s.stage == ranks.index(Axis.PIPELINE, rank)):
                layout = spec.layout(ranks.weight, ranks.index(Axis.WEIGHT, rank))
                torch.testing.assert_close(
                    torch.from_numpy(shards[spec.name]),
                    layout.shard(whole[spec.name]),
                    rtol=1e-9,
                    atol=1e-12,
                )


def test_matrix_products_are_balanced_over_ranks() -> None:
    """Catches a rank for which all others wait, at the end or after a bucket."""
    layer = [[26], [12, 12, 3], [26], [3, 26]]
    homes = iter(_homes([layer] * 4, 4))
    loads = [0] * 4
    for _ in range(4):
        for cost in (cost for costs in layer for cost in costs):
            loads[next(homes)] += cost
        assert max(loads) - min(loads) < 26
    assert set(loads) == {108}


def _same_bits(rank: int, case: Any) -> bool:
    """Return whether both configurations give the same bits."""
    one, other = (_train(rank, way) for way in case)
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_placement_and_skipped_steps_change_no_bit() -> None:
    """Catches masters or momentum on the host that are not copied in or back, a matrix whose bits
    depend on its rank or on other matrices, replicas that drift apart, a skipped step that changes
    momentum, and a loss scale that enters it.
    """
    two, bf16, whole = topology(2), torch.bfloat16, torch.float64
    narrow = replace(MUON, moment_dtype="bfloat16")
    scaled = replace(MUON, grad_scaler=GradScalerConfig(use="always", initial_scale=16.0))
    host, both, half = (replace(x, offload_states=True) for x in (MUON, narrow, scaled))
    cases = {
        "host": ((two, MUON), (two, host)),
        "masters": ((two, MUON, bf16, 1.0), (two, host, bf16, 1.0)),
        "scaled": ((two, MUON, whole, 1.0), (two, scaled, whole, 1.0)),
        "half": ((two, scaled, torch.float16, 1.0), (two, half, torch.float16, 1.0)),
        "narrow": ((two, narrow, bf16, 1.0), (two, both, bf16, 1.0)),
        "replicas": ((two, MUON, whole, 0.0), (topology(2, zero1=1), MUON, whole, 0.0)),
    }
    found = run_each(2, _same_bits, cases)
    assert {name for name, same in found.items() if not all(same)} == set()


def test_a_run_resumes_in_another_layout(tmp_path: Path) -> None:
    """Catches momentum saved or loaded as another weight's, or as adamw's."""
    job, keys = write_job(tmp_path), ("--training.dtype", "float64", "--optimizer.name", "muon")
    alone = ("--parallel.tensor.size", "1", "--parallel.weight.size", "1")
    run_forked(job, *keys, "--training.steps", "4")
    run_forked(job, *keys, "--training.steps", "2", "--job.name", "other")
    run_forked(job, *keys, *alone, "--training.steps", "4", "--job.name", "other", num_ranks=1)
    (one,), (other,) = run_folders(job), run_folders(job, "other")
    for there, here in zip(numbers(one), numbers(other), strict=True):
        assert here == pytest.approx(there, rel=1e-9)
    with pytest.raises(RankError, match="needs exp_avg and exp_avg_sq: use the rule"):
        run_forked(job, "--training.dtype", "float64", "--training.steps", "6")


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_bfloat16_updates_have_the_bits_of_torch(shape: tuple[int, int]) -> None:
    """Catches operations in another order than torch's, and a batch that differs from its
    matrices.
    """
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    w, keys = torch.zeros(shape, requires_grad=True), MuonConfig(nesterov=False)
    muon = torch.optim.Muon([w], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)
    w.grad = x[0].clone()
    muon.step()
    ratio = max(1.0, shape[0] / shape[1]) ** 0.5
    expected = torch.zeros(shape).add_(newton_schulz(x[0].bfloat16(), keys), alpha=-ratio)
    assert torch.equal(w.detach(), expected)
    wide = x.double()
    batch, singly = newton_schulz(wide, keys), [orthogonal(y, keys) for y in wide]
    torch.testing.assert_close(batch, torch.stack(singly), rtol=1e-12, atol=1e-12)
    make_orthogonal(wide.unbind(), keys)
    torch.testing.assert_close(wide, batch, rtol=1e-12, atol=1e-12)


def test_each_weight_gets_the_right_rule() -> None:
    """Catches a table, norm or tied weight updated by muon, and a param group that is ignored."""
    found = {s.name: values_of(s.name, s.layout(1, 0), MUON).rule for s in SPECS}
    assert [name for name, rule in found.items() if rule == "adamw"] == [
        "norm",
        "table",
        "left",
        "shared",
    ]
    assert set(found.values()) == {"adamw", "muon"}
    spec = Spec("gated", (9, 4), dim=0, matrices=ONE)
    with pytest.raises(ValueError, match=r"split=\[1, 1\] must add up to a divisor of the 9"):
        matrices_of(spec.name, spec.layout(1, 0), MUON)
    heads = Spec("q", (8, 4), matrices=Matrices(heads=4))
    per_head = OptimizerConfig(name="muon", muon=MuonConfig(per_head=True))
    assert [m.offsets[0] for m in matrices_of("q", heads.layout(1, 0), per_head)] == [0, 2, 4, 6]
