"""The loss scale: its rules, and an optimizer that divides the gradients by it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from isp.core.comm import Mesh
from isp.core.optim.config import GradScalerConfig, OptimizerConfig
from isp.core.optim.grad_scaler import GradScaler
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.zero1 import StepResult, Zero1Optimizer
from tests.core.optim.places import Spec, place
from tests.toolkit import topology

PLAIN = OptimizerConfig(lr=1e-2, weight_decay=0.1)


def scales(scaler: GradScaler, overflows: str) -> list[float]:
    """Return the scale after each step; `x` is a step that overflows."""
    found = []
    for step in overflows:
        scaler.update(overflow=step == "x")
        found.append(scaler.scale)
    return found


RULES = GradScalerConfig(initial_scale=64, min_scale=8, max_scale=128, growth_interval=3)


@pytest.mark.parametrize(
    ("changes", "steps", "expected"),
    [
        ({"hysteresis": 1}, "xxxxx", [32, 16, 8, 8, 8]),
        ({"hysteresis": 2}, "xxxx", [64, 32, 16, 8]),
        ({"hysteresis": 2}, "x..x", [64, 64, 64, 32]),  # good steps do not forgive, a raise does
        ({"hysteresis": 2}, "x...xx", [64, 64, 64, 128, 128, 64]),
        ({}, "......", [64, 64, 128, 128, 128, 128]),
        ({}, "..x...", [64, 64, 64, 64, 64, 128]),  # three good steps in a row
        ({"growth_factor": 1.5, "growth_interval": 1}, "..", [96, 128]),
        ({"backoff_factor": 0.25, "hysteresis": 1}, "xx", [16, 8]),
    ],
)
def test_the_scale_follows_its_rules(
    changes: dict[str, Any], steps: str, expected: list[float]
) -> None:
    """Catches a scale that changes too early, too late, by a wrong factor, or beyond its limits."""
    assert scales(GradScaler(replace(RULES, **changes)), steps) == expected


@pytest.mark.parametrize("before", ["", ".", "x", "x.", "xx", "xxxx", "....x.."])
def test_a_loaded_scale_continues_unchanged(before: str) -> None:
    """Catches a state without the scale, the good steps or the hysteresis."""
    whole = GradScaler(replace(RULES, hysteresis=3))
    scales(whole, before)
    loaded = GradScaler(replace(RULES, hysteresis=3))
    loaded.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert loaded.scale == whole.scale
    assert loaded.state_dict() == whole.state_dict()
    after = "..xx.x...x"
    assert scales(loaded, after) == scales(whole, after)


class Solo:
    """An optimizer of one process on one parameter of six elements."""

    def __init__(self, dtype: torch.dtype, config: OptimizerConfig = PLAIN) -> None:
        mesh = Mesh(topology(1), 0)
        self.item = place(Spec("weight", (3, 2)), mesh, dtype)
        self.gradients = MainGradients([self.item], mesh)
        self.optimizer = Zero1Optimizer(self.gradients, mesh, config)

    def step(self, gradient: float) -> StepResult:
        """Take a step with this gradient in every element."""
        self.gradients.zero()
        total = (self.item.parameter.double() * gradient).sum()
        self.optimizer.scale_loss(total).backward()
        self.gradients.reduce()
        return self.optimizer.step(1e-2)


def test_float16_keeps_gradients_below_its_range() -> None:
    """Catches float16 without a scale, and a reported norm of the scaled gradients."""
    tiny = 1e-8
    assert torch.tensor(tiny).half() == 0
    solo = Solo(torch.float16)
    # 2 ** -10: float16 rounds to 11 bits
    assert solo.step(tiny).grad_norm == pytest.approx(tiny * math.sqrt(6), rel=2**-10)
    shard = solo.optimizer.state_dict()["parameters"]["weight"]
    wanted = torch.full((3, 2), tiny * (1 - PLAIN.beta1))
    torch.testing.assert_close(shard["tensors"]["exp_avg"], wanted, rtol=2**-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_other_dtypes_are_not_scaled(dtype: torch.dtype) -> None:
    """Catches a scale for dtypes that need none."""
    optimizer = Solo(dtype).optimizer
    total = torch.ones(())
    assert optimizer.scaler is None
    assert optimizer.scale_loss(total) is total


def test_only_skips_at_the_smallest_scale_count_in_a_row() -> None:
    """Catches skips counted while the scale still falls, an update that does not reset the count,
    and a count that never begins.
    """
    plain = Solo(torch.float32)
    rows = []
    for gradient in (math.inf, math.nan, 1.0, math.inf):
        plain.step(gradient)
        rows.append(plain.optimizer.skipped_in_a_row)
    assert rows == [1, 2, 0, 1]
    assert plain.optimizer.num_skipped == 3

    scaler = GradScalerConfig(initial_scale=4, min_scale=1, hysteresis=2)
    scaled = Solo(torch.float16, replace(PLAIN, grad_scaler=scaler))
    rows = []
    for gradient in (math.inf, math.inf, math.inf, math.inf, math.nan, 1.0, math.inf):
        scaled.step(gradient)
        rows.append(scaled.optimizer.skipped_in_a_row)
    assert rows == [0, 0, 0, 1, 2, 0, 1], "4, 4 (hysteresis), 2, and then 1, which is the least"


def test_skips_and_scale_continue_from_a_saved_state() -> None:
    """Catches a resumed run that searches its scale anew, or loses its count of skipped steps."""
    config = replace(PLAIN, grad_scaler=GradScalerConfig(initial_scale=2, hysteresis=1))
    saved = Solo(torch.float16, config)
    for gradient in (math.inf, math.inf, math.inf):
        saved.step(gradient)
    state = json.loads(json.dumps(saved.optimizer.skip_state()))
    assert (state["num_skipped"], state["skipped_in_a_row"]) == (3, 2)
    other = Solo(torch.float16, config).optimizer
    other.load_skip_state(state)
    assert other.skip_state() == state
    assert other.scaler is not None
    assert other.scaler.scale == 1
