"""The sharded optimizer against plain update rules on whole parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isp.core.comm import Mesh
from isp.core.mesh import Axis, Topology
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.update_rules import values_of
from isp.core.optim.zero1 import StepResult, Zero1Optimizer
from tests.core.optim.places import Spec, go_backward, go_backward_plainly, loss, place, reach
from tests.core.optim.test_update_rules import plain_optimizer
from tests.ranks import run_ranks
from tests.toolkit import topology

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1)
LION = OptimizerConfig(name="lion", lr=1e-2, weight_decay=0.1, beta2=0.99)
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


def _train(
    rank: int, ranks: Topology, specs: list[Spec], max_norm: float, config: OptimizerConfig
) -> tuple[list[StepResult], dict[str, Any]]:
    """Return the results of every step, and this rank's shards at the end."""
    mesh = Mesh(ranks, rank)
    here = [s for s in specs if s.stage == mesh[Axis.PIPELINE].rank]
    items = [place(spec, mesh, torch.float64) for spec in here]
    gradients = MainGradients(items, mesh, bucket_bytes=64, rows_of=mesh[Axis.ZERO1])
    names = [spec.name for spec in specs]
    optimizer = Zero1Optimizer(
        gradients, mesh, config, max_norm=max_norm, names=names, bucket_bytes=64
    )
    results = []
    for step in range(STEPS):
        gradients.zero()
        gradients.expect_last()
        go_backward(items, specs, mesh, step + 1)
        gradients.reduce()
        results.append(optimizer.step(config.lr * (step + 1)))
    return results, {item.name: item.parameter.detach().numpy() for item in items}


def reference(
    specs: list[Spec], ranks: Topology, max_norm: float = 0.0, config: OptimizerConfig = CONFIG
) -> tuple[list[float], dict[str, Tensor]]:
    """Return norms and weights of the plain rule on whole parameters, with `go_backward`'s
    gradients.
    """
    whole = {s.name: s.full(0).requires_grad_() for s in specs}
    values = {s.name: values_of(s.name, s.layout(1, 0), config) for s in specs}
    groups = [
        {"params": [whole[s.name]], "cuts": s.cuts, **values[s.name]._asdict()} for s in specs
    ]
    optimizer = plain_optimizer(groups, config)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for spec in specs:
            kind = reach(specs, spec.name, step + 1)
            go_backward_plainly(spec, whole[spec.name], kind, step + 1, ranks)
        limit = max_norm or math.inf
        norms.append(torch.nn.utils.clip_grad_norm_(whole.values(), limit).item())
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (step + 1) * group["lr_scale"]
        optimizer.step()
    return norms, {name: p.detach() for name, p in whole.items()}


LAYOUTS = {
    "one process": topology(1),
    "zero1 2 of 4": topology(4, zero1=2),
    "weight 2, zero1 2": topology(4, weight=2),
    "stages": topology(4, weight=2, pipeline=2),
}


def assert_parity(
    ranks: Topology, specs: list[Spec], max_norm: float, config: OptimizerConfig = CONFIG
) -> None:
    results = run_ranks(ranks.world_size, _train, ranks, specs, max_norm, config)
    norms, whole = reference(specs, ranks, max_norm, config)
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


@pytest.mark.parametrize("config", [CONFIG, LION], ids=lambda config: config.name)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_sharded_optimizer_equals_a_plain_rule(name: str, config: OptimizerConfig):
    """Catches a momentum of clipped rows only, or one not updated in step; an unreached weight that
    decays or moves; and a weight reached on one replica only that does not move.
    """
    ranks = LAYOUTS[name]
    assert_parity(ranks, STAGED if ranks.pipeline > 1 else SPECS, 1.0, config)


TIED = [*STAGED, Spec("embedding", (6, 2), dim=0), Spec("embedding", (6, 2), dim=0, stage=1)]


def _norm_with_tied_weights(rank: int, ranks: Topology, counted_elsewhere: list[str]) -> float:
    """Return the gradient norm where both stages hold the same embedding."""
    mesh = Mesh(ranks, rank)
    here = [s for s in TIED if s.stage == mesh[Axis.PIPELINE].rank]
    items = [place(spec, mesh, torch.float64) for spec in here]
    gradients = MainGradients(items, mesh)
    away = counted_elsewhere if mesh[Axis.PIPELINE].rank == 1 else []
    names = [spec.name for spec in TIED[:-1]]
    optimizer = Zero1Optimizer(gradients, mesh, CONFIG, names=names, counted_elsewhere=away)
    loss(items, here, mesh, 1).backward()
    gradients.reduce()
    return optimizer.step(CONFIG.lr).grad_norm


def test_tied_weights_are_counted_once():
    """Catches a norm that counts the embedding of the last stage again."""
    ranks = topology(4, weight=2, pipeline=2)
    norms, _ = reference(TIED[:-1], ranks)
    assert (
        run_ranks(4, _norm_with_tied_weights, ranks, ["embedding"]) == [pytest.approx(norms[0])] * 4
    )
    assert run_ranks(4, _norm_with_tied_weights, ranks, [])[0] > norms[0] * 1.001


def _train_bfloat16(rank: int, num_steps: int) -> tuple[list[Any], list[Any], bool]:
    """Return weights and master rows after steps that are each too small for bfloat16."""
    mesh = Mesh(topology(2), rank)
    items = [place(spec, mesh, torch.bfloat16) for spec in SPECS]
    gradients = MainGradients(items, mesh)
    optimizer = Zero1Optimizer(gradients, mesh, CONFIG)
    for _ in range(num_steps):
        gradients.zero()
        sum((item.parameter * (1 + rank)).sum() for item in items).backward()
        gradients.reduce()
        optimizer.step(1e-4)
    shards = optimizer.state_dict()["parameters"]
    consistent = all(
        torch.equal(item.parameter[slice(*of["rows"])], of["tensors"]["master"].bfloat16())
        for item, of in ((item, shards[item.name]) for item in items)
    )
    weights = [item.parameter.detach().float().numpy() for item in items]
    return weights, [shards[s.name]["tensors"]["master"].numpy() for s in SPECS], consistent


def test_bfloat16_weights_have_float32_masters():
    """Catches updates lost in bfloat16, and masters that their weights do not follow."""
    num_steps = 20
    whole = [s.full(0).bfloat16().float() for s in SPECS]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in whole if p.dim() > 1]},
            {"params": [p for p in whole if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-4,
        betas=(CONFIG.beta1, CONFIG.beta2),
        weight_decay=0.1,
    )
    for _ in range(num_steps):
        for p in whole:
            p.grad = torch.full_like(p, 3.0)  # 1 of rank 0, 2 of rank 1
        adamw.step()
    (weights, first, consistent), (others, second, also) = run_ranks(2, _train_bfloat16, num_steps)
    assert consistent
    assert also
    for i, p in enumerate(whole):
        masters = torch.from_numpy(np.concatenate([first[i], second[i]]))
        torch.testing.assert_close(masters, p, rtol=1e-6, atol=1e-7)  # some roundings of float32
        assert np.array_equal(weights[i], others[i])
        assert np.array_equal(weights[i], masters.bfloat16().float().numpy())
        assert masters.dtype is torch.float32


def _publish_by_buckets(rank: int) -> tuple[list[str], list[list[bool]]]:
    """Return the transfers of a step, and which parameters are updated after each wait."""
    mesh = Mesh(topology(2), rank)
    items = [place(spec, mesh, torch.float64) for spec in SPECS[:3]]
    gradients = MainGradients(items, mesh)
    optimizer = Zero1Optimizer(gradients, mesh, CONFIG, bucket_bytes=0)
    old = [n.parameter.detach().clone() for n in items]

    def arrived() -> list[bool]:
        return [bool((n.parameter != o).all()) for n, o in zip(items, old, strict=True)]

    loss(items, SPECS, mesh, 1).backward()
    gradients.reduce()
    mesh.log.collect()
    optimizer.step(CONFIG.lr, wait=False)
    labels = [f"{t.kind} {t.label}" for t in mesh.log.take()]
    seen = [arrived()]
    for item in items:
        optimizer.published(item.parameter)
        optimizer.published(item.parameter)
        seen.append(arrived())
    return labels, seen


def test_updated_weights_are_sent_in_the_order_of_their_use():
    """Catches a wait for one block that waits for all, or for none."""
    for (norm, *labels), seen in run_ranks(2, _publish_by_buckets):
        names = [spec.name for spec in SPECS[:3]]
        assert norm == "all_reduce grad norm"
        assert labels == [f"all_gather weights {name} .. {name}" for name in names]
        assert seen == [[i < done for i in range(3)] for done in range(4)]


def solo(specs: list[Spec], **options: Any) -> tuple[list, MainGradients, Zero1Optimizer]:
    mesh = Mesh(topology(1), 0)
    items = [place(spec, mesh, torch.float64) for spec in specs]
    gradients = MainGradients(items, mesh)
    return items, gradients, Zero1Optimizer(gradients, mesh, CONFIG, **options)


def test_the_norm_covers_all_of_a_large_gradient():
    """Catches a norm of the first chunk only."""
    items, gradients, optimizer = solo([Spec("large", (257, 257), dim=0)])
    factors = torch.linspace(-2, 3, 257 * 257, dtype=torch.float64).view(257, 257)
    (items[0].parameter * factors).sum().backward()
    gradients.reduce()
    assert optimizer.grad_norm() == pytest.approx(factors.norm().item(), rel=1e-12)


def test_one_process_keeps_no_copies_and_sends_nothing():
    """Catches master copies where the parameter itself suffices."""
    items, gradients, optimizer = solo(SPECS)
    for item in items:
        master = optimizer.state_dict()["parameters"][item.name]["tensors"]["master"]
        assert master.data_ptr() == item.parameter.data_ptr()
    gradients.reduce()
    optimizer.step(0.1)
    assert optimizer.publish() == []


def test_misuse_is_refused():
    """Catches a step on gradients not reduced yet, and an impossible clipping limit."""
    with pytest.raises(AssertionError, match="have to be reduced"):
        solo(SPECS)[2].step(0.1)
    with pytest.raises(ValueError, match="max_norm=-1"):
        solo(SPECS, max_norm=-1)
