"""The model's declarations of itself, cut for any layout: parameters, and blocks in order.

The model is built once a mode and way of recomputing, on one rank and without memory; a layout only
cuts it anew. So the plan knows no shapes or names of its own that could differ from those of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from isp.layers.module import NamedParameter
from isp.models.build import shape_only
from isp.parallel import Axis, Mode
from isp.parallel.layout import ParameterLayout
from isp.pipeline import PipelineOrder
from isp.planner.case import Case, Place
from isp.weights.declare import as_chunks
from isp.weights.trace import Action, Block, Chunks, Visit
from model.config import ModelConfig
from model.decoder import LayerSpan, stage_spans

__all__ = [
    "BlockKind",
    "Declaration",
    "Ends",
    "actions_of",
    "bare",
    "biases_of",
    "blocks_of",
    "declaration",
    "kind_of",
    "kind_of_block",
    "layouts_of",
    "local_parameters",
    "order_of",
    "stage_chunks",
    "weight_layout",
]


@dataclass(frozen=True, eq=False)
class Declaration:
    """A model as it is on one rank."""

    layouts: dict[str, ParameterLayout]
    """By parameter, in order of declaration."""
    blocks: tuple[Block, ...]
    """All blocks: one before the layers, the layers, one behind."""
    parameters: dict[str, frozenset[str]]
    """The parameters of each block, by its name; blocks may share one."""


@lru_cache(maxsize=64)
def declaration(model: ModelConfig, mode: Mode, embed_split_hidden: bool) -> Declaration:
    """The declaration of `model` in `mode`."""
    (whole,) = shape_only(model, mode, embed_split_hidden=embed_split_hidden)
    declared, found = whole.weight_blocks(), list(whole.shards())
    names = {item.parameter: item.name for item in found}
    (blocks,) = as_chunks((declared,))
    return Declaration(
        {item.name: item.layout for item in found},
        blocks,
        {block.name: frozenset(names[p] for p in block.module.parameters()) for block in declared},
    )


@lru_cache(maxsize=64)
def bare(model: ModelConfig) -> ModelConfig:
    """The model without what decides nothing about its parameters, so that layouts share them."""
    return replace(
        model,
        checkpoint=0.0,
        checkpoint_keeps_attention=False,
        checkpoint_distribute_activations=False,
    )


def blocks_of(case: Case) -> tuple[Block, ...]:
    """All blocks of the model."""
    return _declaration(case).blocks


def _declaration(case: Case) -> Declaration:
    return declaration(case.model, case.mode, case.parallel.weight.embed_split_hidden)


@lru_cache(maxsize=512)
def _layouts(
    model: ModelConfig, mode: Mode, embed_split_hidden: bool, parts: int, index: int
) -> dict[str, ParameterLayout]:
    """The layouts of the shards number `index` of `parts`; what is replicated stays whole."""
    found = declaration(model, mode, embed_split_hidden).layouts.items()
    return {
        name: replace(layout, parts=parts, index=index)
        if layout.reduce_over is Axis.WEIGHT_DATA
        else layout
        for name, layout in found
    }


def layouts_of(case: Case, place: Place) -> dict[str, ParameterLayout]:
    """The layouts of all parameters of the model on the rank at `place`."""
    return _layouts(
        bare(case.model),
        case.mode,
        case.parallel.weight.embed_split_hidden,
        case.topology.weight,
        place.weight,
    )


@lru_cache(maxsize=64)
def _spans(model: ModelConfig, stages: int) -> list[LayerSpan]:
    return stage_spans(model, stages)


def order_of(case: Case) -> PipelineOrder:
    """The stages of a pipeline's ranks, and the order of their work."""
    return PipelineOrder(case.parallel.pipeline)


def _spans_of(case: Case, rank: int) -> tuple[LayerSpan, ...]:
    """The layers of each chunk of the `rank`-th rank of a pipeline."""
    order = order_of(case)
    spans = _spans(case.model, order.num_stages)
    return tuple(spans[stage] for stage in order.stages_of(rank))


def stage_chunks(case: Case, rank: int) -> Chunks:
    """The blocks of the `rank`-th rank of a pipeline by chunk, as its plan wants them."""
    blocks, last = _declaration(case).blocks, case.model.num_layers

    def of(span: LayerSpan) -> tuple[Block, ...]:
        first = 0 if span.start == 0 else span.start + 1  # before the layers is the embedding
        return blocks[first : len(blocks) if span.stop == last else span.stop + 1]

    return tuple(of(span) for span in _spans_of(case, rank))


class Ends(NamedTuple):
    """A chunk as the ends of the model, where it has them, and the layers between."""

    first: bool
    between: tuple[Block, ...]
    last: bool

    @classmethod
    def of(cls, case: Case, chunk: tuple[Block, ...]) -> Ends:
        """Of a chunk of `stage_chunks`."""
        blocks = _declaration(case).blocks
        first, last = chunk[0] == blocks[0], chunk[-1] == blocks[-1]
        return cls(first, chunk[first : len(chunk) - last], last)


def actions_of(case: Case, rank: int, micro_num: int) -> tuple[Action, ...]:
    """The order of work of the `rank`-th rank of a pipeline with so many micro-batches."""
    return _actions(order_of(case), rank, micro_num)


@lru_cache(maxsize=512)
def _actions(order: PipelineOrder, rank: int, micro_num: int) -> tuple[Action, ...]:
    return order.actions(rank, micro_num)


def few_micro_batches(case: Case) -> int:
    """So many micro-batches that a step of more repeats itself, [Note: Long steps]."""
    pipeline = case.parallel.pipeline
    rest = case.micro_num % pipeline.size
    return min(case.micro_num, (2 + pipeline.num_chunks) * pipeline.size + rest)


def weight_layout(case: Case, name: str, place: Place) -> ParameterLayout:
    """The layout of a parameter on the rank at `place`."""
    return layouts_of(case, place)[name]


def biases_of(chunks: Chunks) -> dict[str, str]:
    """The biases that are gathered, by the weight that they are gathered with."""
    found: dict[str, str | None] = {}
    for visit in (visit for chunk in chunks for block in chunk for visit in block.visits):
        if visit.weight is not None:
            found.setdefault(visit.weight, visit.bias)  # of the layer that reads it first
    return {weight: bias for weight, bias in found.items() if bias is not None}


BlockKind = tuple[bool, tuple[tuple[Visit, tuple[int, ...]], ...]]
"""A block's kind: whether it is recomputed, its visits, and the weights' shapes."""


def kind_of(block: Block, shapes: Mapping[str, tuple[int, ...]]) -> BlockKind:
    """The kind of a block, its weights being of these global shapes."""

    def alike(visit: Visit) -> Visit:
        again = visit.in_recompute or not block.recomputed
        return visit._replace(weight=None, bias=visit.bias and "", in_recompute=again)

    visits = ((alike(visit), shapes.get(visit.weight or "", ())) for visit in block.visits)
    return block.recomputed, tuple(visits)


def kind_of_block(case: Case, block: Block) -> BlockKind:
    """The kind of a block of the model."""
    return _kind_of_block(bare(case.model), case.mode, block)


@lru_cache(maxsize=4096)
def _kind_of_block(model: ModelConfig, mode: Mode, block: Block) -> BlockKind:
    layouts = declaration(model, mode, embed_split_hidden=False).layouts
    return kind_of(block, {name: layout.global_shape for name, layout in layouts.items()})


def local_parameters(case: Case, place: Place) -> tuple[NamedParameter, ...]:
    """The parameters of the rank at `place`, without memory."""
    return _local_parameters(
        bare(case.model),
        case.mode,
        case.parallel.weight.embed_split_hidden,
        case.topology.weight,
        place.weight,
        tuple(tuple(b.name for b in chunk) for chunk in stage_chunks(case, place.stage)),
        case.dtype,
    )


@lru_cache(maxsize=1024)
def _local_parameters(
    model: ModelConfig,
    mode: Mode,
    embed_split_hidden: bool,
    parts: int,
    index: int,
    chunks: tuple[tuple[str, ...], ...],
    dtype: str,
) -> tuple[NamedParameter, ...]:
    found: dict[str, NamedParameter] = {}
    layouts = _layouts(model, mode, embed_split_hidden, parts, index)
    of_blocks = declaration(model, mode, embed_split_hidden).parameters
    for blocks in chunks:
        own = frozenset[str]().union(*(of_blocks[block] for block in blocks))
        for name in (name for name in layouts if name in own and name not in found):
            layout = layouts[name]
            data = torch.empty(layout.local_shape, dtype=getattr(torch, dtype), device="meta")
            found[name] = NamedParameter(name, nn.Parameter(data), layout)
    return tuple(found.values())
