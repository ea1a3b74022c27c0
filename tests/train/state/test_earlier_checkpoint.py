"""A checkpoint of an earlier version, in which q, k, v, as well as gate and up, were fused.

The decoder of that version saved it after `SAVED` steps of `TASK` on `THERE`, and then trained the
steps with the results `THEN`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from isp.checkpoint import Checkpointer, TrainState
from isp.config.sections import CheckpointConfig
from isp.core.mesh import Axis, Mode
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Numbers, Run, Task, largest_difference, make_run

TASK = Task(
    model=ModelConfig(
        vocab_size=12,
        hidden_size=4,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=6,
        qkv_bias=True,
        tie_embeddings=True,
        init_std=0.3,
    )
)
THERE = Layout(data=2)
SAVED = 3
LAYOUTS = (THERE, Layout(tensor=2, weight=2, micro=2), Layout(mode=Mode.MTP, tensor=2, micro=2))
FILE = Path(__file__).with_name("earlier_checkpoint.tar.xz")
THEN = [
    (2.756132214901383, 0.8396611031896973),
    (2.637142635548951, 1.01370276761029),
    (2.511648465182419, 0.5907810608709088),
]
"""Loss and gradient norm of each step."""


def _checkpointer(run: Run, folder: Path) -> Checkpointer:
    return Checkpointer(folder, CheckpointConfig(), world=run.step.mesh[Axis.WORLD])


def _state(run: Run) -> TrainState:
    return TrainState(
        parameters=run.parameters,
        optimizer=run.optimizer,
        topology=run.step.mesh.topology,
        earlier_names=run.step.built.model.earlier_names,
    )


def _resume(rank: int, layout: Layout, folder: Path) -> Numbers:
    run = make_run(Meshes(rank).of(layout), layout, TASK)
    checkpointer = _checkpointer(run, folder)
    info = checkpointer.choose()
    assert info is not None
    checkpointer.load(info, _state(run))
    run.step.weights_changed()
    return run.numbers(range(SAVED, SAVED + len(THEN)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_checkpoint_with_fused_weights_is_resumed(layout: Layout, tmp_path: Path) -> None:
    """Catches a weight or moment of q, k, v, gate or up loaded into another of them."""
    with tarfile.open(FILE) as archive:
        archive.extractall(tmp_path, filter="data")
    for numbers in run_ranks(2, _resume, layout, tmp_path):
        for found, wanted in zip(numbers, THEN, strict=True):
            assert largest_difference(found, wanted) < 1e-12
