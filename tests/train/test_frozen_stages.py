"""Pipelines with frozen weights train the others as data ranks do, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

from isp.core.mesh import Mode, PipelineSchedule
from isp.core.optim.config import OptimizerConfig
from isp.models.loading import begun_by_the_model
from isp.models.traced_model import TracedModel
from model.decoder import Decoder
from tests.ranks import run_ranks
from tests.train.runs import OPTIMIZER, Layout, Meshes, Numbers, Task, largest_difference, make_run
from tests.train.test_muon import MUON
from tests.train.test_pipeline import MODEL

CONFIG = replace(MODEL, num_layers=4, tie_embeddings=True)
FROZEN = ("embed_tokens", "layers.0.", "o_proj", "norm")
"""Words of frozen parameters: the table of both ends, all of the first block, and parts of
others.
"""
LAYOUTS = (
    Layout(data=2, micro=2),
    Layout(mode=Mode.MTP, pipeline=2, micro=4),
    Layout(pipeline=2, schedule=PipelineSchedule.ZBV, chunks=2, micro=4),
    Layout(pipeline=2, schedule=PipelineSchedule.INTERLEAVED, chunks=2, micro=4),
)


def _task(frozen: Collection[str]) -> Task:
    """Return a task of a decoder whose parameters with these words in their names are frozen."""
    with torch.device("meta"):
        decoder = Decoder(CONFIG)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(not any(word in name for word in frozen))
    model: Any = TracedModel(decoder, weights=begun_by_the_model(decoder), in_place=False)
    return Task(model=model)


def _numbers(rank: int) -> list[list[Numbers]]:
    """Return the results by optimizer and layout."""
    meshes, task = Meshes(rank), _task(FROZEN)

    def numbers(layout: Layout, config: OptimizerConfig) -> Numbers:
        run = make_run(meshes.of(layout), layout, task, config=config)
        found = run.numbers(range(3))
        run.close()
        return found

    return [[numbers(layout, config) for layout in LAYOUTS] for config in (OPTIMIZER, MUON)]


def test_pipelines_with_frozen_tables_train_as_data_ranks() -> None:
    """Catches gradients promised, or summed over stages, for a frozen table; a first stage whose
    output has no gradient; and matrices that Muon leaves out, or updates although frozen.
    """
    for expected, *others in itertools.chain(*run_ranks(2, _numbers)):
        for layout, found in zip(LAYOUTS[1:], others, strict=True):
            for series in zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True):
                assert largest_difference(*series) < 1e-9, layout


def _nothing_trained(rank: int) -> None:
    layout, task = LAYOUTS[1], _task(("embed_tokens", "layers.2.", "layers.3.", "norm"))
    if rank == 0:
        make_run(Meshes(rank).of(layout), layout, task)
        return
    with pytest.raises(
        ValueError, match=r"this rank has no trainable weights: .* parallel\.pipeline\.size"
    ):
        make_run(Meshes(rank).of(layout), layout, task)


def test_a_stage_with_nothing_to_train_is_refused() -> None:
    """Catches an IndexError where a whole stage is frozen."""
    run_ranks(2, _nothing_trained)
