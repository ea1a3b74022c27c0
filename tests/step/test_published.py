"""Gathers of weights that the optimizer is still sending."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch

from isp.config import JobConfig
from isp.config.data import DataConfig
from isp.config.sections import TrainingConfig
from isp.core.comm import Mesh
from isp.core.mesh import Axis, ParallelConfig, WeightConfig
from isp.core.micro_batch import MicroBatch
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.zero1 import Zero1Optimizer
from isp.step import train_step
from isp.step.job_models import trained_model
from model.config import ModelConfig
from tests.ranks import run_ranks

MODEL = ModelConfig(
    vocab_size=16, hidden_size=8, num_layers=4, num_heads=2, intermediate_size=16, norm_eps=1e-6
)
CONFIG = JobConfig(
    model=MODEL,
    data=DataConfig(source="python-stdlib", seq_len=8),
    parallel=ParallelConfig(weight=WeightConfig(size=2)),
    training=TrainingConfig(dtype="float32"),
    optimizer=OptimizerConfig(lr=0.05),
)


def _transfers(rank: int) -> list[int]:
    """Return the transfers of weights and gradients in each of three steps."""
    mesh = Mesh(CONFIG.topology(4), rank)
    assert mesh[Axis.ZERO1].size == 2
    setattr(train_step, "Zero1Optimizer", partial(Zero1Optimizer, bucket_bytes=256))  # noqa: B010
    step = train_step.make_train_step(
        trained_model(CONFIG),
        CONFIG,
        mesh,
        torch.device("cpu"),
    )
    ids = torch.arange(8)[None] + rank
    ends = torch.tensor([0, 8], dtype=torch.int32)
    batch = MicroBatch(ids, ids.roll(-1, 1), torch.arange(8)[None], ends)
    launched = [sum(mesh[Axis.WEIGHT].progress().values())]
    for _ in range(3):
        step([batch], 0.05)
        launched.append(sum(mesh[Axis.WEIGHT].progress().values()))
    step.drain()
    return [after - before for before, after in pairwise(launched)]


def test_a_step_gathers_weights_once() -> None:
    """Catches a gather before weights are published, which would have to be repeated."""
    for first, *others in run_ranks(4, _transfers):
        assert others == [first, first]
