"""The worst waits of a mode: the reason for each, and what would help.

A change is recommended only if it would have hidden the transfer on the measured timeline. See
[Note: What is claimed] in docs/design/notes/profile.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from isp.core.comm.tag import Purpose
from isp.core.mesh.config import LaunchPoint, OverlapUnit, ParallelConfig
from isp.core.mesh.phase import Phase
from isp.profile.collectives import RankTimes
from isp.profile.recorder import Mark
from isp.profile.schema import Collective, Cost, Edge, Reason, Wait
from isp.profile.totals import step_collectives

__all__ = ["worst_waits"]

_SHORTEST = 0.005
"""Milliseconds per step; shorter waits are not reported."""
_ENOUGH = 0.95
"""Share of a tensor's waits that a change must hide to be recommended."""
_BACKWARD = (Phase.RECOMPUTE, Phase.BACKWARD)
"""Phases that gather weights again."""
_OF_SEQUENCE = {
    Purpose.HEADS: "attention needs it at once: only parallel.tensor.size changes that",
    Purpose.EXPERTS: (
        "experts need it at once: parallel.expert.num_chunks overlaps the exchange of one chunk"
        " with the compute of another, and parallel.expert.size=1 gathers weights instead"
    ),
    Purpose.KEYS: "attention needs it at once: only parallel.sequence_2D changes that",
    Purpose.SCAN_HEADS: (
        "a scan needs it at once: parallel.sequence_scan=state would send states instead of heads"
    ),
    Purpose.STATES: (
        "a scan needs it at once: parallel.sequence_scan=heads would send heads instead of states"
    ),
    Purpose.HALO: (
        "a convolution needs it at once: its size depends on the kernel size, not on the sequence"
    ),
}
"""Advice on exchanges within one sequence, by purpose."""


class _Occurrence(NamedTuple):
    """One collective of a tensor, in one step of one rank."""

    rank: int
    collective: Collective
    step: tuple[Collective, ...]
    """All collectives of the step in which `collective` is, on the same rank."""
    sites: list[Mark]
    """Marks of the uses of weights in that step's forward."""


def worst_waits(
    times: Sequence[RankTimes], steps: Sequence[int], parallel: ParallelConfig, *, at_most: int = 12
) -> tuple[Wait, ...]:
    """Return the tensors that were waited for longest in recorded `steps`, over all ranks."""
    found: defaultdict[tuple[str, ...], list[_Occurrence]] = defaultdict(list)
    for rank, own in enumerate(times):
        for step in steps:
            begin, end = own.begins[step], own.begins[step + 1]
            marks = (mark for mark in own.marks if mark.site and begin <= mark.at < end)
            sites = [mark for mark in marks if mark.phase is Phase.FORWARD]
            collectives = step_collectives(own, step)
            for c in collectives:
                key = (c.kind, c.channel, c.label, c.block, c.phase)
                found[key].append(_Occurrence(rank, c, collectives, sites))
    divisor = len(steps) * len(times)
    waits = [_Waits(several, parallel) for several in found.values()]
    worst = sorted(waits, key=lambda one: one.exposed, reverse=True)[:at_most]
    return tuple(one.explained(divisor) for one in worst if one.exposed / divisor > _SHORTEST)


class _Waits:
    """All waits for one tensor; finds their main reason and the advice."""

    def __init__(self, several: list[_Occurrence], parallel: ParallelConfig) -> None:
        self.several = several
        self.parallel = parallel
        self.own = [one.collective for one in several]
        self.exposed = sum(c.exposed_ms for c in self.own)

    def explained(self, divisor: int) -> Wait:
        """Return all these waits as one `Wait`: means, the main reason, and the advice.

        Sums are divided by `divisor`, the number of steps times the number of ranks. If the reason
        is LATE, `late_ms` is the time of the longest wait.
        """
        first, longest = self.own[0], max(self.own, key=lambda c: c.exposed_ms)
        reason, advice = self._reason(longest)
        sums = "sent_bytes", "exposed_ms", "moving_ms", "others_ms", "queue_ms"
        return Wait(
            **{name: sum(getattr(c, name) for c in self.own) / divisor for name in sums},
            kind=first.kind,
            channel=first.channel,
            label=first.label,
            block=first.block,
            phase=first.phase,
            count=len(self.own) / divisor,
            late_ms=longest.exposed_ms if reason is Reason.LATE else None,
            reason=reason,
            advice=advice,
        )

    def _reason(self, longest: Collective) -> tuple[Reason, str]:
        """Return the reason, and the advice in one sentence."""
        # The order matters: a setting that hides the wait comes before mere explanations.
        if longest.edge is None and (change := self._change()) is not None:
            late = f"launched {longest.exposed_ms:.1f} ms too late"
            return Reason.LATE, f"{late}: {change} would hide it"
        if sum(c.others_ms for c in self.own) >= self.exposed / 2:
            return Reason.OTHER_RANKS, self._of_other_ranks()
        if longest.edge is Edge.FIRST:
            text = "expected: nothing can be computed before the first weights are there"
            return Reason.FIRST_EDGE, text
        if longest.edge is Edge.LAST:
            text = "expected: no compute is left to overlap with the last gradients"
            return Reason.LAST_EDGE, text
        if longest.cost is not Cost.AHEAD:
            return Reason.CHAIN, self._of_chain(longest)
        if sum(c.queue_ms for c in self.own) >= self.exposed / 2:
            return Reason.QUEUE, self._of_queue()
        return Reason.TOO_LONG, self._of_length()

    # -- sentences ---------------------------------------------------------------------------

    def _of_other_ranks(self) -> str:
        """Return a sentence with the mean time until the last rank joined the collective.

        The sentence names that rank if it is the last one nearly every time.
        """
        waited: defaultdict[int, float] = defaultdict(float)
        for one in self.several:
            waited[one.rank] += one.collective.others_ms
        rank = min(waited, key=lambda r: waited[r])
        text = f"{sum(waited.values()) / len(self.own):.1f} ms for the last rank to join"
        # A rank that nearly always joins last hardly ever waits for another one.
        is_last = waited[rank] < max(waited.values()) / 10
        return f"{text}, usually rank {rank}" if is_last else text

    def _of_chain(self, collective: Collective) -> str:
        """Return the advice on a transfer that is needed at once."""
        if collective.cost is Cost.OUTSIDE:
            return "outside forward and backward: no compute overlaps with it"
        mode = self.parallel.tensor.mode
        if not mode.gathers_weights:
            return (
                f"{mode} needs it at once, so nothing can hide it: isp mode sends weights instead"
            )
        default = "needed at once, so nothing can hide it"
        return _OF_SEQUENCE.get(collective.purpose, default)

    def _of_queue(self) -> str:
        """Return a sentence that names the transfer after which this tensor's transfers queued.

        If they are gathers that queued after a reduction, it names the setting that avoids this.
        """
        ahead: defaultdict[str, float] = defaultdict(float)
        after_reduction = False
        for _, own, step, _ in self.several:
            # The transfer that it queued after is the one on its channel that ends where it starts.
            on_channel = (c for c in step if c.channel == own.channel)
            before = next((c for c in on_channel if abs(c.end_ms - own.start_ms) < 1e-6), None)
            if before is not None:
                ahead[f"{before.kind} of {before.label}"] += own.queue_ms
                kinds = before.kind, own.kind
                after_reduction |= kinds == ("reduce_scatter", "all_gather")
        if not ahead:
            return "it queued on its channel"
        text = f"it queued after {max(ahead, key=lambda name: ahead[name])}"
        if after_reduction and not self.parallel.weight.own_reduce_group:
            return f"{text}: parallel.weight.own_reduce_group=true would let it overtake"
        return text

    def _of_length(self) -> str:
        """Return a sentence with the mean duration of the transfers, and how to hide or avoid them.

        It also has the compute between launch and use, which was too short to hide them.
        """
        # The time needed is that from launch to end, without the wait for other ranks.
        needed = fmean(max(c.moving_ms, c.end_ms - c.launch_ms - c.others_ms) for c in self.own)
        overlapped = fmean(map(_overlapped_compute, self.several))
        text = (
            f"each takes {needed:.1f} ms from launch to end, with {overlapped:.1f} ms of compute"
            f" between launch and use"
        )
        first, weight = self.own[0], self.parallel.weight
        if first.purpose in (Purpose.REGATHERED_ACTIVATION, Purpose.INPUT_GRADIENT):
            return f"{text}, and both grow with the tokens"
        # If hardly any compute overlaps with it, no realistic batch would hide it.
        remedies = []
        if overlapped >= 0.1 * needed:
            remedies.append(
                f"{needed / overlapped:.1f}x the tokens per micro-batch (data.micro_bsz,"
                f" data.seq_len) would hide it"
            )
        is_again = first.purpose is Purpose.WEIGHT and first.phase in _BACKWARD
        if is_again and weight.reshard_after_forward:
            remedies.append(
                "parallel.weight.reshard_after_forward=false would avoid it but keep all weights"
                " unsharded"
            )
        return f"{text}: {', or '.join(remedies)}" if remedies else text

    # -- the setting that would hide it ------------------------------------------------------

    def _change(self) -> str | None:
        """Return the setting that would have hidden the wait, if there is one."""
        weight, point = self.parallel.weight, self.parallel.weight.launch_allgather_before
        if self.own[0].purpose is not Purpose.WEIGHT:
            return None
        if not weight.overlap:
            changes = {"overlap=true": point}
        elif self.own[0].phase is not Phase.FORWARD:
            # Launch points can be chosen for forward only.
            return None
        elif weight.forward_overlap_per is OverlapUnit.MODULE:
            changes = {"forward_overlap_per=layer": point}
        else:
            # Try the launch points before the present one, nearest first: the later the launch, the
            # shorter the gathered weights take memory.
            order = list(LaunchPoint)
            earlier = reversed(order[: order.index(point)])
            changes = {f"launch_allgather_before={p}": p for p in earlier}
        hiding = (name for name, at in changes.items() if self._would_hide(at))
        return next((f"parallel.weight.{name}" for name in hiding), None)

    def _would_hide(self, point: LaunchPoint) -> bool:
        """Return True if launching at `point` would have hidden nearly all of the waits."""
        hidden = sum(self._hidden_from(one, point) for one in self.several)
        return hidden >= _ENOUGH * self.exposed

    def _hidden_from(self, one: _Occurrence, point: LaunchPoint) -> float:
        """Return the milliseconds hidden by a launch at `point` of the block before."""
        c, place = one.collective, _place(one, point)
        # A launch at `point` would be no earlier than the measured one: it hides nothing.
        if place is None or place > c.launch_ms:
            return 0.0
        return min(c.exposed_ms, max(0.0, c.wait_ms + c.exposed_ms - _end_from(one, place)))


def _overlapped_compute(one: _Occurrence) -> float:
    """Return the milliseconds of compute between a collective's launch and its use."""
    c = one.collective
    # Nothing is computed while the rank waits for other transfers.
    waits = sum(o.exposed_ms for o in one.step if c.launch_ms <= o.wait_ms < c.wait_ms)
    return max(0.0, c.wait_ms - c.launch_ms - waits)


def _place(one: _Occurrence, point: LaunchPoint) -> float | None:
    """Return the time at which the rank reached `point` in the block before the collective's.

    A launch comes after the wait for the weight that is read there. Returns None if the point was
    not reached.
    """
    c = one.collective
    # Going back from the wait, the first run of marks is of the collective's own block, the second
    # of the block before.
    passed = [mark for mark in one.sites if mark.at <= c.wait_ms]
    runs = groupby(reversed(passed), key=lambda mark: mark.block)
    block, _ = next(runs, ("", None))
    _, before = next(runs, ("", None))
    if block != c.block or before is None:
        return None
    following = c.wait_ms
    # `before` has the marks of the previous block, the latest first. `following` is the time of the
    # mark after `site`.
    for site in before:
        if site.site == point:
            # The gathers are launched after the waits for what is read at this site.
            waits = [
                o.wait_ms + o.exposed_ms
                for o in one.step
                if o.cost is Cost.AHEAD and site.at <= o.wait_ms < following
            ]
            return max([site.at, *waits])
        following = site.at
    return None


def _end_from(one: _Occurrence, place: float) -> float:
    """Return the end of the collective if its block had been launched at `place`.

    Assumes that the other ranks would have joined as much earlier as this one.
    """
    c = one.collective
    others_begin = max(c.wait_ms, c.start_ms) + c.others_ms - (c.launch_ms - place)
    with_others = others_begin + c.moving_ms if c.others_ms else place
    # All weights of the block are gathered from `place` on, one transfer after another.
    together = [
        o
        for o in one.step
        if (o.kind, o.channel, o.block, o.phase) == (c.kind, c.channel, c.block, c.phase)
        and place <= o.launch_ms <= c.launch_ms
    ]
    mine = {id(o) for o in together}
    foreign = [o for o in one.step if id(o) not in mine]
    under_way = [o.end_ms for o in foreign if o.launch_ms <= place < o.end_ms]
    alone = max([place, *under_way]) + sum(o.moving_ms for o in together)
    # Other transfers that are launched before the end share the link, so the end moves later by
    # their duration. Before the later end there may be further launches: repeat until there are
    # none.
    end, meanwhile = alone, -1.0
    while True:
        crossing = sum(o.moving_ms for o in foreign if place < o.launch_ms < end)
        if crossing <= meanwhile:
            return max(end, with_others)
        meanwhile, end = crossing, alone + crossing
