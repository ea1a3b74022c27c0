"""The contents of `profile.json`: for each mode totals, the timeline of one step, the worst waits.

Times are milliseconds. Those of a timeline count from the beginning of its step on rank 0, and all
ranks' clocks are aligned; a transfer that was launched in the step before has a negative time.
Bytes are those that a rank has to send to others, by the collective's definition.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from isp.core.comm.tag import BETWEEN_TWO, Purpose
from isp.core.mesh.phase import Phase
from isp.utils.files import Result

__all__ = [
    "Cause",
    "Collective",
    "ComputeSpan",
    "Cost",
    "Edge",
    "KindTotals",
    "MemorySample",
    "ModeProfile",
    "Profile",
    "RankProfile",
    "Reason",
    "StepTimeline",
    "Totals",
    "Wait",
]


class Cost(StrEnum):
    """The chance of hiding collectives."""

    AHEAD = "ahead"
    """It can be launched ahead of its use, or waited for later: weights, gradients of weights, and
    what travels beside them."""
    CHAIN = "chain"
    """The next computation needs its result and the last one made it: nothing of its step could
    hide it."""
    OUTSIDE = "outside"
    """Data, metrics, what stages send each other: no part of forward and backward."""

    @classmethod
    def of(cls, purpose: Purpose) -> Cost:
        """By what travels."""
        return _COSTS.get(purpose, Cost.AHEAD)


_COSTS = {
    Purpose.ACTIVATION: Cost.CHAIN,
    Purpose.OUTPUT_GRADIENT: Cost.CHAIN,
    Purpose.HEADS: Cost.CHAIN,
    Purpose.SCAN_HEADS: Cost.CHAIN,
    Purpose.EXPERTS: Cost.CHAIN,
    Purpose.KEYS: Cost.CHAIN,
    Purpose.HALO: Cost.CHAIN,
    Purpose.STATES: Cost.CHAIN,
    Purpose.LOGITS: Cost.CHAIN,
    Purpose.LOSS: Cost.CHAIN,
    Purpose.STAGE_ACTIVATION: Cost.OUTSIDE,
    Purpose.DATA: Cost.OUTSIDE,
    Purpose.CONTROL: Cost.OUTSIDE,
}


class Edge(StrEnum):
    """The ends of a step, where nothing is left to compute beside a transfer."""

    FIRST = "first gather"
    LAST = "last reduce-scatter"


class Cause(StrEnum):
    """Cause of exposed time, in words that follow `in`."""

    FIRST = f"the {Edge.FIRST}"
    LAST = f"the {Edge.LAST}"
    AT_ONCE = "transfers that are needed at once"
    COULD_HIDE = "transfers that could be hidden"
    OTHER_RANKS = "ranks waiting for each other"


class Reason(StrEnum):
    """A wait's cause."""

    FIRST_EDGE = "first gather of the step"
    LAST_EDGE = "last reduce-scatter of the step"
    CHAIN = "needed at once"
    """Launched when its input was there and waited for by what comes next."""
    LATE = "launched too late"
    """It would have been there if it had been launched earlier in the step."""
    QUEUE = "behind another transfer"
    """It waited its turn on its channel for most of the time."""
    OTHER_RANKS = "waiting for another rank"
    """The last rank of its group came to it only then."""
    TOO_LONG = "longer than the compute it overlaps"
    """No earlier launch would have hidden it."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective on one rank, in the timeline of a step."""

    kind: str
    """all_gather, reduce_scatter, all_to_all, all_reduce, broadcast, send or recv."""
    channel: str
    """The mesh axis it goes along, such as `weight`."""
    label: str
    """The weight or tensor that travels, such as `layers.3.attention.wo.weight`."""
    block: str
    """The part of the model it belongs to, such as `layers.3`; empty where it belongs to none."""
    phase: Phase
    """The one it is needed in, for a gather, and that it was launched in, for all others."""
    purpose: Purpose
    sent_bytes: int
    launch_ms: float
    """Time this rank asked for it."""
    start_ms: float
    """Earliest start: its launch, or the end of what was before it on the same channel. A send
    or recv counts only while it is waited for."""
    end_ms: float
    wait_ms: float
    """Start of the wait for it."""
    exposed_ms: float
    """For how long that wait blocked."""
    moving_ms: float
    """Duration once it could begin on every rank: the least over the ranks of its group."""
    others_ms: float
    """The part of `exposed_ms` in which another rank had not come to it yet."""
    queue_ms: float
    """The part in which it stood behind another transfer on its channel."""
    edge: Edge | None = None
    """Whether it is an end of the step, which is exposed by design."""

    @property
    def cost(self) -> Cost:
        """Its kind of cost."""
        return Cost.of(self.purpose)

    @property
    def cause(self) -> Cause:
        """The cause of its wait once every rank has come."""
        if self.edge is not None:
            return Cause.FIRST if self.edge is Edge.FIRST else Cause.LAST
        return Cause.COULD_HIDE if self.cost is Cost.AHEAD else Cause.AT_ONCE

    @property
    def is_between_two(self) -> bool:
        """Whether it is a send or recv."""
        return self.kind in BETWEEN_TWO


@dataclass(frozen=True, kw_only=True)
class ComputeSpan:
    """A stretch of a step in which one part of the model was computed; waits lie within."""

    block: str
    """`embedding`, `layers.0`, ..., `norm`, `head`; the name of the phase where there is none."""
    phase: Phase
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Memory at a moment of the step: of tensors on CUDA, of the whole process on CPU."""

    at_ms: float
    phase: Phase
    """The phase that begins here."""
    gib: float


@dataclass(frozen=True, kw_only=True)
class KindTotals:
    """The sums of collectives in a step of one rank, such as those of one kind."""

    num_transfers: float
    sent_bytes: float
    comm_ms: float
    """In which at least one of them was under way."""
    exposed_ms: float


@dataclass(frozen=True, kw_only=True)
class Totals(KindTotals):
    """A step of one rank, or a mean over some; the sums are those of all its collectives.

    bound = first_edge + last_edge + chain + excess is what no order of the transfers could hide.
    """

    step_ms: float
    compute_ms: float
    """The step without what was waited for."""
    first_edge_ms: float
    """Least time the first gather of the step had to be waited for."""
    last_edge_ms: float
    """The same of the last reduce-scatter."""
    chain_ms: float
    """Time of the transfers that the next computation needs at once."""
    excess_ms: float
    """By how much all others are longer than the compute of their forward or backward."""
    by_kind: dict[str, KindTotals]

    @property
    def exposed_share(self) -> float:
        """The share of the step for which compute waited for transfers."""
        return self.exposed_ms / self.step_ms

    @property
    def bound_ms(self) -> float:
        """The least that had to be exposed."""
        return self.first_edge_ms + self.last_edge_ms + self.chain_ms + self.excess_ms

    @property
    def exposed_over_bound(self) -> float | None:
        """None where the bound is 0."""
        return self.exposed_ms / self.bound_ms if self.bound_ms else None


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One measured step of one rank, the same step on all ranks: the one of median length."""

    step: int
    """Its number, counted from the first after the warm-up: an index into `ModeProfile.losses`."""
    begin_ms: float
    end_ms: float
    collectives: tuple[Collective, ...]
    """In order of launch."""
    spans: tuple[ComputeSpan, ...]
    """In order; they do not overlap."""
    memory: tuple[MemorySample, ...]
    """In order of time."""


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """One rank's measurements."""

    rank: int
    totals: tuple[Totals, ...]
    """Of each measured step."""
    timeline: StepTimeline
    peak_memory_gib: float


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The cost of waiting for one tensor in a step: mean over measured steps and ranks."""

    kind: str
    channel: str
    label: str
    block: str
    phase: Phase
    count: float
    """Transfers of it in a step (one a micro-batch, say)."""
    sent_bytes: float
    """Of all of them together, as are the times."""
    exposed_ms: float
    moving_ms: float
    others_ms: float
    queue_ms: float
    late_ms: float | None
    """Delay of its launch against being there in time; None where it could not be."""
    reason: Reason
    """The reason for most of it."""
    advice: str
    """One sentence: what would help, as far as the measurement supports it."""


@dataclass(frozen=True, kw_only=True)
class ModeProfile:
    """One mode's measurements."""

    mode: str
    """mtp, msp, fsp or isp."""
    tensor: int
    """Ranks that share one sequence."""
    weight: int
    """Ranks that share one copy of the weights; 1 outside isp."""
    data: int
    pipeline: int
    topology: str
    """The groups of ranks, for people."""
    losses: tuple[float | None, ...]
    """Of each measured step; None where it was not finite."""
    summary: Totals
    """The mean over the ranks of the step whose timeline is kept: the one of median length."""
    ranks: tuple[RankProfile, ...]
    """In rank order."""
    waits: tuple[Wait, ...]
    """The worst first."""
    plan_grid: str | None = None
    """The prefetch plan as `isp prefetch` prints it; None where no weights are gathered."""

    @property
    def peak_memory_gib(self) -> float:
        """Of the rank that has most."""
        return max(rank.peak_memory_gib for rank in self.ranks)

    @property
    def exposed_by_cause(self) -> dict[Cause, float]:
        """Milliseconds exposed in the timelines of all ranks together, the largest cause first."""
        causes: defaultdict[Cause, float] = defaultdict(float)
        for c in (c for rank in self.ranks for c in rank.timeline.collectives):
            causes[c.cause] += c.exposed_ms - c.others_ms
            causes[Cause.OTHER_RANKS] += c.others_ms
        exposed = ((cause, milliseconds) for cause, milliseconds in causes.items() if milliseconds)
        return dict(sorted(exposed, key=lambda item: item[1], reverse=True))


@dataclass(frozen=True, kw_only=True)
class Profile(Result):
    """Result of `isp profile`: one run of a few steps in each mode, on the same data."""

    newest = 2
    name, again = "a profile", "profile the run again"

    version: int = newest
    created: str
    """Date and time, ISO 8601."""
    torch: str
    device: str
    """The maker's name of the device of rank 0."""
    world_size: int
    warmup_steps: int
    num_steps: int
    """Measured steps."""
    config: str
    """The whole configuration as YAML; each mode changes `parallel.tensor.mode` and the size of
    the weight group alone."""
    modes: tuple[ModeProfile, ...]
    shared_cores: str = ""
    """Such as `4 ranks share 2 cores`; empty where each has a device, or a core, of its own."""
    command: str = ""
    """The command line that measured it, as one types it; empty where there was none."""

    @property
    def largest_loss_difference(self) -> float:
        """Of two modes in one step, relative to the loss; infinite if only one is finite."""
        steps = zip(*(mode.losses for mode in self.modes), strict=True)
        return max(map(_spread, steps), default=0.0)


def _spread(losses: tuple[float | None, ...]) -> float:
    finite = [loss for loss in losses if loss is not None]
    if not finite:
        return 0.0
    if len(finite) < len(losses):
        return float("inf")
    return (max(finite) - min(finite)) / max(abs(max(finite)), 1e-30)
