"""The prefetch plan of a configuration, for people: what `isp schedule` prints."""

from __future__ import annotations

import torch

from isp.attention.distributed import DistributedAttention
from isp.attention.local import make_local_attention
from isp.comm import Channel
from isp.config import JobConfig
from isp.layers.factory import LayerFactory
from isp.parallel import Mode
from isp.pipeline import stage_actions
from isp.weights.declare import as_chunks
from isp.weights.grid import grid
from isp.weights.plan import plan
from isp.weights.wp import LocalWeights
from model.decoder import Decoder, LayerSpan
from model.stages import stage_spans

__all__ = ["schedule_text"]


def schedule_text(config: JobConfig) -> str:
    """The grid of one training step on each stage.

    Raises ValueError outside isp mode, where nothing travels.
    """
    parallel = config.parallel
    if parallel.tensor.mode is not Mode.ISP:
        raise ValueError(
            f"parallel.tensor.mode={parallel.tensor.mode} gathers no weights, so there is no"
            f" schedule to show: use isp"
        )
    stages = parallel.pipeline.size
    grids = [_stage_grid(config, stage) for stage in range(stages)]
    if stages == 1:
        return grids[0]
    return "\n\n".join(f"stage {stage}\n\n{text}" for stage, text in enumerate(grids))


def _stage_grid(config: JobConfig, stage: int) -> str:
    stages, micro_num = config.parallel.pipeline.size, config.data.micro_num
    span = stage_spans(config.model, stages)[stage]
    chunks = as_chunks((_shape_only(config, span).weight_blocks(),))
    actions = stage_actions(stage, stages, micro_num)
    weight = config.parallel.weight
    steps = plan(
        chunks,
        actions,
        unit=weight.forward_overlap_per,
        launch=weight.launch_allgather_before,
        overlap=weight.overlap,
    )
    return grid(steps, chunks, actions)


def _shape_only(config: JobConfig, span: LayerSpan) -> Decoder:
    """A stage of the model without any memory for its weights."""
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
    return Decoder(config.model, layers, DistributedAttention(attention, solo), span)
