"""Muon in every layout against a plain loop without layouts, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isp.core.mesh import Mode, PipelineSchedule
from isp.core.optim.config import MuonConfig, OptimizerConfig
from tests.train.runs import Layout
from tests.train.test_layouts import (
    ALL,
    FIVE,
    GRID,
    TIED,
    WORLDS,
    Case,
    assert_as_plain_torch,
    cases_of,
)

MUON = OptimizerConfig(
    name="muon",
    lr=1e-2,
    muon=MuonConfig(lr=2e-2, adjust_lr_fn="match_rms_adamw", per_head=True),
)
STEPS = (0, 1, 7, 4)
"""Trained steps; in step 7 no rank has a label, so it is skipped."""
SOME = [
    Case(Layout(weight=4, data=4)),
    Case(Layout(tensor=2, weight=2, data=2, micro=2, zero1=1), TIED, saving=ALL),
    Case(Layout(mode=Mode.FSP, tensor=2, data=2), replace(GRID, num_layers=2)),
    Case(
        Layout(pipeline=2, tensor=2, weight=2, micro=2, schedule=PipelineSchedule.ZBV, chunks=2),
        replace(FIVE, tie_embeddings=True),
    ),
]


@pytest.mark.slow
def test_some_layouts_train_as_plain_muon() -> None:
    """Catches heads cut at other rows, wrong replicas of a stage, and tied tables updated by muon.

    The sweep below has all other layouts.
    """
    assert_as_plain_torch(SOME, MUON, STEPS)


@pytest.mark.sweep
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", WORLDS)
def test_every_layout_trains_as_plain_muon(world: int) -> None:
    """Catches a row sent to or received from a wrong rank in some layout."""
    assert_as_plain_torch(cases_of(world), MUON, STEPS)
