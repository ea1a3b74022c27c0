"""From a configuration to what trains a model on this rank."""

from __future__ import annotations

import torch

from isp.comm import Mesh
from isp.config import JobConfig
from isp.metrics.phases import PhaseClock
from isp.models.build import build_model
from isp.optim import MainGradients, Zero1Optimizer
from isp.train.step import TrainStep

__all__ = ["make_train_step"]

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def make_train_step(
    config: JobConfig, mesh: Mesh, device: torch.device, *, clock: PhaseClock | None = None
) -> TrainStep:
    """Model, main gradients and optimizer as `config` says, with the initial weights."""
    built = build_model(
        config.model,
        config.parallel,
        mesh,
        seed=config.training.seed,
        device=device,
        dtype=_DTYPES[config.training.dtype],
    )
    gradients = MainGradients(list(built.parameters), mesh)
    optimizer = Zero1Optimizer(
        gradients,
        mesh,
        config.optimizer,
        max_norm=config.training.max_norm,
        counted_elsewhere=built.counted_elsewhere,
    )
    return TrainStep(
        built, gradients, optimizer, mesh, micro_num=config.data.micro_num, clock=clock
    )
