"""A rank's step in time: along its plan, computing, launching and waiting as the layers do.

The order within a visit is that of `isp.layers.linear` and `isp.weights.communicator`: going
forward a weight is waited for before the next ones are requested; in backward they are requested
first, and where weights travel the weight gradient is computed before the weight is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from isp.parallel import Axis
from isp.parallel.config import WeightConfig
from isp.planner.case import Case
from isp.planner.clock import Clock
from isp.planner.costs import Costs
from isp.planner.counts import gradient_names
from isp.planner.declared import actions_of, bias_of, buckets, has_bias, layouts_of, stage_chunks
from isp.planner.fabric import Fabric
from isp.planner.trips import LinearTrips, Trip, Trips
from isp.weights.communicator import ISPCommModelConfig
from isp.weights.phase import Phase
from isp.weights.plan import ActKind, Step, plan
from isp.weights.trace import Action, ActionKind, Block, Chunks, Visit, trace

__all__ = ["Walk", "Walked", "walk"]


@dataclass(frozen=True)
class Walked:
    """What a step of a rank took; seconds."""

    actions: tuple[tuple[Action, float, float], ...]
    """Each with its duration, and how much of it was waiting."""
    tail: float
    """From the end of the last action to the end of the step."""
    tail_exposed: float
    """How much of it was waiting."""
    busy: float
    """Of all transfers, one after the other."""


def walk(case: Case, fabric: Fabric, rank: int, micro_num: int) -> Walked:
    """The step of `rank` with so many micro-batches, as if what other stages send were there."""
    return Walk(case, fabric, rank).run(micro_num)


@lru_cache(maxsize=64)
def _steps(
    chunks: Chunks, actions: tuple[Action, ...], config: WeightConfig, gathers: bool
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """What is to do at the start, as a step without a place, and the steps."""
    if not gathers:
        spans = trace(chunks, actions)
        sites = ((site, span.action.micro_batch) for span in spans for site in span.sites)
        return (), tuple(Step(site, micro, (), ()) for site, micro in sites)
    found = plan(
        chunks,
        actions,
        unit=config.forward_overlap_per,
        launch=config.launch_allgather_before,
        overlap=config.overlap,
    )
    return (Step(found.steps[0].site, -1, found.start, ()),), found.steps


@dataclass
class Walk:
    """The state of a walk."""

    case: Case
    fabric: Fabric
    rank: int
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        case, self.place = self.case, self.case.place(self.rank)
        self.trips = Trips(case, self.place)
        self.costs = Costs(case, self.place, self.fabric.device)
        self.chunks = stage_chunks(case, self.place.stage)
        self.layouts = layouts_of(case, self.place)
        self.overlap = case.parallel.weight.overlap
        self.column, self.row, self.head = (
            self.trips.column(),
            self.trips.row(),
            self.trips.head(),
        )
        self.there, self.back = self.trips.attention()
        self.loss = self.trips.loss()
        self._seconds: dict[Trip, float] = {}
        self._wires = {axis: self.fabric.wire(case, axis) for axis in Axis}
        self._gathers: dict[str, list[Trip]] = {}
        self._reductions: dict[str, list[tuple[Trip, int, int]]] = {}
        """The transfer of each gradient, its elements in all and on this rank."""
        self._flying: deque[tuple[int, int, int]] = deque()
        """Number, full bytes and elements of each gradient on its way."""
        self._flying_bytes = 0
        self._number = 0
        self._last = False
        """Whether this is the last backward, in which buckets may travel."""
        self._buckets = deque(enumerate(buckets(case, self.place).gradients))
        self._delivered = 0

    def run(self, micro_num: int) -> Walked:
        """Walk through a step."""
        clock = self.clock
        actions = actions_of(self.case, self.place.stage, micro_num)
        start, steps = _steps(
            self.chunks, actions, self.case.parallel.weight, self.case.gathers_weights
        )
        self._launch_publishing()
        for step in start:
            self._gather(act.weight for act in step.before)
        backwards = [a for a in actions if a.kind is ActionKind.BACKWARD]
        times: dict[Action, tuple[float, float]] = {}
        for step in steps:
            kind = ActionKind.FORWARD if step.site.phase is Phase.FORWARD else ActionKind.BACKWARD
            action = Action(kind, step.micro_batch, step.site.chunk)
            self._last = bool(backwards) and action == backwards[-1]
            before = clock.now, clock.exposed
            self._visit(step)
            took, waited = times.get(action, (0.0, 0.0))
            times[action] = took + clock.now - before[0], waited + clock.exposed - before[1]
        end, exposed = clock.now, clock.exposed
        self._end()
        return Walked(
            tuple((action, *of) for action, of in times.items()),
            clock.now - end,
            clock.exposed - exposed,
            clock.busy,
        )

    # -- visits ------------------------------------------------------------------------------

    def _visit(self, step: Step) -> None:
        block = self.chunks[step.site.chunk][step.site.block]
        visit = block.visits[step.site.visit]
        if step.site.phase is Phase.BACKWARD:
            self._backward(block, visit, step)
        else:
            self._forward(block, visit, step)

    def _linear(self, name: str) -> LinearTrips:
        if name == "head":
            return self.head
        return self.column if name in ("wqkv", "w1") else self.row

    def _forward(self, block: Block, visit: Visit, step: Step) -> None:
        clock, name = self.clock, visit.name
        if name == "attn":
            self._gather_planned(step)
            self._exchange(self.there[:-1])
            clock.compute(self.costs.attention[0])
            self._exchange(self.there[-1:])
            return
        if step.site.phase is Phase.RECOMPUTE and visit is next(
            v for v in block.visits if v.weight is not None
        ):
            self._exchange(self.trips.recomputed_inputs())
        clock.compute(self.costs.passes(name))
        clock.wait(("published", block.name))
        trips = self._linear(name)
        self._exchange([trips.x])
        if not self.overlap:
            self._gather_planned(step)
        self._wait_planned(step)
        if self.overlap:
            self._gather_planned(step)
        clock.compute(self.costs.product(name))
        self._exchange([trips.y])
        if name == "head":
            clock.compute(self.costs.loss)
            self._exchange(self.loss)

    def _backward(self, block: Block, visit: Visit, step: Step) -> None:
        clock, name = self.clock, visit.name
        product = self.costs.product(name)
        if name == "head":
            clock.compute(self.costs.loss)
        if self.overlap:
            self._gather_planned(step)
        trips = self._linear(name)
        self._exchange([trips.dy])
        again = self._set_off([trips.x] if trips.regathers_x else [])
        if self.case.gathers_weights:
            clock.compute(product)
            self._reduce(block, visit)
            if not self.overlap:
                self._gather_planned(step)
            self._wait_planned(step)
            if name != "embedding":
                clock.compute(product)
        else:
            if name != "embedding":
                clock.compute(product)
            travelling = self._set_off([trips.dx])
            self._arrive(again)
            clock.compute(product)
            self._deliver(self._own_numbers(visit))
            self._arrive(travelling)
        clock.compute(2 * self.costs.passes(name))
        if name == "wo":
            self._exchange(self.back[:1])
            clock.compute(self.costs.attention[1])
            self._exchange(self.back[1:])

    # -- transfers ---------------------------------------------------------------------------

    def _set_off(self, trips: Iterable[Trip | None]) -> list[int]:
        numbers = []
        for trip in trips:
            if trip is not None:
                self._number += 1
                self._launch(self._number, trip)
                numbers.append(self._number)
        return numbers

    def _arrive(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.clock.wait(number)

    def _exchange(self, trips: Iterable[Trip | None]) -> None:
        self._arrive(self._set_off(trips))

    def _launch(self, key: Hashable, trip: Trip, behind: Hashable | None = None) -> None:
        seconds = self._seconds.get(trip)
        if seconds is None:
            seconds = self._seconds[trip] = self.fabric.seconds(self.case, trip)
        axis = Axis.WEIGHT if trip.channel == "weight_reduce" else Axis(trip.channel)
        self.clock.launch(key, self._wires[axis], seconds, behind=behind)

    def _gather_planned(self, step: Step) -> None:
        self._gather(act.weight for act in step.before if act.kind is ActKind.GATHER)

    def _wait_planned(self, step: Step) -> None:
        for act in step.before:
            if act.kind is ActKind.WAIT:
                self.clock.wait(act.weight)

    def _gather(self, weights: Iterable[str]) -> None:
        for weight in weights:
            if weight not in self._gathers:
                names = [weight, bias_of(weight)] if has_bias(self.case, weight) else [weight]
                layouts = [self.layouts[name] for name in names]
                self._gathers[weight] = [self.trips.gather(layout) for layout in layouts]
            part = weight.split(".attention")[0].split(".feed_forward")[0].split(".weight")[0]
            for trip in self._gathers[weight]:
                self._launch(weight, trip, behind=("published", part))

    def _reduce(self, block: Block, visit: Visit) -> None:
        assert visit.weight is not None
        found = self._reductions.get(visit.weight)
        if found is None:
            names = gradient_names(self.case, block, visit)
            layouts = [self.layouts[name] for name in names]
            found = [
                (self.trips.reduce(x), prod(x.global_shape), prod(x.local_shape)) for x in layouts
            ]
            self._reductions[visit.weight] = found
        limit = ISPCommModelConfig.max_reduce_bytes if self.overlap else 0
        for trip, numbers, own in found:
            full = numbers * self.case.item_bytes
            while self._flying and self._flying_bytes + full > limit:
                self._land()
            (number,) = self._set_off([trip])
            self._flying.append((number, full, own))
            self._flying_bytes += full
        if not self.overlap:
            while self._flying:
                self._land()

    def _land(self) -> None:
        number, full, numbers = self._flying.popleft()
        self._flying_bytes -= full
        self.clock.wait(number)
        self._deliver(numbers)

    def _own_numbers(self, visit: Visit) -> int:
        assert visit.weight is not None
        if not self._last:
            return 0
        return prod(self.layouts[visit.weight].local_shape)

    def _deliver(self, numbers: int) -> None:
        """Gradients are final: launch the buckets that are complete by now."""
        if not self._last:
            return
        self._delivered += numbers
        while self._buckets and self._delivered >= self._buckets[0][1][1]:
            self._delivered -= self._buckets[0][1][1]
            self._launch_bucket()

    def _launch_bucket(self) -> None:
        number, (axis, length) = self._buckets.popleft()
        trip = self.trips.over(axis, length * self.case.wide_bytes, "gradients")
        if trip is not None:
            self._launch(("bucket", number), trip)

    # -- ends of a step ----------------------------------------------------------------------

    def _launch_publishing(self) -> None:
        """The weights of the step before are on their way when a step begins."""
        held = buckets(self.case, self.place).published
        names = [block.name for chunk in self.chunks for block in chunk]
        for number, length in enumerate(held):
            trip = self.trips.publish(length)
            first, stop = (len(names) * i // len(held) for i in (number, number + 1))
            key = ("published", names[min(first, len(names) - 1)])
            self._launch(key, trip)
            for name in names[first + 1 : stop]:
                self.clock.join(("published", name), key)

    def _end(self) -> None:
        total = len(buckets(self.case, self.place).gradients)
        while self._flying:
            self._land()
        while self._buckets:
            self._launch_bucket()
        for number in range(total):
            self.clock.wait(("bucket", number))
        self.clock.compute(self.costs.update)
        numbers = (Axis.DATA, Axis.MODEL, Axis.STAGE, Axis.PIPELINE)
        self._exchange([self.trips.over(axis, 8, "numbers") for axis in numbers])
