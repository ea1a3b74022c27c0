"""Checkpoints of a model that the caller's own loop trains."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from isp.checkpoint import Checkpointer, Resumed, TrainState
from isp.checkpoint.agreement import attempt
from isp.checkpoint.plain import Plain
from isp.checkpoint.state import check_shapes
from isp.comm import Mesh
from isp.models.build import parameter_shapes
from isp.parallel import Axis
from isp.rng import generator_states, restore_generators
from isp.settings import CheckpointConfig
from isp.train.step import TrainStep
from isp.train.torch_states import TORCH_OPTIMIZER, take_up_values, values_of_all

__all__ = ["LoopCheckpoints", "LoopProgress"]

_EXTRA = "extra"


class LoopProgress(NamedTuple):
    """How far a loop has come."""

    steps: int = 0
    """Steps done, skipped ones too."""
    tokens: int = 0
    """Tokens with a label in them, over all ranks."""


class LoopCheckpoints:
    """Saves and loads a loop's state, each time in a folder that the caller names.

    All methods are collectives over the world.
    """

    def __init__(self, train_step: TrainStep, mesh: Mesh, device: torch.device) -> None:
        self._train_step, self._mesh, self._device = train_step, mesh, device
        self._state = TrainState(
            parameters=train_step.built.saved,
            optimizer=train_step.optimizer,
            topology=mesh.topology,
        )
        self._opened: Checkpointer | None = None

    def save(
        self, folder: Path, done: LoopProgress, extra: Mapping[str, Plain], *, keep: int
    ) -> None:
        """As `ParallelRun.save`."""
        self._train_step.optimizer.take_up_weights(only_written=True)
        shared = {"skips": self._train_step.optimizer.skip_state(), _EXTRA: extra}
        if (updates := self._train_step.optimizer.torch_updates) is not None:
            shared[TORCH_OPTIMIZER] = values_of_all(updates, self._mesh)
        self._checkpointer.at(folder, keep_latest_k=keep).save(
            done.steps,
            self._state,
            tokens=done.tokens,
            shared=shared,
            local={"rng": generator_states(self._device)},
            wait=True,
        )

    def load(self, path: Path, *, weights_only: bool) -> tuple[LoopProgress, dict[str, Plain]]:
        """As `ParallelRun.load`; how far the loop had come, too."""
        own = self._checkpointer.at(path)
        info = own.choose() or own.choose_initial(path)
        model = self._train_step.built.model
        check_shapes(info, parameter_shapes(model), model.earlier_names)
        updates = self._train_step.optimizer.torch_updates
        if updates is not None and not weights_only:
            take_up_values(updates, info)
        resumed = own.load(info, self._state, weights_only=weights_only)
        if not weights_only:
            attempt(self._mesh.host, f"loading {info.path}", partial(self._restore, resumed))
        self._train_step.weights_changed()
        done = LoopProgress() if weights_only else LoopProgress(resumed.step, resumed.tokens)
        return done, dict(resumed.shared.get(_EXTRA, {}))

    @property
    def _checkpointer(self) -> Checkpointer:
        """Opened, which all ranks do together, by the first that is saved or loaded."""
        if self._opened is None:
            world = self._mesh[Axis.WORLD]
            self._opened = Checkpointer("", CheckpointConfig(), world=world)
        return self._opened

    def _restore(self, resumed: Resumed) -> None:
        if "skips" in resumed.shared:
            self._train_step.optimizer.load_skip_state(resumed.shared["skips"])
        if resumed.local is not None:
            restore_generators(self._device, resumed.local["rng"])
