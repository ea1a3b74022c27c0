"""The prefetch plan of a configuration, for people: what `isp schedule` prints."""

from __future__ import annotations

import torch

from isp.attention.distributed import DistributedAttention
from isp.attention.local import make_local_attention
from isp.comm import Channel
from isp.config import JobConfig
from isp.layers.factory import LayerFactory
from isp.parallel import Mode
from isp.weights.declare import as_chunks
from isp.weights.grid import grid
from isp.weights.plan import plan
from isp.weights.trace import sequential_actions
from isp.weights.wp import LocalWeights
from model.decoder import Decoder

__all__ = ["schedule_text"]


def schedule_text(config: JobConfig) -> str:
    """The grid of one training step.  Raises ValueError outside isp mode, where nothing travels."""
    parallel = config.parallel
    if parallel.tensor.mode is not Mode.ISP:
        raise ValueError(
            f"parallel.tensor.mode={parallel.tensor.mode} gathers no weights, so there is no"
            f" schedule to show: use isp"
        )
    chunks = as_chunks((_shape_only(config).weight_blocks(),))
    actions = sequential_actions(config.data.micro_num)
    weight = parallel.weight
    steps = plan(
        chunks,
        actions,
        unit=weight.forward_overlap_per,
        launch=weight.launch_allgather_before,
        overlap=weight.overlap,
    )
    return grid(steps, chunks, actions)


def _shape_only(config: JobConfig) -> Decoder:
    """The model without any memory for its weights."""
    solo = Channel.solo()
    layers = LayerFactory(
        mode=config.parallel.tensor.mode,
        tensor=solo,
        weight=solo,
        communicator=LocalWeights(),
        device=torch.device("meta"),
        dtype=torch.float32,
    )
    attention = make_local_attention(device=torch.device("cpu"), dtype=torch.float32)
    return Decoder(config.model, layers, DistributedAttention(attention, solo))
