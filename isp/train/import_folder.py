"""A Hugging Face folder as a checkpoint that a run of any layout begins from."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pydantic import TypeAdapter

from isp.checkpoint import Checkpointer
from isp.checkpoint.folder import describe_contents
from isp.checkpoint.state import TrainState
from isp.comm import Mesh
from isp.config import JobConfig
from isp.config.models import language_model
from isp.data.config import DataConfig
from isp.models.build import build_model
from isp.parallel import Axis, ParallelConfig
from isp.parallel.topology import Topology
from isp.settings import CheckpointConfig, TrainingConfig
from isp.settings.packages import require
from isp.train.begin_from import check_folder, load_folder
from isp.train.resume import saved_values
from model.config import ModelConfig
from model.huggingface import with_init_from

__all__ = ["import_folder"]


def import_folder(folder: Path, into: Path, *, dtype: str) -> int:
    """Write the weights in `folder` as checkpoint `step_0` of `into`; returns the parameters.

    The whole model is in memory, in `dtype`. Raises ValueError, before it writes anything, if
    `into` is not empty, or `folder` has no model that the decoder computes.
    """
    require("isp checkpoint import", "safetensors")
    if describe_contents(into) not in ("is empty", "does not exist"):
        raise ValueError(f"--into {into}: it {describe_contents(into)}: name an empty folder")
    # First as typed: a name of the hub is recognized only in a relative path.
    section = with_init_from({"init_from": str(folder)}) | {"init_from": str(folder.absolute())}
    model = TypeAdapter(ModelConfig).validate_json(json.dumps(section))
    check_folder(model)
    config = JobConfig(
        model=model,
        data=DataConfig(source=str(folder)),
        training=TrainingConfig(dtype=dtype),  # type: ignore[arg-type]
    )
    mesh = Mesh(Topology.create(1, ParallelConfig()), 0)
    built = build_model(
        language_model(model, dtype),
        config.parallel,
        mesh,
        seed=0,
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype),
    )
    state = TrainState(parameters=built.parameters, optimizer=None, topology=mesh.topology)
    load_folder(state, model)
    with Checkpointer(into, CheckpointConfig(), world=mesh[Axis.WORLD]) as checkpointer:
        shared = saved_values(config, mesh.topology)
        checkpointer.save(0, state, tokens=0, shared=shared, wait=True)
    return built.model.num_parameters
