"""The prefetch plan of a configuration, for people: what `isp schedule` prints."""

from __future__ import annotations

from typing import NamedTuple

import torch

from isp.attention.distributed import DistributedAttention
from isp.attention.local import make_local_attention
from isp.comm import Channel
from isp.config import JobConfig
from isp.layers.factory import LayerFactory
from isp.pipeline import PipelineOrder
from isp.weights.declare import as_chunks
from isp.weights.grid import grid
from isp.weights.plan import Plan, plan
from isp.weights.trace import Action, Chunks
from isp.weights.wp import LocalWeights
from model.decoder import Decoder, LayerSpan
from model.stages import stage_spans

__all__ = ["RankPlan", "rank_plans", "schedule_text", "shape_only"]


class RankPlan(NamedTuple):
    """The plan of one pipeline rank, and what it was made for."""

    title: str
    """Its stages, such as `stage 0 and 4`."""
    plan: Plan
    chunks: Chunks
    actions: tuple[Action, ...]


def schedule_text(config: JobConfig) -> str:
    """The grid of one training step on each stage.

    Raises ValueError outside isp mode, where nothing travels.
    """
    plans = rank_plans(config)
    grids = [grid(own.plan, own.chunks, own.actions) for own in plans]
    if len(grids) == 1:
        return grids[0]
    return "\n\n".join(f"{own.title}\n\n{text}" for own, text in zip(plans, grids, strict=True))


def rank_plans(config: JobConfig) -> list[RankPlan]:
    """The plan of one training step on each pipeline rank.

    Raises ValueError outside isp mode, where nothing travels.
    """
    parallel = config.parallel
    if not parallel.tensor.mode.facts.gathers_weights:
        raise ValueError(
            f"parallel.tensor.mode={parallel.tensor.mode} gathers no weights, so there is no"
            f" schedule to show: use isp"
        )
    order = PipelineOrder(parallel.pipeline)
    return [_rank_plan(config, order, rank) for rank in range(parallel.pipeline.size)]


def _rank_plan(config: JobConfig, order: PipelineOrder, rank: int) -> RankPlan:
    spans = stage_spans(config.model, order.num_stages)
    models: list[Decoder] = []
    for stage in order.stages_of(rank):
        models.append(shape_only(config, spans[stage], models[0] if models else None))
    chunks = as_chunks(tuple(model.weight_blocks() for model in models))
    actions = order.actions(rank, config.data.micro_num)
    steps = plan(chunks, actions, config.parallel.weight.prefetch)
    title = f"stage {' and '.join(map(str, order.stages_of(rank)))}"
    return RankPlan(title, steps, chunks, actions)


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
