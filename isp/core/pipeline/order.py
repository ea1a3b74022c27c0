"""The order in which the ranks of a pipeline compute and send; needs no process group.

A *stage* consists of the blocks between two sends; a rank has one stage for each of its model
chunks. With P ranks, stage s is on rank s mod P (a loop). In a V, stages go from the first rank to
the last and back to the first.

All ranks' programs follow one order of sends, so that no ranks wait for each other in a circle.
See [Note: One order of sends] in docs/design/notes/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed.pipelining as torch_pipelining

from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh.config import PipelineConfig
from isp.core.weights.uses import Action, ActionKind, sequential_actions

__all__ = [
    "Hop",
    "PipelineOrder",
    "one_forward_one_backward",
    "program",
    "split_layers",
    "timeline",
]

_KINDS = {
    "F": ActionKind.FORWARD,
    "B": ActionKind.BACKWARD,
    "I": ActionKind.BACKWARD,
    "W": ActionKind.WEIGHT_GRADIENT,
}
"""The kind of action for each of torch's letters for a computation; I is a split backward's first
half."""


@dataclass(frozen=True)
class PipelineOrder:
    """The stages of each rank of a pipeline, and the order of each rank's actions."""

    config: PipelineConfig

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return self.config.size * self.config.num_chunks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stage of each model chunk of the pipeline's `rank`-th rank, in order."""
        size = self.config.size
        if self.config.schedule.is_v:
            return rank, 2 * size - 1 - rank
        return tuple(chunk * size + rank for chunk in range(self.config.num_chunks))

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that has `stage`."""
        size = self.config.size
        if self.config.schedule.is_v and stage >= size:
            return 2 * size - 1 - stage
        return stage % size

    def actions(
        self, rank: int, micro_batches: int, *, training: bool = True
    ) -> tuple[Action, ...]:
        """Return the actions of the pipeline's `rank`-th rank in a step, in order."""
        return _orders(self, micro_batches, training)[rank]


@lru_cache(maxsize=16)
def _orders(order: PipelineOrder, micro_batches: int, training: bool) -> list[tuple[Action, ...]]:
    """Return the actions of each rank; cached, because torch computes all ranks' at once."""
    ranks = range(order.config.size)
    if order.config.size == 1:
        return [sequential_actions(micro_batches, training=training)]
    schedule = _schedule_class(order.config, training=training)
    if schedule is torch_pipelining.Schedule1F1B:
        return [one_forward_one_backward(rank, len(ranks), micro_batches) for rank in ranks]
    if schedule is torch_pipelining.ScheduleGPipe:
        return [sequential_actions(micro_batches, training=False) for _ in ranks]
    stages = [  # torch's schedules read only these numbers of a stage
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
            # For schedules that place several stages on a rank (in a loop or a V), torch has no
            # order of forwards only: take the order of a training step without the backwards.
            if training or action.kind is ActionKind.FORWARD
        )
        for rank in ranks
    ]


def _actions(found: Sequence[Any], stages: Sequence[int]) -> Iterator[Action]:
    """Yield torch's actions `found` of the rank with these `stages`, as `Action`s."""
    for a in found:
        if a is not None:  # None: the rank is idle
            chunk = stages.index(a.stage_index)
            yield Action(_KINDS[a.computation_type.value], a.microbatch_index, chunk)


def _schedule_class(config: PipelineConfig, *, training: bool) -> Any:
    """Return the class of torch's schedule: for a training step, or for forwards only."""
    if training:
        return torch_pipelining.schedules.get_schedule_class(config.schedule.value)
    if config.schedule.is_v:
        return torch_pipelining.ScheduleZBVZeroBubble
    if config.num_chunks > 1:
        return torch_pipelining.ScheduleLoopedBFS
    return torch_pipelining.ScheduleGPipe


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of 1F1B on `stage` of `stages`: warm-up, pairs F and B, cool-down.

    Source: Narayanan et al. 2019, PipeDream-Flush.
    """
    warm_up = min(stages - stage - 1, micro_batches)
    forward = [Action(ActionKind.FORWARD, m) for m in range(micro_batches)]
    backward = [Action(ActionKind.BACKWARD, m) for m in range(micro_batches)]
    steady = [a for pair in zip(forward[warm_up:], backward, strict=False) for a in pair]
    return (*forward[:warm_up], *steady, *backward[micro_batches - warm_up :])


class Timed(NamedTuple):
    """An action with its start and end, in the unit of `timeline`'s costs."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """When each action of a step starts and ends on each pipeline rank, as simulated."""

    ranks: tuple[tuple[Timed, ...], ...]
    """The actions of each rank, in order."""

    @property
    def end(self) -> float:
        """The time at which the last action of all ranks ends."""
        return max(timed[-1].end for timed in self.ranks)

    @property
    def bubble(self) -> float:
        """Ratio of idle time to working time, of the rank with the most work."""
        busiest = max(sum(t.end - t.start for t in timed) for timed in self.ranks)
        return self.end / busiest - 1


def timeline(
    order: PipelineOrder,
    micro_batches: int,
    cost: Callable[[int, ActionKind], float],
    *,
    send: float = 0.0,
    training: bool = True,
) -> Timeline:
    """Return the times of a simulated step.

    An action starts when its rank is free and its inputs have arrived. `cost(stage, kind)` returns
    the time of an action; a backward that is not split costs both its halves. A result arrives at
    another rank `send` after it was computed; sends keep no rank busy.
    """
    ranks = range(order.config.size)
    stages = [order.stages_of(rank) for rank in ranks]
    # Reversed, so that the next action is the last entry, which `pop` removes.
    todo = [list(order.actions(rank, micro_batches, training=training))[::-1] for rank in ranks]
    split = {  # the (stage, micro-batch) whose backward is in two halves
        (stages[rank][a.chunk], a.micro_batch)
        for rank in ranks
        for a in todo[rank]
        if a.kind is ActionKind.WEIGHT_GRADIENT
    }
    done: dict[tuple[ActionKind, int, int], tuple[float, int]] = {}
    found: list[list[Timed]] = [[] for _ in ranks]

    def duration(stage: int, action: Action) -> float:
        """Return the time that an action takes."""
        whole = action.kind is ActionKind.BACKWARD and (stage, action.micro_batch) not in split
        rest = cost(stage, ActionKind.WEIGHT_GRADIENT) if whole else 0.0
        return cost(stage, action.kind) + rest

    def arrival(rank: int, needed: tuple[ActionKind, int, int]) -> float | None:
        """Return when a result is available on `rank`; None: it is not computed yet."""
        if needed not in done:
            return None
        end, maker = done[needed]
        return end + (send if maker != rank else 0.0)

    # Each round advances every rank until it needs a result that is not computed yet.
    while any(todo):
        progress = False
        for rank in ranks:
            while todo[rank]:
                action = todo[rank][-1]
                stage = stages[rank][action.chunk]
                times = [arrival(rank, n) for n in _needs(action, stage, order.num_stages)]
                if None in times:
                    break
                free = found[rank][-1].end if found[rank] else 0.0
                start = max([free, *(t for t in times if t is not None)])
                end = start + duration(stage, action)
                found[rank].append(Timed(action, start, end))
                done[action.kind, stage, action.micro_batch] = end, rank
                todo[rank].pop()
                progress = True
        assert progress, f"the order of {order.config} waits for itself"
    return Timeline(tuple(tuple(timed) for timed in found))


def _needs(action: Action, stage: int, num_stages: int) -> list[tuple[ActionKind, int, int]]:
    """Return the (kind, stage, micro-batch) of the results that an action needs."""
    m = action.micro_batch
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return [(ActionKind.BACKWARD, stage, m)]
    if action.kind is ActionKind.BACKWARD:
        after = [(ActionKind.BACKWARD, stage + 1, m)] if stage + 1 < num_stages else []
        return [(ActionKind.FORWARD, stage, m), *after]
    return [(ActionKind.FORWARD, stage - 1, m)] if stage else []


@dataclass(frozen=True)
class Hop:
    """The transfer of a stage's result for a micro-batch to the next or previous stage."""

    made_in: ActionKind
    """FORWARD: activations, for the next stage; BACKWARD: their gradient, for the previous one."""
    micro_batch: int
    source: int
    """The stage that computed the result."""

    @property
    def target(self) -> int:
        """The stage that needs the result."""
        return self.source + (1 if self.made_in is ActionKind.FORWARD else -1)

    @property
    def tag(self) -> Tag:
        """The tag of the transfer, for logs."""
        what = "activations" if self.made_in is ActionKind.FORWARD else "gradient"
        text = f"{what} of micro-batch {self.micro_batch} from stage {self.source}"
        return Tag(Purpose.STAGE_ACTIVATION, tensor=text)


Program = tuple[Action | Hop, ...]
"""The computations, sends and receives of one rank in a step, in order."""


def program(order: PipelineOrder, rank: int, micro_batches: int, *, training: bool) -> Program:
    """Return the program of the pipeline's `rank`-th rank for a step.

    It has, in order, the actions of the rank and the transfers (`Hop`) that it sends or receives.
    See [Note: One order of sends] in docs/design/notes/pipeline.md.
    """
    return _programs(order, micro_batches, training)[rank]


@lru_cache(maxsize=16)
def _programs(order: PipelineOrder, micro_batches: int, training: bool) -> list[Program]:
    """Return the program of each rank of the pipeline; see `program`."""
    # (time, is a computation, item, its ranks). At equal times, sends come before computations,
    # which may need their results. The sort is stable, so all ranks have the same order.
    moments: list[tuple[float, bool, Action | Hop, tuple[int, ...]]] = []
    found = timeline(order, micro_batches, lambda stage, kind: 1.0, training=training)
    for rank, timed in enumerate(found.ranks):
        for action, start, end in timed:
            moments.append((start, True, action, (rank,)))
            if action.kind is ActionKind.WEIGHT_GRADIENT:
                continue
            hop = Hop(action.kind, action.micro_batch, order.stages_of(rank)[action.chunk])
            if 0 <= hop.target < order.num_stages and order.rank_of(hop.target) != rank:
                moments.append((end, False, hop, (rank, order.rank_of(hop.target))))
    moments.sort(key=lambda moment: moment[:2])
    return [
        tuple(item for _, _, item, ranks in moments if rank in ranks)
        for rank in range(order.config.size)
    ]


def split_layers(
    costs: Sequence[float], stages: int, *, after: float = 0.0
) -> list[tuple[int, int]]:
    """Return the blocks (first, stop) of each stage, cut so that the costliest stage costs least.

    `costs` are the costs of the blocks, and `after` is that of the last stage's work after its
    blocks (head and loss). Raises ValueError if a stage would have no block.
    """
    num_layers, ends = len(costs), [0.0, *accumulate(costs)]
    if not 1 <= stages <= num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {stages} stages: use at most {num_layers}"
        )
    # Dynamic programming over stages: for each end of a stage, the best cuts before it, with the
    # smallest maximum cost of a stage, then the smallest sum of squares, which evens out the rest.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}
    for stage in range(stages):
        extra = after * (stage == stages - 1)
        reached: dict[int, tuple[float, float, list[int]]] = {}
        for start, (worst, squares, cuts) in best.items():
            for stop in range(start + 1, num_layers - (stages - stage - 1) + 1):
                cost = ends[stop] - ends[start] + extra
                candidate = (max(worst, cost), squares + cost * cost, [*cuts, stop])
                if stop not in reached or candidate[:2] < reached[stop][:2]:
                    reached[stop] = candidate
        best = reached
    cuts = best[num_layers][2]
    return list(pairwise(cuts))
