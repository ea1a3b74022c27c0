"""Learning rates and weight decays of groups of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isp.core.optim.config import OptimizerConfig, ParamGroupConfig
from isp.core.optim.update_rules import GroupValues, check_groups, group_values, values_of
from tests.core.optim.places import Spec
from tests.core.optim.test_zero1 import assert_parity
from tests.toolkit import topology
from tests.train.jobs import run_folders, run_forked, tensors, write_job

SPECS = [
    Spec("embedding.weight", (8, 3), dim=0),
    Spec("layers.0.wo.weight", (5, 3), dim=0),
    Spec("layers.0.norm.weight", (4,)),
    Spec("layers.1.wo.weight", (3, 8), dim=1),
    Spec("layers.1.wo.bias", (7,), dim=0),
    Spec("head.weight", (6, 2), dim=0),
]
CONFIG = OptimizerConfig(
    lr=1e-2,
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


def test_the_first_matching_group_applies() -> None:
    """Catches the last match applied, values of two groups mixed, and biases decayed by default."""
    found = {spec.name: values_of(spec.name, spec.layout(1, 0), CONFIG) for spec in SPECS}
    assert found == WANTED
    plain = OptimizerConfig()
    assert group_values("norm.weight", plain, decays=False) == GroupValues(1.0, 0.0)
    assert group_values("wo.weight", plain, decays=True) == GroupValues(1.0, 0.1)


def test_groups_equal_plain_adamw() -> None:
    """Catches rows of a group on another rank left out, and a schedule that overrides lr_scale."""
    assert_parity(topology(4, weight=2), SPECS, 0.0, CONFIG)


def test_a_checkpoint_is_loaded_into_other_groups(tmp_path: Path) -> None:
    """Catches states saved by group, and changed groups that a resumed run ignores."""
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


def test_a_group_that_matches_no_parameter_is_refused() -> None:
    """Catches a misspelled pattern that silently matches no parameter."""
    names = [spec.name for spec in SPECS]
    check_groups(names, CONFIG)
    for patterns, fault in (
        (("embeding",), r"param_groups\.0\.pattern='embeding' is in no name"),
        (("weight", "head"), r"\.1\.pattern='head' is found only in names that earlier"),
    ):
        groups = tuple(ParamGroupConfig(pattern=pattern) for pattern in patterns)
        with pytest.raises(ValueError, match=fault) as refused:
            check_groups(names, OptimizerConfig(param_groups=groups))
        assert str(refused.value).endswith(
            "the parameters are embedding.weight, layers.N.wo.weight, layers.N.norm.weight,"
            " layers.N.wo.bias, head.weight"
        )
