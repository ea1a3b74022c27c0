"""What a pipeline rank has of a model, and the plan of its step."""

from __future__ import annotations

from typing import NamedTuple

from isp.models.build import shape_only
from isp.models.model import TracedModel
from isp.parallel import Mode, ParallelConfig
from isp.parallel.layout import ParameterLayout
from isp.pipeline import PipelineOrder
from isp.weights.declare import as_chunks, weight_names
from isp.weights.grid import grid
from isp.weights.parameter import by_whole
from isp.weights.plan import Plan, plan
from isp.weights.trace import Action, Chunks

__all__ = ["RankPlan", "RankShape", "rank_plans", "rank_shape", "schedule_text"]


class RankShape(NamedTuple):
    """A pipeline rank's part of a model, as the model declares it; nothing is cut."""

    chunks: Chunks
    layouts: dict[str, ParameterLayout]
    """By parameter, or what it travels in, in order of declaration; by their names in `chunks`."""
    tied: str | None
    """The model's tied weight, if the rank has it, by its name in `chunks`."""
    frozen: frozenset[str]
    """Of `layouts`, those that are not trained."""
    trained: dict[str, ParameterLayout]
    """Of each trained parameter by itself, by its name in the model."""


def rank_shape(
    model: TracedModel,
    mode: Mode,
    order: PipelineOrder,
    rank: int,
    *,
    embed_split_hidden: bool = False,
    experts_stay: bool = False,
) -> RankShape:
    """The shape of the `rank`-th rank of a pipeline; built on the meta device."""
    stages, split = order.stages_of(rank), embed_split_hidden
    built = shape_only(
        model,
        mode,
        stages,
        order.num_stages,
        embed_split_hidden=split,
        experts_stay=experts_stay,
    )
    declared = tuple(chunk.weight_blocks() for chunk in built)
    items = [item for chunk in built for item in by_whole(chunk.shards())]
    names = {id(item.parameter): item.name for item in items} | weight_names(declared)
    tied = (id(item.parameter) for item in items if item.name == model.tied_weight)
    return RankShape(
        as_chunks(declared),
        {names[id(item.parameter)]: item.layout for item in items},
        next((names[parameter] for parameter in tied), None),
        frozenset(names[id(p.parameter)] for p in items if not p.parameter.requires_grad),
        {
            item.name: item.layout
            for chunk in built
            for item in chunk.shards()
            if item.parameter.requires_grad
        },
    )


class RankPlan(NamedTuple):
    """The plan of one pipeline rank, and what it was made for."""

    title: str
    """Its stages, such as `stage 0 and 4`."""
    plan: Plan
    chunks: Chunks
    actions: tuple[Action, ...]


def schedule_text(model: TracedModel, parallel: ParallelConfig, micro_num: int) -> str:
    """The grid of a training step of `micro_num` micro-batches on each stage, for people.

    Raises ValueError outside isp mode, where nothing travels.
    """
    plans = rank_plans(model, parallel, micro_num)
    grids = [grid(own.plan, own.chunks, own.actions) for own in plans]
    if len(grids) == 1:
        return grids[0]
    return "\n\n".join(f"{own.title}\n\n{text}" for own, text in zip(plans, grids, strict=True))


def rank_plans(model: TracedModel, parallel: ParallelConfig, micro_num: int) -> list[RankPlan]:
    """The plan of one training step on each pipeline rank.

    Raises ValueError outside isp mode, where nothing travels.
    """
    mode, order = parallel.tensor.mode, PipelineOrder(parallel.pipeline)
    if not mode.facts.gathers_weights:
        raise ValueError(
            f"parallel.tensor.mode={mode} gathers no weights, so there is no schedule to show:"
            f" use isp"
        )
    found = []
    stay = 1 < parallel.expert.size == parallel.weight.size
    for rank in range(parallel.pipeline.size):
        chunks = rank_shape(model, mode, order, rank, experts_stay=stay).chunks
        actions = order.actions(rank, micro_num)
        title = f"stage {' and '.join(map(str, order.stages_of(rank)))}"
        steps = plan(chunks, actions, parallel.weight.prefetch)
        found.append(RankPlan(title, steps, chunks, actions))
    return found
