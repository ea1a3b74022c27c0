"""The plan of a step: each pipeline rank's chunks, order of work and prefetch plan."""

from __future__ import annotations

from typing import NamedTuple

from isp.models.build import shape_only
from isp.models.protocol import LanguageModel
from isp.parallel import ParallelConfig
from isp.pipeline import PipelineOrder
from isp.weights.declare import as_chunks
from isp.weights.grid import grid
from isp.weights.plan import Plan, plan
from isp.weights.trace import Action, Chunks

__all__ = ["RankPlan", "rank_plans", "schedule_text"]


class RankPlan(NamedTuple):
    """The plan of one pipeline rank, and what it was made for."""

    title: str
    """Its stages, such as `stage 0 and 4`."""
    plan: Plan
    chunks: Chunks
    actions: tuple[Action, ...]


def schedule_text(model: LanguageModel, parallel: ParallelConfig, micro_num: int) -> str:
    """The grid of a training step of `micro_num` micro-batches on each stage, for people.

    Raises ValueError outside isp mode, where nothing travels.
    """
    plans = rank_plans(model, parallel, micro_num)
    grids = [grid(own.plan, own.chunks, own.actions) for own in plans]
    if len(grids) == 1:
        return grids[0]
    return "\n\n".join(f"{own.title}\n\n{text}" for own, text in zip(plans, grids, strict=True))


def rank_plans(model: LanguageModel, parallel: ParallelConfig, micro_num: int) -> list[RankPlan]:
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
    for rank in range(parallel.pipeline.size):
        stages, actions = order.stages_of(rank), order.actions(rank, micro_num)
        built = shape_only(model, mode, stages, order.num_stages)
        chunks = as_chunks(tuple(chunk.weight_blocks() for chunk in built))
        title = f"stage {' and '.join(map(str, stages))}"
        steps = plan(chunks, actions, parallel.weight.prefetch)
        found.append(RankPlan(title, steps, chunks, actions))
    return found
