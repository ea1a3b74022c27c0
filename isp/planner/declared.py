"""The model's declarations of itself, cut for any layout: parameters, and blocks in order.

A model is built once a mode, as one rank would have it and without memory; a layout only cuts it
anew. So the plan knows no shapes or names of its own that
could differ from those of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn

from isp.config.models import language_model
from isp.core.mesh import Axis, Mode, PipelineConfig
from isp.core.pipeline.order import PipelineOrder
from isp.core.section import KeyRole, defaults_of
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.core.weights.uses import Block, Use
from isp.models.build import shape_only
from isp.models.prefetch_schedule import RankShape, marked, rank_shapes
from isp.models.roles import ParameterRole
from isp.models.runtime.stage_module import StageModule
from isp.planner.case import Coordinates, PlanCase
from model.config import ModelConfig

__all__ = [
    "BlockKind",
    "all_blocks",
    "bare",
    "kind_of",
    "kinds_of",
    "local_parameters",
    "shape_of",
    "trained_parameters",
    "updated_parameters",
    "whole_shape",
]


@lru_cache(maxsize=64)
def bare(model: ModelConfig) -> ModelConfig:
    """Return the model, computed as it is by default, so that layouts share its parameters.

    It is allowed what `model` is: else a model that a run takes could not be planned.
    """
    default = defaults_of(ModelConfig, KeyRole.METHOD)
    return replace(model, **{**default, "allow_unchecked": model.allow_unchecked})


@lru_cache(maxsize=32)
def _whole(model: ModelConfig, dtype: str, mode: Mode, split: bool, stay: bool) -> StageModule:
    """All of the model on one rank, which every pipeline cuts."""
    traced = language_model(model, dtype)
    (whole,) = shape_only(traced, mode, embed_split_hidden=split, experts_stay=stay)
    return whole


@lru_cache(maxsize=1024)
def _shapes(
    model: ModelConfig,
    dtype: str,
    mode: Mode,
    split: bool,
    order: PipelineOrder,
    stay: bool,
) -> tuple[RankShape, ...]:
    """Of the ranks of a pipeline; ways of recomputing share all but the marks of blocks."""
    plain = replace(bare(model), mlp_tile_tokens=model.mlp_tile_tokens)
    traced = language_model(plain, dtype)
    if model == plain:
        return rank_shapes(traced, _whole(plain, dtype, mode, split, stay), order)
    return tuple(
        shape._replace(chunks=marked(shape.chunks, traced.trace.blocks, model.recomputation))
        for shape in _shapes(plain, dtype, mode, split, order, stay)
    )


def shape_of(case: PlanCase, rank: int) -> RankShape:
    """The part of the model that the `rank`-th rank of a pipeline has."""
    split, stay = case.parallel.weight.embed_split_hidden, case.topology.experts_stay
    return _shapes(case.model, case.dtype, case.mode, split, case.order, stay)[rank]


def whole_shape(model: ModelConfig, dtype: str, mode: Mode, *, experts_stay: bool) -> RankShape:
    """All of a model."""
    order = PipelineOrder(PipelineConfig())
    return _shapes(model, dtype, mode, False, order, experts_stay)[0]


def all_blocks(case: PlanCase) -> list[Block]:
    """The blocks of all stages, in forward order."""
    order, found = case.order, dict[int, tuple[Block, ...]]()
    for rank in range(order.config.size):
        found |= zip(order.stages_of(rank), shape_of(case, rank).chunks, strict=True)
    return [block for stage in sorted(found) for block in found[stage]]


def trained_parameters(case: PlanCase, place: Coordinates) -> list[ShardedParameter]:
    """Those of `local_parameters` that are not frozen."""
    return [item for item in local_parameters(case, place) if item.parameter.requires_grad]


def updated_parameters(case: PlanCase, place: Coordinates) -> tuple[ShardedParameter, ...]:
    """The trained parameters as the optimizer has them: each by itself, however it travels."""
    return _parameters(case, place, apart=True)


def local_parameters(case: PlanCase, place: Coordinates) -> tuple[ShardedParameter, ...]:
    """The parameters of the rank at `place`, without memory."""
    return _parameters(case, place, apart=False)


def _parameters(case: PlanCase, place: Coordinates, *, apart: bool) -> tuple[ShardedParameter, ...]:
    """As they travel, or trained ones `apart`."""
    return _local_parameters(
        bare(case.model),
        case.dtype,
        case.mode,
        case.parallel.weight.embed_split_hidden,
        case.order,
        place.stage,
        case.topology.weight,
        place.weight,
        case.topology.expert,
        apart,
    )


@lru_cache(maxsize=1024)
def _local_parameters(
    model: ModelConfig,
    dtype: str,
    mode: Mode,
    embed_split_hidden: bool,
    order: PipelineOrder,
    rank: int,
    parts: int,
    index: int,
    spread: int,
    apart: bool,
) -> tuple[ShardedParameter, ...]:
    """Those of the shards number `index` of `parts`; what is replicated stays whole.

    `spread`: ranks that have different experts; `apart`: trained ones, each by itself.
    """
    found, roles = [], language_model(model, dtype).trace.roles
    stay = spread == parts > 1
    shape = _shapes(model, dtype, mode, embed_split_hidden, order, stay)[rank]
    for name, layout in (shape.trained if apart else shape.layouts).items():
        groups = spread if roles.get(name) is ParameterRole.EXPERT else 1
        if groups > 1 or layout.reduce_over is Axis.WEIGHT_DATA:
            over = Axis.WEIGHT_DATA
            layout = replace(layout, reduce_over=over, parts=parts, index=index, groups=groups)
        data = torch.empty(layout.local_shape, dtype=getattr(torch, dtype), device="meta")
        parameter = nn.Parameter(data, requires_grad=name not in shape.frozen)
        found.append(ShardedParameter(name, parameter, layout))
    return tuple(found)


BlockKind = tuple[bool, tuple[tuple[Use, tuple[int, ...]], ...]]
"""A block's kind: whether it is recomputed, its uses, and the weights' shapes."""


def kind_of(block: Block, shapes: Mapping[str, tuple[int, ...]]) -> BlockKind:
    """The kind of a block, its weights being of these global shapes."""

    def alike(use: Use) -> Use:
        again = use.in_recompute or not block.recomputed
        return use._replace(weight=None, bias=use.bias and "", in_recompute=again)

    uses = ((alike(use), shapes.get(use.weight or "", ())) for use in block.uses)
    return block.recomputed, tuple(uses)


def kinds_of(case: PlanCase, rank: int, blocks: Iterable[Block]) -> dict[str, BlockKind]:
    """The kinds of `blocks` of the `rank`-th rank of a pipeline, by name."""
    layouts = shape_of(case, rank).layouts.items()
    shapes = {name: layout.global_shape for name, layout in layouts}
    return {block.name: kind_of(block, shapes) for block in blocks}
