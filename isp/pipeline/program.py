"""The program of each rank of a pipeline: its computations, and the sends between them.

[Note: One order of sends] Every rank's program is its part of one order of everything that all
ranks do, the one in which it would come about if computations took equally long and sends no time.
A send stands in the programs of both its ranks. So whoever waits, for a send or for a receive, does
so for ranks that are not as far yet: they never wait in a circle, even where the transfers of a
rank pass one after the other, as on NCCL. A receive is posted before what is computed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from isp.comm.cargo import Cargo, Purpose
from isp.pipeline.order import PipelineOrder
from isp.pipeline.timeline import timeline
from isp.weights.trace import Action, ActionKind

__all__ = ["Hop", "Program", "program"]


@dataclass(frozen=True)
class Hop:
    """A stage's result for a micro-batch, on its way to a neighbour."""

    made_in: ActionKind
    """FORWARD: activations; BACKWARD: their gradient."""
    micro_batch: int
    source: int
    """The stage that made it."""

    @property
    def target(self) -> int:
        """The stage that needs it."""
        return self.source + (1 if self.made_in is ActionKind.FORWARD else -1)

    @property
    def cargo(self) -> Cargo:
        """The cargo."""
        what = "activations" if self.made_in is ActionKind.FORWARD else "gradient"
        text = f"{what} of micro-batch {self.micro_batch} from stage {self.source}"
        return Cargo(Purpose.STAGE_ACTIVATION, tensor=text)


Program = tuple[Action | Hop, ...]
"""Of one rank: what it computes, sends and receives, in order."""


def program(order: PipelineOrder, rank: int, micro_batches: int, *, training: bool) -> Program:
    """A step of the `rank`-th rank of a pipeline [Note: One order of sends]."""
    return _programs(order, micro_batches, training)[rank]


@lru_cache(maxsize=16)
def _programs(order: PipelineOrder, micro_batches: int, training: bool) -> list[Program]:
    everything = sorted(_moments(order, micro_batches, training), key=lambda m: m[:2])
    return [
        tuple(moment.item for moment in everything if rank in moment.ranks)
        for rank in range(order.config.size)
    ]


class _Moment(NamedTuple):
    at: float
    computes: bool
    """Sends come first: what they bring may be used at once."""
    item: Action | Hop
    ranks: tuple[int, ...]


def _moments(order: PipelineOrder, micro_batches: int, training: bool) -> Iterator[_Moment]:
    found = timeline(order, micro_batches, lambda stage, kind: 1.0, training=training)
    for rank, timed in enumerate(found.ranks):
        for action, start, end in timed:
            yield _Moment(start, True, action, (rank,))
            if action.kind is ActionKind.WEIGHT_GRADIENT:
                continue
            hop = Hop(action.kind, action.micro_batch, order.stages_of(rank)[action.chunk])
            if not 0 <= hop.target < order.num_stages:
                continue
            if (peer := order.rank_of(hop.target)) != rank:
                yield _Moment(end, False, hop, (rank, peer))
