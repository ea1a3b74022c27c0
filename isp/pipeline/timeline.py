"""The timeline of each rank of a pipeline, if every action takes as long as is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from isp.pipeline.order import PipelineOrder
from isp.weights.trace import Action, ActionKind

__all__ = ["Timed", "Timeline", "timeline"]


class Timed(NamedTuple):
    """An action and when it runs, in the unit of its cost."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """A step of a pipeline."""

    ranks: tuple[tuple[Timed, ...], ...]
    """The actions of each rank, in order."""

    @property
    def end(self) -> float:
        """The last rank's end."""
        return max(timed[-1].end for timed in self.ranks)

    @property
    def bubble(self) -> float:
        """Idle time of the busiest rank over its working time."""
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
    """Each action as soon as its rank is free and what it needs is there.

    `cost` is the time of an action on a stage; a backward that is not split is asked for both
    halves. What another rank sends arrives `send` after it was made; sending keeps nobody busy.
    """
    ranks = range(order.config.size)
    stages = [order.stages_of(rank) for rank in ranks]
    todo = [list(order.actions(rank, micro_batches, training=training))[::-1] for rank in ranks]
    split = {
        (stages[rank][a.chunk], a.micro_batch)
        for rank in ranks
        for a in todo[rank]
        if a.kind is ActionKind.WEIGHT_GRADIENT
    }
    done: dict[tuple[ActionKind, int, int], tuple[float, int]] = {}
    found: list[list[Timed]] = [[] for _ in ranks]

    def duration(stage: int, action: Action) -> float:
        whole = action.kind is ActionKind.BACKWARD and (stage, action.micro_batch) not in split
        rest = cost(stage, ActionKind.WEIGHT_GRADIENT) if whole else 0.0
        return cost(stage, action.kind) + rest

    def arrival(rank: int, needed: tuple[ActionKind, int, int]) -> float | None:
        if needed not in done:
            return None
        end, maker = done[needed]
        return end + (send if maker != rank else 0.0)

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
    m = action.micro_batch
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return [(ActionKind.BACKWARD, stage, m)]
    if action.kind is ActionKind.BACKWARD:
        after = [(ActionKind.BACKWARD, stage + 1, m)] if stage + 1 < num_stages else []
        return [(ActionKind.FORWARD, stage, m), *after]
    return [(ActionKind.FORWARD, stage - 1, m)] if stage else []
