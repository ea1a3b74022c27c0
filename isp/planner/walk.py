"""Simulation of one rank's training step on a clock: compute, transfers and waiting.

The records of a rehearsal (`isp.planner.rehearsal`) say what each block does and in which order.
The runtime's own classes (`isp.planner.rank`) launch the transfers of weights and gradients. This
file adds the order in which `ISPCommunicator` acts: forward waits for a weight before it launches
the next gathers; backward launches them before it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from isp.core.comm.host_offload import FROM_HOST, HOST
from isp.core.comm.tag import Purpose, Tag, Transfer
from isp.core.mesh import Axis
from isp.core.mesh.phase import Phase
from isp.core.optim.matrices import in_turn
from isp.core.weights.prefetch_plan import WeightOp, WeightOpKind, plan
from isp.core.weights.uses import Action, ActionKind, Block, Span, step_spans
from isp.models.moe.load_balance import experts_of
from isp.planner.case import PlanCase
from isp.planner.costs import Costs
from isp.planner.declared import shape_of
from isp.planner.fabric import Fabric, axis_of
from isp.planner.rank import DryRank, Heard
from isp.planner.record import Arrive, Compute, Event, GradientReady, Launch, Reach, Read
from isp.planner.rehearsal import records_of, rehearsal

__all__ = ["Clock", "Walk", "Walked", "walk"]


@dataclass(frozen=True)
class Walked:
    """The simulated times of one rank's step, in seconds, and its transfers."""

    actions: tuple[tuple[Action, float, float], ...]
    """Each action with its duration and the part of it that was spent waiting."""
    tail: float
    """Seconds from the end of the last action to the end of the step."""
    tail_exposed: float
    """The part of `tail` spent waiting."""
    busy: float
    """Sum of the durations of all transfers of the rank, hidden or not."""
    sent: Counter[Transfer]
    """Transfers, except activations between stages, batches, and a tied table's gradient."""

    @property
    def working(self) -> float:
        """Return the duration of all actions."""
        return sum(took for _, took, _ in self.actions)

    @property
    def waiting(self) -> float:
        """Return the time spent waiting in the whole step."""
        return sum(waited for _, _, waited in self.actions) + self.tail_exposed


def walk(case: PlanCase, fabric: Fabric, rank: int, micro_num: int) -> Walked:
    """Simulate the step of `rank` with `micro_num` micro-batches.

    Tensors of other stages are assumed to arrive in time; `predict` adds the pipeline bubble.
    """
    return Walk(case, fabric, rank).run(micro_num)


class Clock:
    """Clock of one rank, in seconds, with one compute stream and several wires.

    A wire is a link between ranks, or to the host, that carries one transfer at a time, in launch
    order. Only computing and waiting advance the clock.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.exposed = 0.0
        """Seconds that the rank waited for transfers."""
        self.busy = 0.0
        """Sum of the durations of all transfers so far, hidden or not."""
        self._wires: dict[str, float] = {}  # the time at which each wire becomes free
        self._arrivals: dict[Hashable, float] = {}

    def compute(self, seconds: float) -> None:
        """Advance the rank's simulated time by a computation of `seconds`."""
        self.now += seconds

    def launch(
        self, key: Hashable, wire: str, seconds: float, *, after: Hashable | None = None
    ) -> None:
        """Queue a transfer on its wire; it starts once the transfer `after` has arrived."""
        start = max(self.now, self._wires.get(wire, 0.0), self._arrivals.get(after, 0.0))
        self._wires[wire] = self._arrivals[key] = start + seconds
        self.busy += seconds

    def wait(self, key: Hashable) -> None:
        """Wait for a transfer; does nothing if it has ended or was never launched."""
        late = self._arrivals.pop(key, 0.0) - self.now
        if late > 0:
            self.exposed += late
            self.now += late


Acts = dict[tuple[Phase, int], tuple[WeightOp, ...]]
"""Gathers, waits and frees that the prefetch plan has before each use of a block."""


class Walk:
    """State of a simulated step: the clock, the rank's runtime classes, transfers in flight."""

    def __init__(self, case: PlanCase, fabric: Fabric, rank: int) -> None:
        self.case, self.fabric, self.clock = case, fabric, Clock()
        self.place = case.place(rank)
        self.dry = DryRank(case, self.place, self)
        self.costs = Costs(case, self.place, fabric.device, fabric.host)
        self.chunks = shape_of(case, self.place.stage).chunks
        self.records = records_of(case, self.place, chain(*self.chunks))
        self.overlap = case.parallel.weight.overlap
        self._wires = {axis: fabric.wire(case, axis) for axis in Axis}
        self.sent = Counter[Transfer]()
        self._seconds: dict[tuple[str, str, int], float] = {}
        self._gathers: dict[WeightOp, list[Transfer]] = {}
        self._number = self._launched = 0
        self._published: dict[str | None, Hashable] = {}
        """By weight, the key of the all-gather that brings its updated rows to this rank."""
        self._reached: tuple[Block, int] | None = None
        """The use that backward reached last; `_pass_back` charges it when the next one begins."""
        self._fetched: set[Hashable] = set()
        """Keys (action, block) of block inputs whose copy from the host was launched."""
        self._latest: dict[int, int] = {}
        """By chunk, the micro-batch whose forward was the latest."""
        self._last = self._travels = False
        """`_last`: this is the last backward of its chunk. `_travels`: buckets may be reduced."""
        uses = [use for chunk in self.chunks for block in chunk for use in block.uses]
        names = [name for use in uses for name in (use.weight, use.bias)]
        self._uses = Counter(name for name in names if name is not None)
        """Number of gradients that each parameter gets in the last backward passes."""

    def run(self, micro_num: int) -> Walked:
        """Simulate one step and return its times."""
        clock = self.clock
        actions = self.case.order.actions(self.place.stage, micro_num)
        lasts = {a.chunk: a for a in actions if a.kind is ActionKind.BACKWARD}
        self._publish()
        times: dict[Action, tuple[float, float]] = {}
        for span, acts in self._planned(actions):
            before = clock.now, clock.exposed
            self._last = span.action == lasts.get(span.action.chunk)
            self._pass(span, acts)
            took, waited = times.get(span.action, (0.0, 0.0))
            times[span.action] = took + clock.now - before[0], waited + clock.exposed - before[1]
        end, exposed = clock.now, clock.exposed
        self._end()
        return Walked(
            tuple((action, *of) for action, of in times.items()),
            clock.now - end,
            clock.exposed - exposed,
            clock.busy,
            self.sent,
        )

    def _planned(self, actions: tuple[Action, ...]) -> Iterator[tuple[Span, Acts]]:
        """Yield each block of each action with the operations of the prefetch plan in it."""
        if not self.case.gathers_weights:
            yield from ((span, {}) for span in step_spans(self.chunks, actions))
            return
        start, steps = plan(self.chunks, actions, self.case.parallel.weight.prefetch)
        self._gather(start)
        following = iter(steps)
        for span in step_spans(self.chunks, actions):
            own = (next(following) for _ in span.sites)
            yield span, {(step.site.phase, step.site.use): step.before for step in own}

    # -- a block -----------------------------------------------------------------------------

    def _pass(self, span: Span, acts: Acts) -> None:
        """Simulate one block of one action."""
        block = self.chunks[span.action.chunk][span.block]
        record = self.records[block.name]
        forward = span.action.kind is ActionKind.FORWARD
        if forward:
            self._latest[span.action.chunk] = span.action.micro_batch
            # The first forward after an update waits for the published weights.
            for use in block.uses:
                self.clock.wait(self._published.get(use.weight))
        elif self._last and not self._travels:
            # From here on gradients of the last backward passes are delivered. Each use of a
            # parameter delivers one; a bucket is reduced when all of its parameters have theirs.
            self._travels = True
            self.dry.expect_last(self._uses)
        if not forward:
            self._bring_back(span)
        events: Iterable[Event] = record.forward if forward else record.backward
        for event in record.again if span.computes_again else events:
            self._play(event, block, acts)
        self._pass_back(None)

    def _bring_back(self, span: Span) -> None:
        """Wait for a block's input from the host, and fetch the next one that backward needs.

        The last block's input is still on the device if no other micro-batch went forward
        afterwards.
        """
        chunk, sizes = span.action.chunk, self._host_sizes(span.action.chunk)
        if not sizes[span.block]:
            return
        if any(sizes[span.block + 1 :]) or self._latest[chunk] != span.action.micro_batch:
            self._fetch(span.action, span.block, sizes[span.block])
        self.clock.wait((span.action, span.block))
        following = next((b for b in reversed(range(span.block)) if sizes[b]), None)
        if following is not None:
            self._fetch(span.action, following, sizes[following])

    def _host_sizes(self, chunk: int) -> list[int]:
        """Return the bytes of each block's input on the host."""
        return [self.records[block.name].saved.host for block in self.chunks[chunk]]

    def _fetch(self, action: Action, block: int, size: int) -> None:
        """Launch the transfer of a block's input from the host, once."""
        # An input is fetched ahead, by the block whose backward runs before: fetch it only once.
        key = action, block
        if key not in self._fetched:
            self._fetched.add(key)
            self._launch(key, Transfer(FROM_HOST, HOST, Tag(Purpose.BLOCK_INPUT), size))

    def _play(self, event: Event, block: Block, acts: Acts) -> None:
        """Advance the simulation by one event of a block's record, such as a launched transfer."""
        clock = self.clock
        match event:
            case Launch(transfer):
                # The age of an `Arrive` counts transfers on the device only.
                self._launched += transfer.channel != HOST
                self._launch(("record", self._launched), transfer)
            case Arrive(age):
                clock.wait(("record", self._launched - age))
            case Reach(use, phase):
                self._reach(block, use, phase, acts.get((phase, use), ()))
            case Read(use, phase):
                self._read(phase, acts.get((phase, use), ()))
            case Compute():
                clock.compute(self.costs.compute(event))
            case GradientReady(use, is_bias):
                self._pass_back((block, use))
                name = block.uses[use].bias if is_bias else block.uses[use].weight
                assert name is not None
                self.dry.deliver(name, last=self._last)

    def _reach(self, block: Block, use: int, phase: Phase, acts: tuple[WeightOp, ...]) -> None:
        """Replay the start of a use: its memory-bound operations, and the gathers launched here."""
        reads = block.uses[use].weight is not None
        if phase is Phase.BACKWARD:
            self._pass_back((block, use))
        elif reads:
            self.clock.compute(self.costs.before(block, use))
        # A use without a weight is never read, so its gathers are launched here. In forward, a use
        # with a weight launches gathers only after the wait for the weight, in `_read`.
        if not reads or (phase is Phase.BACKWARD and self.overlap):
            self._gather(acts)

    def _read(self, phase: Phase, acts: tuple[WeightOp, ...]) -> None:
        """Replay a weight's read: wait for it, and launch the gathers of the next ones."""
        if not self.overlap:
            self._gather(acts)
        for act in acts:
            if act.kind is WeightOpKind.WAIT:
                self.clock.wait(act.weight)
        if self.overlap and phase is not Phase.BACKWARD:
            # In backward the gathers were launched in `_reach`, before this wait.
            self._gather(acts)

    def _pass_back(self, use: tuple[Block, int] | None) -> None:
        """Charge the memory-bound operations of the use that backward reached last.

        Nothing is charged while `use` is still that use: in backward these operations run after the
        product, so they are charged when another use begins or the block ends (None).
        """
        if self._reached is not None and self._reached != use:
            # Backward moves about twice the bytes of forward: its tensors and their gradients.
            self.clock.compute(2 * self.costs.before(*self._reached))
        self._reached = use

    # -- transfers ---------------------------------------------------------------------------

    def launched(self, transfer: Transfer) -> Callable[[], None]:
        """Launch a transfer of the dry rank and return its wait (the `Listener` protocol)."""
        self._number += 1
        number = self._number
        self._launch(number, transfer)
        return lambda: self.clock.wait(number)

    def _launch(self, key: Hashable, transfer: Transfer, after: Hashable | None = None) -> None:
        """Queue a transfer; durations are cached by kind, channel and size, which decide them."""
        self.sent[transfer] += 1
        like = transfer.kind, transfer.channel, transfer.sent_bytes
        seconds = self._seconds.get(like)
        if seconds is None:
            seconds = self._seconds[like] = self.fabric.seconds(self.case, transfer)
        wire = HOST if transfer.channel == HOST else self._wires[axis_of(transfer)]
        self.clock.launch(key, wire, seconds, after=after)

    def _gather(self, acts: Iterable[WeightOp]) -> None:
        """Launch the gathers among `acts`.

        A gather starts once the all-gather that publishes the updated weight has reached this rank.
        """
        for act in (act for act in acts if act.kind is WeightOpKind.GATHER):
            if act not in self._gathers:
                self._gathers[act] = self._transfers_of(act.parameters)
            for transfer in self._gathers[act]:
                self._launch(act.weight, transfer, after=self._published.get(act.weight))

    def _transfers_of(self, names: Iterable[str]) -> list[Transfer]:
        """Return the transfers that gather these parameters."""
        heard = Heard()
        rank = DryRank(self.case, self.place, heard)
        for name in names:
            rank.gather(name)
        return heard

    # -- ends of a step ----------------------------------------------------------------------

    def _publish(self) -> None:
        """Launch the all-gathers of the weights that the previous step has updated."""
        self.dry.publisher.launch()
        # `launched` has numbered the buckets' transfers from 1; these numbers are their keys.
        buckets = enumerate(self.dry.publisher.buckets, start=1)
        keys = {item.name: number for number, bucket in buckets for item in bucket.members}
        for block in (block for chunk in self.chunks for block in chunk):
            weights = [use.weight for use in block.uses if use.weight is not None]
            # A block's weights may be in several buckets: it waits for the last of them.
            self._published |= dict.fromkeys(weights, max(keys.get(w, 0) for w in weights))

    def _update(self) -> None:
        """Simulate the update: Muon's row exchanges overlap with the updates of other weights."""
        buckets = self.dry.optimizer.matrices.buckets if self.costs.of_matrices else []

        def multiply(number: int) -> None:
            bucket = buckets[number]
            bucket.gather()
            self.clock.compute(self.costs.newton_schulz(bucket.flops))
            bucket.spread()

        def others() -> None:
            self.clock.compute(self.costs.update)

        # The same order as in the runtime: exchanges are launched ahead of the products.
        for number in in_turn(len(buckets), lambda i: buckets[i].launch(), others, multiply):
            buckets[number].finish()

    def _end(self) -> None:
        """Simulate the end of the step: last reductions, update, and the sums of metrics."""
        self.dry.reducer.finish()
        self.dry.gradients.reduce()
        self._update()
        # If logits are split over a tensor group, each of its ranks has the losses of all tokens:
        # they are summed over data ranks only, else over all ranks of the stage.
        splits_logits = rehearsal(self.case, self.place).splits_logits
        losses = Axis.DATA if splits_logits else Axis.STAGE
        # The sum over all ranks has the squared gradient norm and, for each trained parameter, a
        # flag that it got a gradient.
        reached = len(self.case.language_model.trained_names)
        for axis in (Axis.DATA, Axis.WORLD, losses, Axis.PIPELINE):
            self.dry.all_reduce_numbers(axis, (1 + reached,) if axis is Axis.WORLD else ())
        model = self.case.language_model
        # The numbers of tokens of each expert are summed over all ranks, for the load balance.
        if experts := experts_of(model.shape, model.trace):
            for axis in (Axis.STAGE, Axis.PIPELINE):
                self.dry.all_reduce_numbers(axis, (len(experts), max(experts.values())))
