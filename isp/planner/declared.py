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
from isp.parallel.config import WeightConfig
from isp.parallel.layout import ParameterLayout
from isp.pipeline import PipelineOrder
from isp.planner.case import Case, Place
from isp.weights.declare import as_chunks
from isp.weights.plan import Plan, plan
from isp.weights.trace import Action, Block, Chunks
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
    "cut",
    "declaration",
    "has_bias",
    "local_parameters",
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


def _declaration(case: Case) -> Declaration:
    return declaration(case.model, case.mode, case.parallel.weight.embed_split_hidden)


@lru_cache(maxsize=64)
def _spans(model: ModelConfig, stages: int) -> list[LayerSpan]:
    return stage_spans(model, stages)


def _span(case: Case, stage: int) -> LayerSpan:
    return _spans(case.model, case.topology.pipeline)[stage]


def stage_chunks(case: Case, stage: int) -> Chunks:
    """The blocks of a stage, as its plan wants them."""
    span, blocks = _span(case, stage), _declaration(case).blocks
    start = 0 if span.start == 0 else span.start + 1  # before the layers there is the embedding
    stop = len(blocks) if span.stop == case.model.num_layers else span.stop + 1
    return (blocks[start:stop],)


def actions_of(case: Case, stage: int, micro_num: int) -> tuple[Action, ...]:
    """The order of work of a stage with so many micro-batches."""
    return PipelineOrder(case.parallel.pipeline).actions(stage, micro_num)


def weights_plan(chunks: Chunks, actions: tuple[Action, ...], config: WeightConfig) -> Plan:
    """The prefetch plan that a communicator with this configuration follows."""
    return plan(
        chunks,
        actions,
        unit=config.forward_overlap_per,
        launch=config.launch_allgather_before,
        overlap=config.overlap,
    )


def _is_on(name: str, span: LayerSpan, num_layers: int) -> bool:
    """Whether the stage of these layers has parameter `name`."""
    part, _, rest = name.partition(".")
    if part == "layers":
        return span.start <= int(rest.partition(".")[0]) < span.stop
    return span.start == 0 if part == "embedding" else span.stop == num_layers


def cut(case: Case, layout: ParameterLayout, weight_index: int) -> ParameterLayout:
    """The layout of a rank's shard; what is replicated stays whole."""
    if layout.reduce_over is not Axis.WEIGHT_DATA:
        return layout
    return replace(layout, parts=case.topology.weight, index=weight_index)


def weight_layout(case: Case, name: str, place: Place) -> ParameterLayout:
    """The layout of a parameter on the rank at `place`."""
    return cut(case, _declaration(case).layouts[name], place.weight)


def has_bias(case: Case, weight: str) -> bool:
    """Whether the layer of this weight has a bias that is read with it."""
    return bias_of(weight) in _declaration(case).layouts


def bias_of(weight: str) -> str:
    """The name of the bias beside a weight."""
    return weight.removesuffix("weight") + "bias"


def local_parameters(case: Case, place: Place) -> tuple[NamedParameter, ...]:
    """The parameters of the rank at `place`, without memory."""
    return _local_parameters(
        case.model,
        case.mode,
        case.parallel.weight.embed_split_hidden,
        case.topology.weight,
        place.weight,
        _span(case, place.stage),
        case.dtype,
    )


@lru_cache(maxsize=256)
def _local_parameters(
    model: ModelConfig,
    mode: Mode,
    embed_split_hidden: bool,
    parts: int,
    index: int,
    span: LayerSpan,
    dtype: str,
) -> tuple[NamedParameter, ...]:
    found = []
    for name, layout in declaration(model, mode, embed_split_hidden).layouts.items():
        if not _is_on(name, span, model.num_layers):
            continue
        if layout.reduce_over is Axis.WEIGHT_DATA:
            layout = replace(layout, parts=parts, index=index)
        data = torch.empty(layout.local_shape, dtype=getattr(torch, dtype), device="meta")
        found.append(NamedParameter(name, nn.Parameter(data), layout))
    return tuple(found)


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
