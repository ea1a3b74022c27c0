"""Generation from a model in a layout: the memory of what is kept, and the time of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from isp.attention import CpuAttention
from isp.comm.channel import DryChannel
from isp.layers.factory import LayerFactory
from isp.models.decoding import decoding_layout
from isp.parallel import Mode, ParallelConfig, Topology
from isp.planner.case import PlanCase
from isp.planner.declared import bare
from isp.planner.dry import META
from isp.planner.fabric import DeviceSpec
from isp.planner.memory import states
from isp.planner.record import EventRecorder
from isp.weights.wp import LocalWeights
from model.config import ModelConfig
from model.inference import InferenceDecoder

__all__ = ["GenerationPlan", "buffer_bytes", "plan_generation"]


class GenerationPlan(NamedTuple):
    """What a rank has when the ranks of a tensor group decode."""

    mode: Mode
    ranks: int
    weights: int
    """Bytes."""
    cache: int
    """Bytes of the keys, values and states of one document."""
    buffers: int
    """Bytes that the inference layers write to as it is read; 0 where those of training read."""
    seconds: float
    """Least time of its next token: that in which weights and cache are read once."""


def plan_generation(case: PlanCase, device: DeviceSpec) -> GenerationPlan:
    """The last token of a document of the case's length, by its tensor ranks."""
    model, tensor = case.language_model, case.parallel.tensor
    parallel = decoding_layout(model, ParallelConfig(tensor=tensor))
    splits = parallel.tensor.mode.facts.splits_features or tensor.size == 1
    decoding = replace(case, parallel=parallel, topology=Topology.create(tensor.size, parallel))
    weights = states(decoding, decoding.place(0)).weights
    length = case.tokens // case.documents
    heads = (tensor.size, 1) if splits else (1, tensor.size)
    cache = model.cache_bytes(length, case.item_bytes, *heads)
    speed = device.gb_per_second * 1e9 * device.memory_efficiency
    buffers = 0
    if case.model.hf is None and splits:
        buffers = buffer_bytes(case.model, parallel, length, dtype=case.dtype, on_cpu=case.on_cpu)
    seconds = (weights + cache) / speed
    return GenerationPlan(parallel.tensor.mode, tensor.size, weights, cache, buffers, seconds)


def buffer_bytes(
    model: ModelConfig, parallel: ParallelConfig, tokens: int, *, dtype: str, on_cpu: bool
) -> int:
    """Memory of the buffers of the decoder's inference layers for so many tokens at once."""
    mode, size = parallel.tensor.mode, parallel.tensor.size
    tensor = DryChannel("tensor", size, 0, EventRecorder(), sum_locally=on_cpu and size > 1)
    layers = LayerFactory(
        mode=mode,
        tensor=tensor,
        weight=tensor,
        communicator=LocalWeights(),
        device=META,
        dtype=getattr(torch, dtype),
    )
    (chunk,) = replace(bare(model), num_layers=1).build(layers, attention=CpuAttention())
    assert chunk.norm is not None
    chunk.norm.compiled = not on_cpu if model.compile == "auto" else model.compile
    reader = InferenceDecoder(chunk, tensor, split_tokens=mode.facts.splits_sequence)
    return reader.buffer_bytes(tokens)
