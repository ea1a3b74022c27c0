"""Parameters and blocks of a model on any rank, from the model's own declarations.

A model is built once per mode on the meta device, as on a single rank; a layout cuts it into shards
and stages. So the names and shapes in a plan are those of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from isp.core.mesh import Axis, Mode, PipelineConfig
from isp.core.pipeline.order import PipelineOrder
from isp.core.section import KeyRole, defaults_of
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.core.weights.uses import Block, Use
from isp.models.build import shape_only
from isp.models.rank_plans import RankShape, marked, rank_shapes
from isp.models.roles import ParameterRole
from isp.models.runtime.stage_module import StageModule
from isp.planner.case import Coordinates, PlanCase
from model.build import language_model
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
    """Return `model` with defaults for all keys of the role METHOD, such as recomputation.

    Such keys say how a model is computed, and change no parameter: layouts that differ only in them
    share the cached results of functions that take a bare model. `allow_unchecked` is kept, since
    the planner has to accept every model that a run accepts.
    """
    default = defaults_of(ModelConfig, KeyRole.METHOD)
    return replace(model, **{**default, "allow_unchecked": model.allow_unchecked})


@lru_cache(maxsize=32)
def _whole(model: ModelConfig, dtype: str, mode: Mode, split: bool, stay: bool) -> StageModule:
    """Return the whole model as one stage on the meta device; `_shapes` cuts it into stages."""
    traced = language_model(model, dtype)
    (whole,) = shape_only(traced, mode, embed_split_hidden=split, experts_stay=stay)
    return whole


class _Cut(NamedTuple):
    """Everything that decides which part of a model each rank of a pipeline has: a cache key."""

    model: ModelConfig
    dtype: str
    mode: Mode
    split: bool
    """True if the embedding is split over hidden features, not over entries."""
    order: PipelineOrder
    stay: bool
    """True if each expert is whole on one rank, so that its weights are not gathered."""


def _cut_of(case: PlanCase) -> _Cut:
    """Return the cut of a planned layout."""
    split, stay = case.parallel.weight.embed_split_hidden, case.topology.experts_stay
    return _Cut(case.model, case.dtype, case.mode, split, case.order, stay)


@lru_cache(maxsize=1024)
def _shapes(cut: _Cut) -> tuple[RankShape, ...]:
    """Return the part of the model on each rank of a pipeline.

    Models that differ only in recomputation share cached parameters and uses: only the flags of
    their blocks that say what is recomputed are set anew (`marked`).
    """
    model = cut.model
    plain = replace(bare(model), mlp_tile_tokens=model.mlp_tile_tokens)
    traced = language_model(plain, cut.dtype)
    if model == plain:
        whole = _whole(plain, cut.dtype, cut.mode, cut.split, cut.stay)
        return rank_shapes(traced, whole, cut.order)
    return tuple(
        shape._replace(chunks=marked(shape.chunks, traced.trace.blocks, model.recomputation))
        for shape in _shapes(cut._replace(model=plain))
    )


def shape_of(case: PlanCase, rank: int) -> RankShape:
    """Return the part of the model on the `rank`-th rank of a pipeline."""
    return _shapes(_cut_of(case))[rank]


def whole_shape(model: ModelConfig, dtype: str, mode: Mode, *, experts_stay: bool) -> RankShape:
    """Return the parameters and blocks of a model as one pipeline stage, with their full sizes.

    `mode` decides which weights are fused or sharded. `experts_stay`: each expert is whole on one
    rank, so that its weights are not gathered.
    """
    order = PipelineOrder(PipelineConfig())
    return _shapes(_Cut(model, dtype, mode, False, order, experts_stay))[0]


def all_blocks(case: PlanCase) -> list[Block]:
    """Return the blocks of all stages, in forward order."""
    order, found = case.order, dict[int, tuple[Block, ...]]()
    for rank in range(order.config.size):
        found |= zip(order.stages_of(rank), shape_of(case, rank).chunks, strict=True)
    return [block for stage in sorted(found) for block in found[stage]]


def trained_parameters(case: PlanCase, place: Coordinates) -> list[ShardedParameter]:
    """Return the trained parameters of the rank at `place`; fused ones count as one."""
    return [item for item in local_parameters(case, place) if item.parameter.requires_grad]


def updated_parameters(case: PlanCase, place: Coordinates) -> tuple[ShardedParameter, ...]:
    """Return the trained parameters of the rank at `place`, as its optimizer updates them.

    Where weights are fused for the all-gather, such as q, k and v, each part is a parameter here.
    """
    return _parameters(case, place, apart=True)


def local_parameters(case: PlanCase, place: Coordinates) -> tuple[ShardedParameter, ...]:
    """Return the parameters of the rank at `place` on the meta device; fused ones count as one."""
    return _parameters(case, place, apart=False)


def _parameters(case: PlanCase, place: Coordinates, *, apart: bool) -> tuple[ShardedParameter, ...]:
    """Return `local_parameters`, or, if `apart`, `updated_parameters`."""
    cut = _cut_of(case)
    return _local_parameters(
        cut._replace(model=bare(cut.model)),
        place.stage,
        case.topology.weight,
        place.weight,
        case.topology.expert,
        apart,
    )


@lru_cache(maxsize=1024)
def _local_parameters(
    cut: _Cut,
    rank: int,
    parts: int,
    index: int,
    spread: int,
    apart: bool,
) -> tuple[ShardedParameter, ...]:
    """Return shard `index` of `parts` of each parameter; replicated parameters stay whole.

    `spread` is the number of ranks with different experts. If `apart`, only trained parameters are
    returned, and fused ones as their parts. The arguments are only what affects the result, so that
    layouts which differ in anything else share a cached one.
    """
    found, roles = [], language_model(cut.model, cut.dtype).trace.roles
    shape = _shapes(cut)[rank]
    for name, layout in (shape.trained if apart else shape.layouts).items():
        groups = spread if roles.get(name) is ParameterRole.EXPERT else 1
        if groups > 1 or layout.reduce_over is Axis.WEIGHT_DATA:
            over = Axis.WEIGHT_DATA
            layout = replace(layout, reduce_over=over, parts=parts, index=index, groups=groups)
        data = torch.empty(layout.local_shape, dtype=getattr(torch, cut.dtype), device="meta")
        parameter = nn.Parameter(data, requires_grad=name not in shape.frozen)
        found.append(ShardedParameter(name, parameter, layout))
    return tuple(found)


BlockKind = tuple[bool, tuple[tuple[Use, tuple[int, ...]], ...]]
"""Kind of a block: its recomputation, its uses, and the shapes of its weights."""


def kind_of(block: Block, shapes: Mapping[str, tuple[int, ...]]) -> BlockKind:
    """Return the kind of a block: blocks of equal kind have equal records (`isp.planner.record`).

    `shapes` has the global shapes of weights by name.
    """

    def nameless(use: Use) -> Use:
        # Weights have other names in each block, so their names are left out of the kind; a bias
        # keeps an empty name, to tell that there is one.
        again = use.in_recompute or not block.recomputed
        return use._replace(weight=None, bias=use.bias and "", in_recompute=again)

    uses = ((nameless(use), shapes.get(use.weight or "", ())) for use in block.uses)
    return block.recomputed, tuple(uses)


def kinds_of(case: PlanCase, rank: int, blocks: Iterable[Block]) -> dict[str, BlockKind]:
    """Return by block name the kinds of `blocks` on the `rank`-th rank of a pipeline.

    Blocks of one kind have the same uses and weight shapes, and are rehearsed once.
    """
    known = _kinds(_cut_of(case), rank)
    return {block.name: known[block.name] for block in blocks}


@lru_cache(maxsize=1024)
def _kinds(cut: _Cut, rank: int) -> dict[str, BlockKind]:
    """Return the kind of each block on the `rank`-th rank of a pipeline, by block name."""
    shape = _shapes(cut)[rank]
    shapes = {name: layout.global_shape for name, layout in shape.layouts.items()}
    return {block.name: kind_of(block, shapes) for chunk in shape.chunks for block in chunk}
