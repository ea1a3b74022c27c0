"""`SavedStep`: saves and loads the state of a training step, for `isp train` and a user's loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isp.checkpoint import Checkpointer, CheckpointInfo, Resumed, TrainState
from isp.checkpoint.agreement import attempt
from isp.checkpoint.plain import to_json
from isp.checkpoint.state import kinds_by_name
from isp.checkpoint.storage import read_metadata
from isp.core.mesh import Axis
from isp.core.optim.torch_optimizer import TorchUpdates
from isp.core.rng import generator_states, restore_generators
from isp.step.train_step import TrainStep

__all__ = ["SavedStep"]

_TORCH_OPTIMIZER = "torch optimizer"
"""The key, in a checkpoint, of the torch optimizer's values that do not have the shape of a weight,
such as step counts."""


class SavedStep:
    """Saves and loads weights, optimizer states, skipped steps and random states.

    All methods are collectives.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step, self._optimizer = step, step.optimizer
        self.state = TrainState(
            parameters=step.built.saved,
            optimizer=step.optimizer,
            topology=step.mesh.topology,
            earlier_names=step.built.model.earlier_names,
        )

    def save(
        self,
        checkpointer: Checkpointer,
        number: int,
        *,
        tokens: int,
        shared: Mapping[str, Any],
        wait: bool,
    ) -> None:
        """Save step `number`, with the plain values `shared`; see `Checkpointer.save`."""
        kept = {"skips": self._optimizer.skip_state(), **shared}
        if (updates := self._optimizer.torch_updates) is not None:
            kept[_TORCH_OPTIMIZER] = self._values_of_all(updates)
        checkpointer.save(
            number,
            self.state,
            tokens=tokens,
            shared=kept,
            local={"rng": generator_states(self._step.device)},
            wait=wait,
        )

    def load(
        self, checkpointer: Checkpointer, info: CheckpointInfo, *, weights_only: bool = False
    ) -> Resumed:
        """Load a checkpoint, or only its weights; see `Checkpointer.load`.

        Also raises ValueError if another torch optimizer saved the checkpoint.
        """
        updates = self._optimizer.torch_updates
        # Before the tensors are loaded, as this allocates the states to load into.
        if updates is not None and not weights_only:
            _take_up_values(updates, info)
        resumed = checkpointer.load(info, self.state, weights_only=weights_only)
        if not weights_only:
            host, what = self._step.mesh.host, f"loading {info.path}"
            attempt(host, what, lambda: self._restore(resumed))
        self._step.weights_changed()
        return resumed

    def _restore(self, resumed: Resumed) -> None:
        """Restore the counts of skipped steps and the random states.

        The checkpoint may come from other code. Raises an exception if its counts or states do not
        have the form in which ISP saves them.
        """
        if "skips" in resumed.shared:
            self._optimizer.load_skip_state(resumed.shared["skips"])
        # `local` is None if the checkpoint was saved in another layout: it then has no random
        # states for this rank.
        if resumed.local is not None:
            restore_generators(self._step.device, resumed.local["rng"])

    def _values_of_all(self, updates: TorchUpdates) -> dict[str, Any]:
        """Return the torch optimizer's values for the weights of all pipeline stages.

        Values are states that do not have their weight's shape, such as step counts. Raises
        CheckpointError, on all ranks, for a value that JSON cannot hold.
        """
        mesh = self._step.mesh

        def collect() -> dict[str, Any]:
            found = updates.state_dict()
            to_json(found)  # only to raise here for a value that a checkpoint cannot hold
            # The values are equal on all ranks of a stage: one of them is enough.
            return found if mesh[Axis.STAGE].rank == 0 else {"values": {}}

        answers = attempt(mesh.host, "collecting the optimizer's values", collect)
        values = {name: value for found in answers for name, value in found["values"].items()}
        return {**answers[0], "values": values}


def _take_up_values(updates: TorchUpdates, info: CheckpointInfo) -> None:
    """Load a checkpoint's values into the torch optimizer, and allocate the checkpoint's states.

    Raises ValueError if another optimizer saved the checkpoint.
    """
    saved = info.manifest.shared.get(_TORCH_OPTIMIZER, {})
    kinds = kinds_by_name(read_metadata(info.path, info.manifest.files))
    try:
        updates.load_state_dict(saved, kinds)
    except ValueError as error:
        raise ValueError(
            f"{info.path}: its optimizer states were {error}: give the optimizer that saved them"
            f" (isp.parallelize(.., optimizer=..) or optimizer.name), or load the weights alone"
            f" (weights_only=True, or checkpoint.initial_load_path)"
        ) from None
