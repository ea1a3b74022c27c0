"""The prefetch plan of a training step on each pipeline rank, made without starting ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from isp.core.mesh import ParallelConfig
from isp.core.mesh.layout import ParameterLayout
from isp.core.pipeline.order import PipelineOrder
from isp.core.recompute.config import Recomputation
from isp.core.weights.declare import as_chunks, weight_names
from isp.core.weights.plan_table import grid
from isp.core.weights.prefetch_plan import PrefetchPlan, plan
from isp.core.weights.sharded_parameter import by_whole
from isp.core.weights.uses import Action, Block, Chunks, inputs_kept, recomputed_blocks
from isp.models.build import shape_only
from isp.models.runtime.stage_module import StageModule
from isp.models.sharding.pipeline_split import stages_of
from isp.models.traced_model import TracedModel

__all__ = ["RankPlan", "RankShape", "marked", "rank_plans", "rank_shapes", "schedule_text"]


class RankShape(NamedTuple):
    """The facts about the stages of one pipeline rank that a prefetch plan is made from.

    Shapes are those of whole weights, not of shards. It has no tensors.
    """

    chunks: Chunks
    """The declared blocks of each stage, with the uses of their weights."""
    layouts: dict[str, ParameterLayout]
    """By name in `chunks`, the `ParameterLayout` (shape, cut dim) of each parameter, in declared
    order; fused linears have one parameter."""
    tied: str | None
    """The name in `chunks` of the model's tied weight; None: the rank does not have it."""
    frozen: frozenset[str]
    """The names in `layouts` of parameters that are not trained."""
    trained: dict[str, ParameterLayout]
    """By name in the model, the `ParameterLayout` of each trained parameter; each of several fused
    linears has its own."""


def rank_shapes(
    model: TracedModel, whole: StageModule, order: PipelineOrder
) -> tuple[RankShape, ...]:
    """Return the `RankShape` of each rank of a pipeline.

    `whole`: the whole model as built on one rank, on the meta device; the recomputation that it was
    built with does not matter.
    """
    stages = stages_of(model.shape, model.trace, order.num_stages)
    chunks = [whole] if len(stages) == 1 else [*map(whole.of_stage, stages)]
    return tuple(
        _rank_shape(model, [chunks[number] for number in order.stages_of(rank)])
        for rank in range(order.config.size)
    )


def _rank_shape(model: TracedModel, own: list[StageModule]) -> RankShape:
    """Return the `RankShape` of a rank that has the stage modules `own`."""
    declared = tuple(chunk.weight_blocks() for chunk in own)
    shards = [item for chunk in own for item in chunk.shards()]
    # In `items` fused linears (q, k and v) are one parameter, named as in `declared`.
    items = [item for chunk in own for item in by_whole(chunk.shards())]
    names = {id(item.parameter): item.name for item in items} | weight_names(declared)
    tied = (id(item.parameter) for item in items if item.name == model.tied_weight)
    return RankShape(
        marked(as_chunks(declared), model.trace.blocks, model.recomputation),
        {names[id(item.parameter)]: item.layout for item in items},
        next((names[parameter] for parameter in tied), None),
        frozenset(names[id(p.parameter)] for p in items if not p.parameter.requires_grad),
        {item.name: item.layout for item in shards if item.parameter.requires_grad},
    )


def marked(chunks: Chunks, blocks: Sequence[str], how: Recomputation) -> Chunks:
    """Return `chunks` with `recomputed` and `input_kept` of each block set by the options `how`.

    `blocks`: the names of all blocks of the model, in order.
    """
    recomputed = dict(zip(blocks, recomputed_blocks(len(blocks), how.checkpoint), strict=True))

    def of_chunk(chunk: tuple[Block, ...]) -> Iterator[Block]:
        # A chunk also has entries for tables and head, which are not recomputed.
        own = tuple(recomputed[block.name] for block in chunk if block.name in recomputed)
        marks = zip(own, inputs_kept(own, how.segment), strict=True)
        for block in chunk:
            again, kept = next(marks) if block.name in recomputed else (False, True)
            yield block._replace(recomputed=again, input_kept=kept)

    return tuple(tuple(of_chunk(chunk)) for chunk in chunks)


class RankPlan(NamedTuple):
    """The prefetch plan of one pipeline rank, with the uses and actions it was made from."""

    title: str
    """The stages of the rank in words, such as `stage 0 and 4`."""
    plan: PrefetchPlan
    chunks: Chunks
    actions: tuple[Action, ...]
    """The forwards and backwards of the step, in order."""


def schedule_text(model: TracedModel, parallel: ParallelConfig, micro_num: int) -> str:
    """Return the prefetch plans of a step of `micro_num` micro-batches as grids, one per rank.

    Raises ValueError outside of isp mode, in which no weights are gathered.
    """
    plans = rank_plans(model, parallel, micro_num)
    grids = [grid(own.plan, own.chunks, own.actions) for own in plans]
    if len(grids) == 1:
        return grids[0]
    return "\n\n".join(f"{own.title}\n\n{text}" for own, text in zip(plans, grids, strict=True))


def rank_plans(model: TracedModel, parallel: ParallelConfig, micro_num: int) -> list[RankPlan]:
    """Return the prefetch plan of one training step on each pipeline rank.

    Raises ValueError outside of isp mode, in which no weights are gathered.
    """
    mode, order = parallel.tensor.mode, PipelineOrder(parallel.pipeline)
    if not mode.gathers_weights:
        raise ValueError(
            f"parallel.tensor.mode={mode} gathers no weights, so there is no schedule to show: use"
            f" isp"
        )
    found = []
    # If the expert group is as large as the weight group, each expert is whole on one rank, and no
    # rank gathers its weights.
    stay = 1 < parallel.expert.size == parallel.weight.size
    (whole,) = shape_only(model, mode, experts_stay=stay)
    for rank, shape in enumerate(rank_shapes(model, whole, order)):
        chunks = shape.chunks
        actions = order.actions(rank, micro_num)
        title = f"stage {' and '.join(map(str, order.stages_of(rank)))}"
        steps = plan(chunks, actions, parallel.weight.prefetch)
        found.append(RankPlan(title, steps, chunks, actions))
    return found
