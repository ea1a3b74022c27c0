"""What the model declares of itself, cut for any layout: parameters, and blocks in order.

The model is built once a mode, on one rank and without memory; a layout only cuts it anew. So the
plan knows no shapes or names of its own that could differ from those of a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from isp.attention import DistributedAttention
from isp.attention.cpu import CpuAttention
from isp.comm import Channel
from isp.layers.factory import LayerFactory
from isp.layers.module import NamedParameter, named_parameters
from isp.optim.buckets import DEFAULT_BUCKET_BYTES, group_gradients
from isp.optim.rows import group_published
from isp.parallel import Axis, Mode
from isp.parallel.config import LaunchPoint, WeightConfig
from isp.parallel.layout import ParameterLayout
from isp.pipeline import PipelineOrder
from isp.planner.case import Case, Place
from isp.weights.declare import as_chunks
from isp.weights.plan import Plan, plan
from isp.weights.trace import Action, Block, Chunks, recomputed_blocks
from isp.weights.wp import LocalWeights
from model.config import ModelConfig
from model.decoder import Decoder, LayerSpan
from model.stages import stage_spans

__all__ = [
    "Buckets",
    "Declaration",
    "actions_of",
    "bias_of",
    "buckets",
    "declaration",
    "has_bias",
    "layouts_of",
    "local_parameters",
    "order_of",
    "stage_chunks",
    "weight_layout",
    "weights_plan",
]


@dataclass(frozen=True, eq=False)
class Declaration:
    """A model as it is on one rank."""

    layouts: dict[str, ParameterLayout]
    """By parameter, in order of declaration."""
    blocks: tuple[Block, ...]
    """Embedding, layers, head."""


@lru_cache(maxsize=64)
def declaration(model: ModelConfig, mode: Mode, embed_split_hidden: bool) -> Declaration:
    """What `model` is made of in `mode`."""
    solo = Channel.solo()
    layers = LayerFactory(
        mode=mode,
        tensor=solo,
        weight=solo,
        communicator=LocalWeights(),
        embed_split_hidden=embed_split_hidden,
        device=torch.device("meta"),
        dtype=torch.float32,
    )
    decoder = Decoder(model, layers, DistributedAttention(CpuAttention(), solo))
    (blocks,) = as_chunks((decoder.weight_blocks(),))
    return Declaration({p.name: p.layout for p in named_parameters(decoder)}, blocks)


@lru_cache(maxsize=64)
def _bare(model: ModelConfig) -> ModelConfig:
    """The model without what decides nothing about its parameters, so that layouts share them."""
    return replace(
        model,
        checkpoint=0.0,
        checkpoint_keeps_attention=False,
        checkpoint_distribute_activations=False,
    )


@lru_cache(maxsize=64)
def _declared(model: ModelConfig, mode: Mode, embed_split_hidden: bool) -> Declaration:
    """The parameters of the bare model, and the blocks of this one."""
    bare = declaration(_bare(model), mode, embed_split_hidden)
    blocks = list(bare.blocks)
    recomputed = recomputed_blocks(model.num_layers, model.checkpoint)
    for number, again in enumerate(recomputed, start=1):
        visits = tuple(
            visit._replace(in_recompute=not model.checkpoint_keeps_attention)
            if visit.launch_point is LaunchPoint.ATTN
            else visit
            for visit in blocks[number].visits
        )
        blocks[number] = blocks[number]._replace(recomputed=again, visits=visits)
    return Declaration(bare.layouts, tuple(blocks))


def _declaration(case: Case) -> Declaration:
    return _declared(case.model, case.mode, case.parallel.weight.embed_split_hidden)


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
        _bare(case.model),
        case.mode,
        case.parallel.weight.embed_split_hidden,
        case.topology.weight,
        place.weight,
    )


@lru_cache(maxsize=64)
def _spans(model: ModelConfig, stages: int) -> list[LayerSpan]:
    return stage_spans(model, stages)


def order_of(case: Case) -> PipelineOrder:
    """Which stages the ranks of a pipeline have, and in which order they work."""
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


def weights_plan(chunks: Chunks, actions: tuple[Action, ...], config: WeightConfig) -> Plan:
    """The prefetch plan that a communicator with this configuration follows."""
    return plan(
        chunks,
        actions,
        unit=config.forward_overlap_per,
        launch=config.launch_allgather_before,
        overlap=config.overlap,
    )


def _is_on(name: str, span: LayerSpan, model: ModelConfig) -> bool:
    """Whether the stage of these layers has parameter `name`."""
    part, _, rest = name.partition(".")
    if part == "layers":
        return span.start <= int(rest.partition(".")[0]) < span.stop
    is_last = span.stop == model.num_layers
    if part == "embedding":
        return span.start == 0 or (is_last and model.tie_embeddings)
    return is_last


def weight_layout(case: Case, name: str, place: Place) -> ParameterLayout:
    """The layout of a parameter on the rank at `place`."""
    return layouts_of(case, place)[name]


def has_bias(case: Case, weight: str) -> bool:
    """Whether the layer of this weight has a bias that is read with it."""
    return bias_of(weight) in _declaration(case).layouts


def bias_of(weight: str) -> str:
    """The name of the bias beside a weight."""
    return weight.removesuffix("weight") + "bias"


def local_parameters(case: Case, place: Place) -> tuple[NamedParameter, ...]:
    """The parameters of the rank at `place`, without memory."""
    return _local_parameters(
        _bare(case.model),
        case.mode,
        case.parallel.weight.embed_split_hidden,
        case.topology.weight,
        place.weight,
        _spans_of(case, place.stage),
        case.dtype,
    )


@lru_cache(maxsize=1024)
def _local_parameters(
    model: ModelConfig,
    mode: Mode,
    embed_split_hidden: bool,
    parts: int,
    index: int,
    spans: tuple[LayerSpan, ...],
    dtype: str,
) -> tuple[NamedParameter, ...]:
    found: dict[str, NamedParameter] = {}
    declared = _layouts(model, mode, embed_split_hidden, parts, index).items()
    for name, layout in ((n, x) for span in spans for n, x in declared if _is_on(n, span, model)):
        if name in found:
            continue
        data = torch.empty(layout.local_shape, dtype=getattr(torch, dtype), device="meta")
        found[name] = NamedParameter(name, nn.Parameter(data), layout)
    return tuple(found.values())


@dataclass(frozen=True)
class Buckets:
    """What travels together at the end of a step; sizes in elements."""

    gradients: tuple[tuple[Axis, int], ...]
    """The axis over which a bucket of gradients is summed, and its length."""
    published: tuple[int, ...]
    """What a rank sends of each bucket of updated weights."""


def buckets(case: Case, place: Place) -> Buckets:
    """The buckets of the rank at `place`."""
    return _buckets(local_parameters(case, place), case.topology.zero1)


@lru_cache(maxsize=1024)
def _buckets(parameters: tuple[NamedParameter, ...], zero1: int) -> Buckets:
    gradients = group_gradients(list(parameters), DEFAULT_BUCKET_BYTES)
    published = group_published(parameters, DEFAULT_BUCKET_BYTES) if zero1 > 1 else []
    return Buckets(
        tuple((ms[0].layout.reduce_over, sum(m.parameter.numel() for m in ms)) for ms in gradients),
        tuple(sum(_slot(m.layout.local_shape, zero1) for m in ms) for ms in published),
    )


def _slot(shape: tuple[int, ...], parts: int) -> int:
    """Elements that each rank sends of a parameter, padding included."""
    size = -(-shape[0] // parts)
    for n in shape[1:]:
        size *= n
    return size
