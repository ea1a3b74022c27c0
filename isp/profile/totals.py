"""Totals of a step's collectives, and a lower bound of the time that they expose.

No order of the transfers can hide the first gathers, the last reductions, those that are needed at
once (the chain), and what exceeds the compute (the excess). See [Note: The bound] in
docs/design/notes/profile.md.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import TypeVar

from isp.core.comm.tag import Purpose
from isp.core.comm.transfer_log import covered
from isp.core.mesh import Axis
from isp.core.mesh.phase import Phase
from isp.profile.collectives import RankTimes
from isp.profile.recorder import Mark
from isp.profile.schema import (
    Collective,
    ComputeSpan,
    Cost,
    Edge,
    KindTotals,
    MemorySample,
    StepTimeline,
    Totals,
)

__all__ = ["mean_totals", "step_collectives", "timeline", "totals"]

T = TypeVar("T", Collective, ComputeSpan)

_FORWARD = (Phase.FORWARD, Phase.LOSS)
_REDUCTIONS = (Purpose.WEIGHT_GRADIENT, Purpose.REPLICA_GRADIENT)
_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)
_SHORTEST_SPAN = 0.02
"""Milliseconds; shorter spans are merged into the next one."""


def step_collectives(times: RankTimes, step: int) -> tuple[Collective, ...]:
    """Return the collectives that were waited for in recorded step `step`, with their `edge`."""
    own = [c for c in times.collectives if times.step_of(c) == step]
    edges: dict[int, Edge] = {}
    gathers = [i for i, c in enumerate(own) if _is_first_gather(c, times.begins[step])]
    for i in sorted(gathers, key=lambda i: own[i].wait_ms):
        edges[i] = Edge.FIRST
        # The lookup in the table is too short to hide the gather of the first linear, so that
        # gather is at the edge, too.
        if own[i].block != "embedding":
            break
    # Of the reductions in backward only the last one has no compute left to overlap with; those in
    # the optimizer phase never have any.
    reductions = [i for i, c in enumerate(own) if c.purpose in _REDUCTIONS]
    in_backward = [i for i in reductions if own[i].phase in _BACKWARD]
    for i in (*in_backward[-1:], *(i for i in reductions if own[i].phase is Phase.OPTIMIZER)):
        edges[i] = Edge.LAST
    return tuple(dataclasses.replace(c, edge=edges.get(i)) for i, c in enumerate(own))


def _is_first_gather(collective: Collective, begin: float) -> bool:
    """Return True for a gather of weights that was launched before the step began."""
    is_weight = collective.purpose in (Purpose.WEIGHT, Purpose.PUBLISHED_WEIGHT)
    return is_weight and collective.launch_ms <= begin


def totals(times: RankTimes, step: int) -> Totals:
    """Return the totals of recorded step `step` of this rank."""
    own = step_collectives(times, step)
    length = times.begins[step + 1] - times.begins[step]
    spans, sums = _spans(times, step), _sums(own)
    return Totals(
        **vars(sums),
        step_ms=length,
        compute_ms=length - sums.exposed_ms,
        first_edge_ms=sum(_unavoidable(c) for c in own if c.edge is Edge.FIRST),
        last_edge_ms=sum(_unavoidable(c) for c in own if c.edge is Edge.LAST),
        chain_ms=sum(_unavoidable(c) for c in own if c.cost is Cost.CHAIN),
        excess_ms=_excess(own, spans, _FORWARD, times) + _excess(own, spans, _BACKWARD, times),
        by_kind={
            kind: _sums([c for c in own if _kind(c) == kind])
            for kind in sorted({_kind(c) for c in own})
        },
    )


def _kind(collective: Collective) -> str:
    """Return the kind of a collective; those of experts are named apart, with their channel."""
    axis = collective.channel.removesuffix("_reduce")
    of_experts = axis in (Axis.EXPERT, Axis.EXPERT_WEIGHT)
    return f"{collective.kind}, {axis}" if of_experts else collective.kind


def _sums(own: Sequence[Collective]) -> KindTotals:
    """Return the number of the collectives `own`, and the sums of their bytes and times."""
    return KindTotals(
        num_transfers=len(own),
        sent_bytes=sum(c.sent_bytes for c in own),
        comm_ms=covered((c.start_ms, c.end_ms) for c in own),
        exposed_ms=sum(c.exposed_ms for c in own),
    )


def _unavoidable(collective: Collective) -> float:
    """Return the milliseconds of the wait that no earlier launch of `collective` could hide."""
    # The transfer began before the wait, so the part of its duration until then was hidden. No more
    # can be unavoidable than was measured as exposed: `moving_ms` is from the fastest rank.
    hidden = collective.wait_ms - collective.start_ms
    return max(0.0, min(collective.moving_ms - max(0.0, hidden), collective.exposed_ms))


def _excess(
    own: Iterable[Collective],
    spans: Iterable[ComputeSpan],
    phases: tuple[Phase, ...],
    times: RankTimes,
) -> float:
    """Return the time by which the hideable transfers of `phases` exceed their compute."""
    others = [c for c in own if c.cost is Cost.AHEAD and c.edge is None]
    # A transfer that is waited for in neither forward nor backward counts in backward.
    forward = phases is _FORWARD
    moving = sum(
        c.moving_ms for c in others if (times.mark_at(c.wait_ms).phase in _FORWARD) is forward
    )
    # Spans include waits of all transfers, during which nothing is computed: subtract them.
    length = sum(span.end_ms - span.begin_ms for span in spans if span.phase in phases)
    waited = sum(c.exposed_ms for c in own if times.mark_at(c.wait_ms).phase in phases)
    return max(0.0, moving - max(0.0, length - waited))


def timeline(times: RankTimes, step: int, *, number: int, zero: float) -> StepTimeline:
    """Return recorded step `step` as the timeline of step `number`, in time since `zero`."""
    begin, end = times.begins[step], times.begins[step + 1]
    # Memory is read only at the starts of blocks; other marks have 0.
    marks = [mark for mark in times.marks if begin <= mark.at < end and mark.memory_gib]
    return StepTimeline(
        step=number,
        begin_ms=begin - zero,
        end_ms=end - zero,
        collectives=tuple(
            _moved(c, zero, "launch_ms", "start_ms", "end_ms", "wait_ms")
            for c in step_collectives(times, step)
        ),
        spans=tuple(_moved(s, zero, "begin_ms", "end_ms") for s in _spans(times, step)),
        memory=tuple(
            MemorySample(at_ms=mark.at - zero, phase=mark.phase, gib=mark.memory_gib)
            for mark in marks
        ),
    )


def _moved(timed: T, zero: float, *names: str) -> T:
    """Return `timed` with the named times counted from `zero`."""
    return dataclasses.replace(timed, **{name: getattr(timed, name) - zero for name in names})


def _spans(times: RankTimes, step: int) -> list[ComputeSpan]:
    """Return the compute spans of a step: each begins where the one before ends.

    They cover the whole step, from its begin to its end.
    """
    begin, end = times.begins[step], times.begins[step + 1]
    within = [m for m in times.marks if begin < m.at < end and not m.site]
    # The part that runs when the step begins was marked before the step.
    first = [times.mark_at(begin)] if times.marks else [Mark(begin, Phase.OTHER, "")]
    spans: list[ComputeSpan] = []
    # `reached` moves on only after a span that is kept, so a skipped one extends the next.
    reached = begin
    for mark, stop in zip([*first, *within], [*(mark.at for mark in within), end], strict=True):
        if stop - reached < _SHORTEST_SPAN:
            continue
        block = mark.block or mark.phase
        if spans and (spans[-1].block, spans[-1].phase) == (block, mark.phase):
            spans[-1] = dataclasses.replace(spans[-1], end_ms=stop)
        else:
            spans.append(ComputeSpan(block=block, phase=mark.phase, begin_ms=reached, end_ms=stop))
        reached = stop
    return spans


def mean_totals(several: Sequence[Totals]) -> Totals:
    """Return the mean of each field over `several`, such as the totals of all ranks.

    A kind of collective that is missing in some of them counts as zero there.
    """
    kinds = sorted({kind for one in several for kind in one.by_kind})
    absent = KindTotals(num_transfers=0, sent_bytes=0, comm_ms=0.0, exposed_ms=0.0)
    by_kind = {
        kind: KindTotals(**_means([one.by_kind.get(kind, absent) for one in several]))
        for kind in kinds
    }
    return Totals(**_means(several), by_kind=by_kind)


def _means(several: Sequence[Totals] | Sequence[KindTotals]) -> dict[str, float]:
    """Return by name the mean of each field over `several`, without the field `by_kind`."""
    names = [field.name for field in dataclasses.fields(several[0]) if field.name != "by_kind"]
    return {name: statistics.fmean(getattr(one, name) for one in several) for name in names}
