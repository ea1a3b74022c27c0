"""The prefetch plan of a configuration, for people: what `isp schedule` prints."""

from __future__ import annotations

import torch

from isp.attention.distributed import DistributedAttention
from isp.attention.local import make_local_attention
from isp.comm import Channel
from isp.config import JobConfig
from isp.layers.factory import LayerFactory
from isp.parallel import Mode
from isp.pipeline import PipelineOrder
from isp.weights.declare import as_chunks
from isp.weights.grid import grid
from isp.weights.plan import plan
from isp.weights.wp import LocalWeights
from model.decoder import Decoder, LayerSpan
from model.stages import stage_spans

__all__ = ["schedule_text", "shape_only"]


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
    order = PipelineOrder(parallel.pipeline)
    ranks = range(parallel.pipeline.size)
    grids = [_rank_grid(config, order, rank) for rank in ranks]
    if len(grids) == 1:
        return grids[0]
    titles = [f"stage {' and '.join(map(str, order.stages_of(rank)))}" for rank in ranks]
    return "\n\n".join(f"{title}\n\n{text}" for title, text in zip(titles, grids, strict=True))


def _rank_grid(config: JobConfig, order: PipelineOrder, rank: int) -> str:
    spans = stage_spans(config.model, order.num_stages)
    models: list[Decoder] = []
    for stage in order.stages_of(rank):
        models.append(shape_only(config, spans[stage], models[0] if models else None))
    chunks = as_chunks(tuple(model.weight_blocks() for model in models))
    actions = order.actions(rank, config.data.micro_num)
    weight = config.parallel.weight
    steps = plan(
        chunks,
        actions,
        unit=weight.forward_overlap_per,
        launch=weight.launch_allgather_before,
        overlap=weight.overlap,
    )
    return grid(steps, chunks, actions)


def shape_only(config: JobConfig, span: LayerSpan, first: Decoder | None) -> Decoder:
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
    table = None if first is None else first.embedding
    return Decoder(config.model, layers, DistributedAttention(attention, solo), span, table=table)
