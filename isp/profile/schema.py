"""Contents of `profile.json`: for each mode totals, the timeline of one step, and the worst waits.

Times are in milliseconds. In a timeline they count from the start of the step on rank 0, with all
ranks on one clock; a transfer launched in the step before has a negative time. Bytes are what a
rank has to send to others, by the definition of the collective.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from isp.core.comm.tag import BETWEEN_TWO, Purpose
from isp.core.mesh.phase import Phase
from isp.utils.result_file import Result

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
    """Way in which a collective's cost can be hidden."""

    AHEAD = "ahead"
    """It can be launched ahead of its use, or waited for later: weights, weight gradients, and
    activations that are sent while others are computed."""
    CHAIN = "chain"
    """Its input is made by the last computation and its result is needed by the next one, so no
    compute of the step can overlap with it."""
    OUTSIDE = "outside"
    """Not part of forward and backward: data, metrics, activations between stages."""

    @classmethod
    def of(cls, purpose: Purpose) -> Cost:
        """Return the cost of transfers with this purpose."""
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
    """Start and end of a step, where no compute is left to overlap with a transfer."""

    FIRST = "first gather"
    LAST = "last reduce-scatter"


class Cause(StrEnum):
    """Cause of exposed time; its value can follow the word `in`."""

    FIRST = f"the {Edge.FIRST}"
    LAST = f"the {Edge.LAST}"
    AT_ONCE = "transfers that are needed at once"
    COULD_HIDE = "transfers that enough compute would hide"
    OTHER_RANKS = "ranks waiting for each other"


class Reason(StrEnum):
    """Reason for a wait."""

    FIRST_EDGE = "first gather of the step"
    LAST_EDGE = "last reduce-scatter of the step"
    CHAIN = "needed at once"
    """Launched when its input was ready, and waited for by the next computation."""
    LATE = "launched too late"
    """It would have arrived in time if it had been launched earlier in the step."""
    QUEUE = "behind another transfer"
    """It queued on its channel for most of the time."""
    OTHER_RANKS = "waiting for another rank"
    """For most of the time the last rank of its group had not joined yet."""
    TOO_LONG = "longer than the compute it overlaps"
    """No earlier launch would have hidden it."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective on one rank, in the timeline of a step."""

    kind: str
    """all_gather, reduce_scatter, all_to_all, all_reduce, broadcast, send or recv."""
    channel: str
    """Mesh axis of its group, such as `weight`."""
    label: str
    """Name of the weight or tensor, such as `layers.3.attention.wo.weight`."""
    block: str
    """Part of the model that it is for, such as `layers.3`; empty if it is for none or several."""
    phase: Phase
    """For a gather the phase that needs it; for others the phase that launched it."""
    purpose: Purpose
    sent_bytes: int
    launch_ms: float
    """Time of the launch on this rank."""
    start_ms: float
    """Earliest possible start: the launch, or the end of the transfer before it on its channel.

    For a send or receive it is not known, and the begin of the wait is taken.
    """
    end_ms: float
    wait_ms: float
    """Time at which the rank began to wait for it."""
    exposed_ms: float
    """Time for which that wait blocked."""
    moving_ms: float
    """Duration of the transfer without waiting for other ranks.

    It is the shortest time from start to end on any rank of the group: the rank that joined last
    waited for no other.
    """
    others_ms: float
    """Part of `exposed_ms` in which another rank had not joined yet."""
    queue_ms: float
    """Part of `exposed_ms` in which it queued after another transfer on its channel."""
    edge: Edge | None = None
    """Start or end of the step if the collective is a first gather or a last reduction, else None.

    There exposure is expected, since no compute is left to overlap with it.
    """

    @property
    def cost(self) -> Cost:
        """Way in which the cost of this collective can be hidden."""
        return Cost.of(self.purpose)

    @property
    def cause(self) -> Cause:
        """Cause of the exposed time that is left without the time waiting for other ranks."""
        if self.edge is not None:
            return Cause.FIRST if self.edge is Edge.FIRST else Cause.LAST
        return Cause.COULD_HIDE if self.cost is Cost.AHEAD else Cause.AT_ONCE

    @property
    def is_between_two(self) -> bool:
        """True for a send or receive."""
        return self.kind in BETWEEN_TWO


@dataclass(frozen=True, kw_only=True)
class ComputeSpan:
    """Interval of a step in which one part of the model was computed, waits included."""

    block: str
    """`embedding`, `layers.0`, ..., `norm`, `head`; the phase if no part is known."""
    phase: Phase
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Memory at one moment: of tensors on CUDA, of the whole process on CPU."""

    at_ms: float
    phase: Phase
    """The phase that begins here."""
    gib: float


@dataclass(frozen=True, kw_only=True)
class KindTotals:
    """Sums over some collectives of a step on one rank, such as those of one kind."""

    num_transfers: float
    sent_bytes: float
    comm_ms: float
    """Time in which at least one of them was in flight."""
    exposed_ms: float


@dataclass(frozen=True, kw_only=True)
class Totals(KindTotals):
    """Sums over all collectives of a step on one rank, or the mean of several such sums.

    bound = first_edge + last_edge + chain + excess is what no order of the transfers could hide.
    """

    step_ms: float
    compute_ms: float
    """Duration of the step without waits."""
    first_edge_ms: float
    """Least possible wait for the first gather of the step."""
    last_edge_ms: float
    """Least possible wait for the last reduction of the step."""
    chain_ms: float
    """Time of transfers whose result the next computation needs at once."""
    excess_ms: float
    """Time by which all other transfers exceed the compute of their forward or backward."""
    by_kind: dict[str, KindTotals]

    @property
    def exposed_share(self) -> float:
        """Share of the step for which compute waited for transfers."""
        return self.exposed_ms / self.step_ms

    @property
    def bound_ms(self) -> float:
        """Least time that had to be exposed."""
        return self.first_edge_ms + self.last_edge_ms + self.chain_ms + self.excess_ms

    @property
    def exposed_over_bound(self) -> float | None:
        """Exposed time relative to the bound; None if the bound is 0."""
        return self.exposed_ms / self.bound_ms if self.bound_ms else None


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One measured step of one rank: the step of median length, the same on all ranks."""

    step: int
    """Index into `ModeProfile.losses`: number of the step after the warm-up."""
    begin_ms: float
    end_ms: float
    collectives: tuple[Collective, ...]
    """Collectives in order of launch."""
    spans: tuple[ComputeSpan, ...]
    """Compute spans in order of time, without overlaps."""
    memory: tuple[MemorySample, ...]
    """Memory samples in order of time."""


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Measurements of one rank."""

    rank: int
    totals: tuple[Totals, ...]
    """Totals of each measured step."""
    timeline: StepTimeline
    peak_memory_gib: float


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Cost of waiting for one tensor in a step; mean over measured steps and ranks."""

    kind: str
    channel: str
    label: str
    block: str
    phase: Phase
    count: float
    """Number of its transfers in a step, e.g. one per micro-batch."""
    sent_bytes: float
    """Sum over these transfers, like the times below."""
    exposed_ms: float
    moving_ms: float
    others_ms: float
    queue_ms: float
    late_ms: float | None
    """Milliseconds by which it was launched too late; None if an earlier launch would not help."""
    reason: Reason
    """Reason for most of the wait."""
    advice: str
    """What would help, as far as the measurement shows, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class ModeProfile:
    """Measurements of one mode."""

    mode: str
    """mtp, msp, fsp or isp."""
    tensor: int
    """Ranks that share one sequence."""
    weight: int
    """Ranks that share one copy of the weights; 1 outside isp."""
    data: int
    pipeline: int
    topology: str
    """Description of the groups of ranks, for reports."""
    losses: tuple[float | None, ...]
    """Loss of each measured step; None if it was not finite."""
    summary: Totals
    """Mean over ranks of the step whose timeline is kept, which has median length."""
    ranks: tuple[RankProfile, ...]
    """Profiles in rank order."""
    waits: tuple[Wait, ...]
    """Waits, the worst first."""
    plan_grid: str | None = None
    """The prefetch plan as printed by `isp prefetch`; None if no weights are gathered."""

    @property
    def peak_memory_gib(self) -> float:
        """Peak memory of the rank with the most."""
        return max(rank.peak_memory_gib for rank in self.ranks)

    @property
    def exposed_by_cause(self) -> dict[Cause, float]:
        """Exposed milliseconds by cause, summed over the timelines of all ranks; largest first."""
        causes: defaultdict[Cause, float] = defaultdict(float)
        for c in (c for rank in self.ranks for c in rank.timeline.collectives):
            causes[c.cause] += c.exposed_ms - c.others_ms
            causes[Cause.OTHER_RANKS] += c.others_ms
        exposed = ((cause, milliseconds) for cause, milliseconds in causes.items() if milliseconds)
        return dict(sorted(exposed, key=lambda item: item[1], reverse=True))


@dataclass(frozen=True, kw_only=True)
class Profile(Result):
    """Result of `isp profile`: a run of a few steps in each mode, on the same data."""

    newest = 2
    name, again = "a profile", "profile the run again"

    version: int = newest
    created: str
    """Date and time in ISO 8601."""
    torch: str
    device: str
    """Name of rank 0's device."""
    world_size: int
    warmup_steps: int
    num_steps: int
    """Number of measured steps."""
    config: str
    """The whole configuration as YAML; modes differ only in `parallel.tensor.mode` and the size of
    the weight group."""
    modes: tuple[ModeProfile, ...]
    shared_cores: str = ""
    """Text such as `4 ranks share 2 cores`; empty if each rank has its own device or core."""
    command: str = ""
    """Command line that made the profile; empty without one."""

    @property
    def largest_loss_difference(self) -> float:
        """Largest difference of losses between modes in a step, relative to the loss.

        It is infinite if only some losses are finite.
        """
        steps = zip(*(mode.losses for mode in self.modes), strict=True)
        return max(map(_spread, steps), default=0.0)


def _spread(losses: tuple[float | None, ...]) -> float:
    """Return the relative spread of one step's losses over modes."""
    finite = [loss for loss in losses if loss is not None]
    if not finite:
        return 0.0
    if len(finite) < len(losses):
        return float("inf")
    return (max(finite) - min(finite)) / max(abs(max(finite)), 1e-30)
