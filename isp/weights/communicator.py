"""`ISPCommunicator`: each weight gathered before it is needed, each gradient reduced as it appears.

[Note: Plan and cursor] What to do where is decided by the plan (`isp.weights.plan`), which knows
the order of the whole step. The layers report where they are: `visit` around the use of a weight, a
module hook at launch points without one. A cursor follows the plan with them, and its acts are
executed. A visit that the plan does not have (a module called once more than declared, an
evaluation nobody announced) gathers for itself and leaves the cursor alone; a visit that did not
happen is caught up with when a later one does. Visits may be nested; what one holds is there until
it ends, whatever the plan frees meanwhile.

[Note: What stays exposed] The first gather of a step, as far as nothing is left to hide it, and the
last reduce-scatter: no compute is left when it is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from isp.comm import Channel, streams
from isp.comm.cargo import Cargo, Purpose
from isp.parallel.config import Prefetch, WeightConfig
from isp.parallel.phase import Phase
from isp.weights.cursor import PlanCursor, UnannouncedPasses
from isp.weights.declare import (
    DeclaredBlock,
    WeightHolder,
    as_chunks,
    declared_visits,
    weight_names,
)
from isp.weights.gathers import GatheredLayer, WeightGatherer
from isp.weights.plan import Act, ActKind, Plan, Step, plan
from isp.weights.pool import MemoryPool
from isp.weights.reductions import GradientReducer, GradientSink
from isp.weights.trace import Action, Site
from isp.weights.wp import WPCommunicator

__all__ = ["ISPCommModelConfig", "ISPCommunicator", "ISPOverlapState"]


@dataclass(frozen=True, kw_only=True)
class ISPCommModelConfig:
    """The model's numbers that the communicator has to know."""

    device: torch.device
    """Device of the weights."""
    reduce_dtype: torch.dtype | None = torch.float32
    """Gradients are summed and delivered in it if it is wider than their own; None: in theirs."""
    max_reduce_bytes: int = 1 << 28
    """Full gradients kept at most while their sums are under way, in bytes."""

    @classmethod
    def of(cls, weight: WeightConfig, device: torch.device) -> ISPCommModelConfig:
        """Read from a configuration."""
        reduce_dtype = torch.float32 if weight.reduce_dtype == "float32" else None
        return cls(device=device, reduce_dtype=reduce_dtype)


@dataclass(eq=False)
class ISPOverlapState:
    """The weights one model chunk has gathered, flying or there, by name."""

    gathered: dict[str, GatheredLayer] = field(default_factory=dict)


class _OpenVisit:
    """A visit of `ISPCommunicator`: its step of the plan, if it has one, and what it holds."""

    def __init__(
        self, communicator: ISPCommunicator, layer: WeightHolder, phase: Phase, *, with_bias: bool
    ) -> None:
        self._communicator, self._layer, self._phase = communicator, layer, phase
        self._with_bias = with_bias
        self._step: Step | None = None
        self._cursor: PlanCursor | None = None
        self._held: GatheredLayer | None = None
        self._launched = False

    def __enter__(self) -> _OpenVisit:
        self._step = self._communicator._arrive(id(self._layer), self._phase)
        self._cursor = self._communicator._cursor
        # A backward has the weight gradient to compute before it reads the weight.
        if self._communicator.overlap and self._phase is Phase.BACKWARD:
            self._launch_gathers()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._held is not None and self._communicator._failure is None:
            self._communicator._let_go(self._held)
        if (step := self._planned) is not None and error is None:
            self._communicator._execute(step.after)

    @property
    def weight(self) -> Tensor:
        with self._communicator._fails_for_good():
            weight = self._gathered().weight()
        # Only now: what is needed at once does not share the wire with what is needed next.
        self._launch_gathers()
        return weight

    @property
    def bias(self) -> Tensor | None:
        if not self._with_bias:
            return None
        with self._communicator._fails_for_good():
            return self._gathered().bias()

    @property
    def _planned(self) -> Step | None:
        """Its step, as long as the plan is followed."""
        return self._step if self._cursor is self._communicator._cursor else None

    def _gathered(self) -> GatheredLayer:
        if self._held is None:
            self._held = self._communicator._hold(
                self._layer, planned=self._planned is not None, with_bias=self._with_bias
            )
        return self._held

    def _launch_gathers(self) -> None:
        if (step := self._planned) is not None and not self._launched:
            self._launched = True
            self._communicator._execute(act for act in step.before if act.kind is ActKind.GATHER)


class ISPCommunicator(WPCommunicator):
    """Overlapped weight all-gather and gradient reduce-scatter for the layers of a model.

        communicator = ISPCommunicator(channel, config)
        model = ...                                   # its layers made with this communicator
        communicator.declare([model.weight_blocks()])
        communicator.begin(sequential_actions(n))     # as soon as the optimizer has published
        ...                                           # n times forward and backward
        communicator.finish()                         # the gradients are delivered

    Who does not call `begin` gets the plan of one forward and one backward, again and again, as
    long as layers come in its order [Note: Unannounced].
    `prefetch`, `overlap` (None: as `prefetch` says) and `enable_memory_pool` change when and where
    things happen, never a bit of the result. Several communicators may live in one process; each
    serves one thread.
    """

    gathers_weights = True

    def __init__(
        self,
        channel: Channel,
        config: ISPCommModelConfig,
        *,
        prefetch: Prefetch | None = None,
        overlap: bool | None = None,
        enable_memory_pool: bool = True,
        reduce_channel: Channel | None = None,
        poison: bool = False,
    ) -> None:
        prefetch = prefetch or Prefetch()
        self.prefetch = prefetch if overlap is None else replace(prefetch, overlap=overlap)
        self.pool = MemoryPool(reuse=enable_memory_pool, poison=poison)
        """Buffers weights are gathered into: at most two units at once."""
        self.reduce_pool = MemoryPool(reuse=enable_memory_pool, poison=poison)
        """Buffers gradients are reduced into, as long as they are in flight."""
        self.model_chunk: int | None = None
        """The chunk that runs, if anybody says; see `switch_current_model_chunk`."""
        self._stream = streams.new(config.device)
        self._gatherer = WeightGatherer(channel, self.pool, self._stream)
        self._reducer = GradientReducer(
            reduce_channel or channel,
            self.reduce_pool,
            dtype=config.reduce_dtype,
            max_bytes_in_flight=config.max_reduce_bytes,
        )
        self._chunks: tuple[tuple[DeclaredBlock, ...], ...] = ()
        self._states: list[ISPOverlapState] = []
        self._names: dict[int, str] = {}
        self._homes: dict[str, tuple[int, WeightHolder, nn.Module]] = {}
        """Chunk, layer and block of each weight; of its first visit, if there are several."""
        self._prerequisites: list[Callable[[nn.Module], None]] = []
        self._cursor: PlanCursor | None = None
        self._unannounced: UnannouncedPasses | None = None
        self._recomputing = False
        self._failure: BaseException | None = None

    @property
    def communication_mode(self) -> str:
        return "isp"

    @property
    def overlap(self) -> bool:
        """Whether weights are gathered ahead and gradients reduced behind."""
        return self.prefetch.overlap

    # -- before training ---------------------------------------------------------------------

    def declare(self, chunks: Sequence[Sequence[DeclaredBlock]]) -> None:
        """Take up the model: its chunks, each with its blocks in forward order."""
        if self._chunks:
            raise RuntimeError("this communicator has a model: make another for another model")
        self._chunks = tuple(tuple(chunk) for chunk in chunks)
        self._states = [ISPOverlapState() for _ in self._chunks]
        self._names = weight_names(self._chunks)
        for site, block, visit in declared_visits(self._chunks):
            if visit.layer is not None:
                name = self._names[id(visit.layer.weight)]
                self._homes.setdefault(name, (site.chunk, visit.layer, block.module))
            elif visit.at is not None:
                visit.at.register_forward_pre_hook(self._passes(self._key_of(site)))
        keys = [self._key_of(site) for site, *_ in declared_visits(self._chunks)]
        self._unannounced = UnannouncedPasses(self, keys, len(self._chunks))

    def deliver_to(self, sink: GradientSink) -> None:
        """Give reduced gradients to `sink`; without it they are added to `parameter.grad`."""
        self._reducer.sink = sink

    def register_prerequisite_for_forward_prefetch_hooks(
        self, fn: Callable[[nn.Module], None]
    ) -> None:
        """Call `fn` with a block before its weights are gathered, e.g. to wait for the optimizer.

        Raises TypeError if `fn` is not callable.
        """
        if not callable(fn):
            raise TypeError(f"a prerequisite must be callable, got {type(fn).__name__}")
        self._prerequisites.append(fn)

    # -- a step ------------------------------------------------------------------------------

    def plan(self, actions: Sequence[Action]) -> Plan:
        """The acts of a step of these actions."""
        return plan(as_chunks(self._chunks), tuple(actions), self.prefetch)

    def begin(self, actions: Sequence[Action]) -> None:
        """Follow the plan of `actions` from here on, and launch its first gathers.

        To be called as soon as the weights of the next step are published. What an earlier plan
        left behind is drained.
        """
        self._unannounced = None
        self.follow(actions)

    def follow(self, actions: Sequence[Action]) -> None:
        """As `begin`, but passes that nobody announces go on as before [Note: Unannounced]."""
        self.drain()
        self._cursor = PlanCursor(self.plan(actions), self._key_of)
        self._wait_for_writers()
        self._execute(self._cursor.plan.start)

    def finish(self) -> None:
        """Deliver all gradients and give all buffers back; to be called after the last backward."""
        self._check()
        with self._fails_for_good():
            self._reducer.finish()
        self.drain()

    def drain(self) -> None:
        """Wait for the gathers on their way and drop what is there; nothing of it is used again."""
        self._check()
        self._cursor = None
        for state in self._states:
            while state.gathered:
                self._let_go(state.gathered.popitem()[1])

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Forward passes in this context compute again what a backward is about to need."""
        before, self._recomputing = self._recomputing, True
        try:
            yield
        finally:
            self._recomputing = before

    def switch_current_model_chunk(self, chunk: int) -> None:
        """Say which chunk's forward or backward runs from here on."""
        if not 0 <= chunk < len(self._chunks):
            raise ValueError(f"chunk {chunk} is not one of the {len(self._chunks)} model chunks")
        self.model_chunk = chunk

    # -- what layers call --------------------------------------------------------------------

    def visit(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> _OpenVisit:
        return _OpenVisit(self, module, phase, with_bias=bias is not None)

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        self._check()
        local = "bias" if is_bias else "weight"
        parameter = module.bias if is_bias else module.weight
        assert parameter is not None
        layout = module.layouts[local]
        cargo = Cargo(Purpose.WEIGHT_GRADIENT, module.name, f"{local}.grad")
        if returned:
            with self._fails_for_good():
                return self._reducer.reduce(grad, layout, cargo=cargo)
        self._reducer.sink.promise(parameter)  # a sink that refuses has not harmed the group
        with self._fails_for_good():
            self._reducer.launch(parameter, grad, layout, cargo=cargo)
            if not self.overlap:
                self._reducer.finish()
        return None

    # -- inside ------------------------------------------------------------------------------

    def _passes(self, key: Hashable) -> Callable[..., None]:
        def passes(*_: Any) -> None:
            if (step := self._arrive(key, Phase.FORWARD)) is not None:
                self._execute((*step.before, *step.after))

        return passes

    def _key_of(self, site: Site) -> Hashable:
        """The key of a site: a layer, or a launch point."""
        layer = self._chunks[site.chunk][site.block].visits[site.visit].layer
        return site[1:] if layer is None else id(layer)

    def _wait_for_writers(self) -> None:
        """Let gathers wait for what is queued now, such as an update of the weights."""
        streams.follow(self._stream)

    def _arrive(self, key: Hashable, phase: Phase) -> Step | None:
        """The planned step of a visit; what was planned on the way to it is done."""
        self._check()
        if phase is Phase.FORWARD and self._recomputing:  # a layer does not know that it is
            phase = Phase.RECOMPUTE
        found = None if self._cursor is None else self._cursor.arrive(key, phase)
        out_of_turn = found is None or found[1]
        if self._unannounced is not None and phase is Phase.FORWARD and out_of_turn:
            self._unannounced(key)
            found = None if self._cursor is None else self._cursor.arrive(key, phase)
        if found is None:
            return None
        step, skipped = found
        assert self.model_chunk in (None, step.site.chunk), (self.model_chunk, step.site)
        for passed in skipped:
            self._execute((*passed.before, *passed.after))
        return step

    def _execute(self, acts: Iterable[Act]) -> None:
        """Do what the plan says; a wait is the layer's own, and what is done already is left."""
        for kind, name in acts:
            chunk, layer, block = self._homes[name]
            gathered = self._states[chunk].gathered
            if kind is ActKind.GATHER and name not in gathered:
                with_bias = layer.bias is not None and self._goes_forward(layer, name)
                gathered[name] = self._gather(layer, block, with_bias=with_bias)
            elif kind is ActKind.FREE and name in gathered:
                self._let_go(gathered.pop(name))

    def _goes_forward(self, layer: WeightHolder, weight: str) -> bool:
        """Whether `layer` goes forward, which reads a bias, before `weight` is freed again."""
        assert self._cursor is not None
        return any(
            step.site.phase is not Phase.BACKWARD and self._key_of(step.site) == id(layer)
            for step in self._cursor.live_steps(weight)
        )

    def _gather(self, layer: WeightHolder, block: nn.Module, *, with_bias: bool) -> GatheredLayer:
        with self._fails_for_good():
            # On the gathers' own stream, so that these wait for it and compute does not.
            with streams.on(self._stream):
                for fn in self._prerequisites:
                    fn(block)
            return self._gatherer.launch(layer, with_bias=with_bias)

    def _hold(self, layer: WeightHolder, *, planned: bool, with_bias: bool) -> GatheredLayer:
        """Hold what a visit reads: as planned, or gathered for it alone."""
        name = self._names.get(id(layer.weight))
        if name is None:  # nobody has declared this layer
            self._wait_for_writers()
            return self._gatherer.launch(layer, with_bias=with_bias)
        chunk, _, block = self._homes[name]
        gathered = self._states[chunk].gathered
        if name in gathered and gathered[name].stale:
            self._let_go(gathered.pop(name))
        if name in gathered and (gathered[name].has_bias or not with_bias):
            return gathered[name].hold()
        self._wait_for_writers()  # the reader, too, is queued behind them
        own = self._gather(layer, block, with_bias=with_bias)
        if planned and name not in gathered:
            gathered[name] = own.hold()
        return own

    def _let_go(self, gathered: GatheredLayer) -> None:
        with self._fails_for_good():
            gathered.let_go()

    @contextmanager
    def _fails_for_good(self) -> Iterator[None]:
        """A collective that failed leaves the ranks of its group in different places."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"a collective of this communicator failed ({self._failure}): its ranks are no"
                f" longer at the same place; end the run and resume from the last checkpoint"
            ) from self._failure
