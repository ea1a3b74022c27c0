"""Learning rates and weight decays of groups of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isp.comm import Mesh
from isp.optim import MainGradients, Zero1Optimizer, check_groups
from isp.optim.update_rules import GroupValues, group_values
from isp.parallel import Axis, Topology
from isp.settings import OptimizerConfig, ParamGroupConfig
from tests.optim.places import Spec, full_loss, loss, place
from tests.optim.test_zero1 import topology
from tests.ranks import run_ranks
from tests.train.jobs import run_folders, run_forked, tensors, write_job

STEPS = 4
LR = 1e-2
SPECS = [
    Spec("embedding.weight", (8, 3), dim=0),
    Spec("layers.0.wo.weight", (5, 3), dim=0),
    Spec("layers.0.norm.weight", (4,)),
    Spec("layers.1.wo.weight", (3, 8), dim=1),
    Spec("layers.1.wo.bias", (7,), dim=0),
    Spec("head.weight", (6, 2), dim=0),
]
CONFIG = OptimizerConfig(
    lr=LR,
    weight_decay=0.1,
    param_groups=(
        ParamGroupConfig(pattern="embedding", lr_scale=0.5, weight_decay=0.0),
        ParamGroupConfig(pattern=r"^head\.", lr_scale=0.0),
        ParamGroupConfig(pattern=r"layers\.1\.", lr_scale=2.0),
        ParamGroupConfig(pattern="wo|norm", weight_decay=0.3),
    ),
)
WANTED = {
    "embedding.weight": GroupValues(0.5, 0.0),
    "layers.0.wo.weight": GroupValues(1.0, 0.3),
    "layers.0.norm.weight": GroupValues(1.0, 0.3),  # a group that says so decays it
    "layers.1.wo.weight": GroupValues(2.0, 0.1),  # in the first that matches, not in the last
    "layers.1.wo.bias": GroupValues(2.0, 0.0),
    "head.weight": GroupValues(0.0, 0.1),
}


def test_the_first_group_that_matches_counts() -> None:
    """Catches the last one counting, values mixed from two, and biases decayed unasked."""
    found = {spec.name: group_values(spec.name, len(spec.shape), CONFIG) for spec in SPECS}
    assert found == WANTED
    assert group_values("norm.weight", 1, OptimizerConfig()) == GroupValues(1.0, 0.0)
    assert group_values("wo.weight", 2, OptimizerConfig()) == GroupValues(1.0, 0.1)


def _train(rank: int, ranks: Topology) -> dict[str, Any]:
    """This rank's shards after some steps, each at its own rate."""
    mesh = Mesh(ranks, rank)
    items = [place(spec, mesh, torch.float64) for spec in SPECS]
    gradients = MainGradients(items, mesh, bucket_bytes=64)
    optimizer = Zero1Optimizer(gradients, mesh, CONFIG, bucket_bytes=64)
    for step in range(STEPS):
        gradients.zero()
        loss(items, SPECS, mesh, step + 1).backward()
        gradients.reduce()
        optimizer.step(LR * (step + 1))
    return {item.name: item.parameter.detach().numpy() for item in items}


def _reference(stage_ranks: int) -> dict[str, Tensor]:
    """Weights of torch's AdamW on whole parameters, a group each."""
    whole = {s.name: s.full(0).requires_grad_() for s in SPECS}
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": WANTED[name].weight_decay} for name, p in whole.items()],
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
    )
    for step in range(STEPS):
        adamw.zero_grad()
        for spec in SPECS:
            full_loss(spec, whole[spec.name], step + 1, stage_ranks).backward()
        for name, group in zip(whole, adamw.param_groups, strict=True):
            group["lr"] = LR * (step + 1) * WANTED[name].lr_scale
        adamw.step()
    return {name: p.detach() for name, p in whole.items()}


LAYOUTS = {
    "one process": topology(1),
    "zero1 4 of 4": topology(4, zero1=4),
    "weight 2, zero1 2": topology(4, weight=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parity_with_plain_adamw(name: str) -> None:
    """Catches a group's rows on another rank forgotten, and a schedule that undoes the scale."""
    ranks = LAYOUTS[name]
    whole = _reference(ranks.stage)
    for rank, shards in enumerate(run_ranks(ranks.world_size, _train, ranks)):
        for spec in SPECS:
            layout = spec.layout(ranks.weight, ranks.index(Axis.WEIGHT, rank))
            found = torch.from_numpy(shards[spec.name])
            # 1e-9: the layouts add the same gradients in other orders
            torch.testing.assert_close(found, layout.shard(whole[spec.name]), rtol=1e-9, atol=1e-12)
    head = next(spec for spec in SPECS if spec.name == "head.weight")
    assert torch.equal(whole["head.weight"], head.full(0)), "a rate of 0 trains nothing"


def test_a_checkpoint_is_loaded_into_other_groups(tmp_path: Path) -> None:
    """Catches states that are saved by group, and groups that a resumed run does not take up."""
    job = write_job(tmp_path)
    run_forked(job, "--training.steps", "2")
    run_forked(
        *(job, "--training.steps", "4", "--optimizer.param_groups"),
        "[{pattern: head, lr_scale: 0.25}, {pattern: ., lr_scale: 0}]",
    )
    (run,) = run_folders(job)
    before, after = tensors(run, 2), tensors(run, 4)
    for name, tensor in before.items():
        fixed = name.startswith("model.") and "head" not in name
        assert torch.equal(tensor, after[name]) == fixed, name


def test_a_group_of_nothing_is_refused() -> None:
    """Catches a typo that leaves all parameters as they were."""
    names = [spec.name for spec in SPECS]
    check_groups(names, CONFIG)
    for patterns, fault in (
        (("embeding",), r"param_groups\.0\.pattern='embeding' is in no name"),
        (("weight", "head"), r"\.1\.pattern='head' is found only in names that groups before it"),
    ):
        groups = tuple(ParamGroupConfig(pattern=pattern) for pattern in patterns)
        with pytest.raises(ValueError, match=fault) as refused:
            check_groups(names, OptimizerConfig(param_groups=groups))
        assert str(refused.value).endswith(
            "the parameters are embedding.weight, layers.N.wo.weight, layers.N.norm.weight,"
            " layers.N.wo.bias, head.weight"
        )
