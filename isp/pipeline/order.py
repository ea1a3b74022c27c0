"""A rank's stages, and the order in which it works on them; needs no process group.

A *stage* is a part of the model between two sends; a rank has one for each of its chunks. With
P ranks, stage s is on rank s mod P (a loop), or, for a V, on rank s going down and up again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch.distributed.pipelining as torch_pipelining

from isp.parallel.config import PipelineConfig
from isp.weights.trace import Action, ActionKind, sequential_actions

__all__ = ["PipelineOrder", "one_forward_one_backward", "split_layers"]

_KINDS = {
    "F": ActionKind.FORWARD,
    "B": ActionKind.BACKWARD,
    "I": ActionKind.BACKWARD,
    "W": ActionKind.WEIGHT_GRADIENT,
}
"""By torch's letter of a computation."""


@dataclass(frozen=True)
class PipelineOrder:
    """The stages of every rank of a pipeline, and its order of work."""

    config: PipelineConfig

    @property
    def num_stages(self) -> int:
        """Parts that the model is cut into."""
        return self.config.size * self.config.num_chunks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stage of each chunk of the `rank`-th rank of the pipeline, in forward order."""
        size = self.config.size
        if self.config.schedule.is_v:
            return rank, 2 * size - 1 - rank
        return tuple(chunk * size + rank for chunk in range(self.config.num_chunks))

    def rank_of(self, stage: int) -> int:
        """The rank of the pipeline that has `stage`."""
        size = self.config.size
        if self.config.schedule.is_v and stage >= size:
            return 2 * size - 1 - stage
        return stage % size

    def actions(
        self, rank: int, micro_batches: int, *, training: bool = True
    ) -> tuple[Action, ...]:
        """The `rank`-th rank's actions in a step: on one rank, one micro-batch at a time."""
        return _orders(self, micro_batches, training)[rank]


@lru_cache(maxsize=16)
def _orders(order: PipelineOrder, micro_batches: int, training: bool) -> list[tuple[Action, ...]]:
    """The actions of every rank: torch works out all of them at once, which takes a while."""
    ranks = range(order.config.size)
    if order.config.size == 1:
        return [sequential_actions(micro_batches, training=training)]
    schedule = _schedule_class(order.config, training=training)
    if schedule is torch_pipelining.Schedule1F1B:
        return [one_forward_one_backward(rank, len(ranks), micro_batches) for rank in ranks]
    if schedule is torch_pipelining.ScheduleGPipe:
        return [sequential_actions(micro_batches, training=False) for _ in ranks]
    stages = [  # torch asks them for nothing but their numbers
        SimpleNamespace(
            stage_index=stage,
            num_stages=order.num_stages,
            group_rank=0,
            group_size=len(ranks),
            submod=None,
        )
        for stage in order.stages_of(0)
    ]
    found = schedule(stages, micro_batches).pipeline_order
    return [
        tuple(
            action
            for action in _actions(found[rank], order.stages_of(rank))
            if training or action.kind is ActionKind.FORWARD
        )
        for rank in ranks
    ]


def _actions(found: Sequence[Any], stages: Sequence[int]) -> Iterator[Action]:
    """The actions torch found for the rank with these stages."""
    for a in found:
        if a is not None:
            chunk = stages.index(a.stage_index)
            yield Action(_KINDS[a.computation_type.value], a.microbatch_index, chunk)


def _schedule_class(config: PipelineConfig, *, training: bool) -> Any:
    """torch's schedule for a step, or for an evaluation, which is forward alone."""
    if training:
        return torch_pipelining.schedules.get_schedule_class(config.schedule.value)
    if config.schedule.is_v:
        return torch_pipelining.ScheduleZBVZeroBubble
    if config.num_chunks > 1:
        return torch_pipelining.ScheduleLoopedBFS
    return torch_pipelining.ScheduleGPipe


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """1F1B on one stage: forwards to warm up, pairs, backwards to cool down.

    Source: Narayanan et al. 2019, PipeDream-Flush.
    """
    warm_up = min(stages - stage - 1, micro_batches)
    forward = [Action(ActionKind.FORWARD, m) for m in range(micro_batches)]
    backward = [Action(ActionKind.BACKWARD, m) for m in range(micro_batches)]
    steady = [a for pair in zip(forward[warm_up:], backward, strict=False) for a in pair]
    return (*forward[:warm_up], *steady, *backward[micro_batches - warm_up :])


def split_layers(
    num_layers: int, stages: int, *, before: float = 0.0, after: float = 0.0
) -> list[tuple[int, int]]:
    """(first, stop) of the layers of each stage, so that the costliest stage costs least.

    `before` and `after` are the costs of what the first stage does before its layers and the last
    one after them, in layers. Raises ValueError if a stage would have no layer.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {stages} stages: use at most {num_layers}"
        )
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}
    for stage in range(stages):
        extra = before * (stage == 0) + after * (stage == stages - 1)
        reached: dict[int, tuple[float, float, list[int]]] = {}
        for start, (worst, squares, cuts) in best.items():
            for stop in range(start + 1, num_layers - (stages - stage - 1) + 1):
                cost = stop - start + extra
                candidate = (max(worst, cost), squares + cost * cost, [*cuts, stop])
                if stop not in reached or candidate[:2] < reached[stop][:2]:
                    reached[stop] = candidate
        best = reached
    cuts = best[num_layers][2]
    return list(pairwise(cuts))
