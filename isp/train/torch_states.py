"""What checkpoints keep of an optimizer of torch beside its states of weights' shapes."""

from __future__ import annotations

from typing import Any

from isp.checkpoint import CheckpointInfo
from isp.checkpoint.agreement import attempt
from isp.checkpoint.plain import to_json
from isp.checkpoint.state import kinds_by_name
from isp.checkpoint.storage import read_metadata
from isp.comm import Mesh
from isp.optim.torch_optimizer import TorchUpdates
from isp.parallel import Axis

__all__ = ["TORCH_OPTIMIZER", "take_up_values", "values_of_all"]

TORCH_OPTIMIZER = "torch optimizer"
"""Its key among the values that all ranks share."""


def values_of_all(updates: TorchUpdates, mesh: Mesh) -> dict[str, Any]:
    """The values of torch's optimizer, those of all weights; what is not plain is refused."""

    def collect() -> dict[str, Any]:
        found = updates.state_dict()
        to_json(found)
        return found if mesh[Axis.STAGE].rank == 0 else {"values": {}}

    answers = attempt(mesh.host, "collecting the optimizer's values", collect)
    values = {name: value for found in answers for name, value in found["values"].items()}
    return {**answers[0], "values": values}


def take_up_values(updates: TorchUpdates, info: CheckpointInfo) -> None:
    """Take up what `values_of_all` gave, and make room for the states in a checkpoint.

    Raises ValueError if another optimizer saved it.
    """
    saved = info.manifest.shared.get(TORCH_OPTIMIZER, {})
    kinds = kinds_by_name(read_metadata(info.path, info.manifest.files))
    try:
        updates.load_state_dict(saved, kinds)
    except ValueError as error:
        raise ValueError(
            f"{info.path}: its optimizer states were {error}: give the optimizer that saved them"
            f" (isp.parallelize(.., optimizer=..) or optimizer.name), or load the weights alone"
            f" (weights_only=True, or checkpoint.initial_load_path)"
        ) from None
