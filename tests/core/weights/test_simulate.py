"""The simulation finds every error in a plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isp.core.mesh.config import OverlapUnit, Prefetch
from isp.core.weights.prefetch_plan import PlanEntry, PrefetchPlan, WeightOp, WeightOpKind, plan
from isp.core.weights.simulate import simulate
from isp.core.weights.uses import Action, Chunks, sequential_actions
from tests.core.weights.schedules import EMBEDDING, HEAD, TIED_HEAD, actions, block, decoder

CASES: list[tuple[Chunks, tuple[Action, ...]]] = [
    (decoder(2), sequential_actions(2)),
    (decoder(3, 0.5), sequential_actions(1)),
    (decoder(2, 1.0), sequential_actions(2, training=False)),
    (tuple((block(f"{c}0"), block(f"{c}1")) for c in "ab"), actions("F0 F0.1 B0.1 F1 B0 B1")),
    (((EMBEDDING, block("a", ("w1",)), block("b", ("w1",)), TIED_HEAD),), sequential_actions(1)),
    (((HEAD,),), sequential_actions(1)),
]
every_plan = pytest.mark.parametrize("unit", list(OverlapUnit))
every_case = pytest.mark.parametrize(("chunks", "order"), CASES)

Slots = list[list[WeightOp]]
"""The operations of a plan in order: start, then before and after each entry."""


def slots(made: PrefetchPlan) -> Slots:
    return [
        list(made.start),
        *(list(s) for step in made.entries for s in (step.before, step.after)),
    ]


def rebuilt(made: PrefetchPlan, acts: Slots) -> PrefetchPlan:
    sides = [tuple(slot) for slot in acts]
    pairs = zip(made.entries, sides[1::2], sides[2::2], strict=True)
    return PrefetchPlan(sides[0], tuple(s._replace(before=b, after=a) for s, b, a in pairs))


def edits(acts: Slots) -> Iterator[tuple[int, int, WeightOp]]:
    return ((s, i, act) for s, slot in enumerate(acts) for i, act in enumerate(slot))


def made_for(chunks: Chunks, order: tuple[Action, ...], unit: OverlapUnit) -> PrefetchPlan:
    return plan(chunks, order, Prefetch(unit=unit))


@every_plan
@every_case
def test_a_missing_operation_is_found(
    chunks: Chunks, order: tuple[Action, ...], unit: OverlapUnit
) -> None:
    """Catches a simulation that does not notice a missing gather, wait or free."""
    made = made_for(chunks, order, unit)
    for s, i, _ in edits(slots(made)):
        acts = slots(made)
        del acts[s][i]
        with pytest.raises(AssertionError):
            simulate(rebuilt(made, acts), chunks, order)


@every_plan
@every_case
def test_entries_that_differ_from_the_step_are_found(
    chunks: Chunks, order: tuple[Action, ...], unit: OverlapUnit
) -> None:
    """Catches a plan for another model or another order of work."""
    made = made_for(chunks, order, unit)
    steps = made.entries
    wrong: list[tuple[PlanEntry, ...]] = [
        steps[:-1],
        (*steps, steps[-1]),
        *((*steps[:i], *steps[i + 1 :]) for i in range(len(steps))),
        *((*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]) for i in range(len(steps) - 1)),
        tuple(step._replace(micro_batch=step.micro_batch + 1) for step in steps),
    ]
    for other in wrong:
        with pytest.raises(AssertionError):
            simulate(made._replace(entries=other), chunks, order)


CHUNKS: Chunks = ((block("a", ("w1",)), block("b", ("w1",)), block("c", ("w1",))),)
ORDER = actions("F0")
GATHER_C = WeightOp(WeightOpKind.GATHER, "c.w1")
WAIT_C = WeightOp(WeightOpKind.WAIT, "c.w1")
FREE_C = WeightOp(WeightOpKind.FREE, "c.w1")


@pytest.mark.parametrize(
    ("slot", "acts", "message"),
    [
        (1, [], r"entry 0 \(micro-batch 0, .*forward.*block=0.*\): reads a.w1, which is not ready"),
        (5, [], "entry 2 .*: reads c.w1, which is not ready"),
        (5, [WAIT_C, GATHER_C], "entry 2 .*: gathers c.w1, which is there or in flight"),
        (3, [WAIT_C], "entry 1 .*: waits for c.w1, which is not in flight"),
        (2, [FREE_C], "entry 0 .*: frees c.w1, which is not ready"),
        (0, [WAIT_C], "start: waits for c.w1, which is not in flight"),
        (6, [], "end: left behind: c.w1"),
        (5, [WAIT_C, FREE_C], "entry 2 .*: frees c.w1, which was never read"),
        (
            0,
            [WeightOp(WeightOpKind.GATHER, "b.w1"), WeightOp(WeightOpKind.GATHER, "a.w1")],
            "a.w1 out of turn",
        ),
    ],
)
def test_an_error_names_its_position_in_the_plan(
    slot: int, acts: list[WeightOp], message: str
) -> None:
    """Catches a failure that does not say where it occurs."""
    made = plan(CHUNKS, ORDER, Prefetch())
    changed = slots(made)
    changed[slot] = acts
    with pytest.raises(AssertionError, match=message):
        simulate(rebuilt(made, changed), CHUNKS, ORDER)
