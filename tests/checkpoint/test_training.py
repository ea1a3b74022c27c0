"""Background saves during real training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from isp.checkpoint import Checkpointer, TrainState
from isp.config.sections import CheckpointConfig
from isp.core.mesh import Axis, Mode
from tests.checkpoint.runs import chosen
from tests.model.decoders import SMALL
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Run, Task, make_run

TASK = Task(model=replace(SMALL, num_layers=4, tie_embeddings=True))


def _state(run: Run) -> TrainState:
    topology = run.step.mesh.topology
    return TrainState(parameters=run.parameters, optimizer=run.optimizer, topology=topology)


def _checkpointer(run: Run, folder: Path) -> Checkpointer:
    return Checkpointer(folder, CheckpointConfig(), world=run.step.mesh[Axis.WORLD])


@contextmanager
def _slow_disk() -> Iterator[threading.Event]:
    """Let no shard of this process be opened for writing until the event is set."""
    free = threading.Event()

    def wait(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and str(args[0]).endswith(".distcp"):
            free.wait()

    sys.addaudithook(wait)  # audit hooks cannot be removed; the process ends with the test
    yield free
    free.set()


def _copy(run: Run) -> dict[str, np.ndarray]:
    """Return weights and optimizer states of this rank, and the number of updates."""
    found: dict[str, np.ndarray] = dict(run.weights())
    optimizer = run.optimizer.state_dict()
    for name, part in optimizer["parameters"].items():
        for kind, tensor in part["tensors"].items():
            found[f"{name}.{kind}"] = tensor.numpy().copy()
    return {**found, "updates": np.array(optimizer["step"])}


def _train_while_saving(rank: int, folder: Path, layout: Layout) -> None:
    """Save steps 2 and 4; neither is written before training has gone on by two."""
    mesh = Meshes(rank).of(layout)
    run = make_run(mesh, layout, TASK)
    expected = {}
    for step in (2, 4, 6):
        run.numbers(range(step - 2, step))
        expected[step] = _copy(run)
    run.close()
    run = make_run(mesh, layout, TASK)
    checkpointer = _checkpointer(run, folder)
    run.numbers(range(2))
    for step in (2, 4):
        with _slow_disk():
            checkpointer.save(step, _state(run), tokens=0)
            run.numbers(range(step, step + 2))
            assert step not in checkpointer.folder.steps()
        checkpointer.wait()
    for name, array in _copy(run).items():
        assert np.array_equal(array, expected[6][name]), name
    for step in (2, 4):
        info = chosen(checkpointer, step)
        checkpointer.load(info, _state(run))
        for name, array in _copy(run).items():
            assert np.array_equal(array, expected[step][name]), (step, name)


def test_a_background_save_during_training_keeps_its_step(tmp_path: Path) -> None:
    """Catches updated weights in flight that are missed, and later weights saved under an old
    step.
    """
    layout = Layout(mode=Mode.ISP, tensor=1, weight=1, data=2)  # zero1 2: weights are published
    run_ranks(layout.world, _train_while_saving, tmp_path, layout)
