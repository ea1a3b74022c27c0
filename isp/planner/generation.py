"""Generation from a model in a layout: the memory of what is kept, and the time of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from isp.models.decoding import decoding_layout
from isp.parallel import Mode, ParallelConfig, Topology
from isp.planner.case import PlanCase
from isp.planner.fabric import DeviceSpec
from isp.planner.memory import states

__all__ = ["GenerationPlan", "plan_generation"]


class GenerationPlan(NamedTuple):
    """What a rank has when the ranks of a tensor group decode."""

    mode: Mode
    ranks: int
    weights: int
    """Bytes."""
    cache: int
    """Bytes of the keys, values and states of one document."""
    seconds: float
    """Least time of its next token: that in which weights and cache are read once."""


def plan_generation(case: PlanCase, device: DeviceSpec) -> GenerationPlan:
    """The last token of a document of the case's length, by its tensor ranks."""
    model, tensor = case.language_model, case.parallel.tensor
    parallel = decoding_layout(model, ParallelConfig(tensor=tensor))
    splits = parallel.tensor.mode.splits_features or tensor.size == 1
    decoding = replace(case, parallel=parallel, topology=Topology.create(tensor.size, parallel))
    weights = states(decoding, decoding.place(0)).weights
    length = case.tokens // case.documents
    heads = (tensor.size, 1) if splits else (1, tensor.size)
    cache = model.cache_bytes(length, case.item_bytes, *heads)
    speed = device.gb_per_second * 1e9 * device.memory_efficiency
    seconds = (weights + cache) / speed
    return GenerationPlan(parallel.tensor.mode, tensor.size, weights, cache, seconds)
