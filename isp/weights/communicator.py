"""`ISPCommunicator`: each weight gathered before it is needed, each gradient reduced as it appears.

[Note: Plan and cursor] What to do where is decided by the plan (`isp.weights.plan`), which knows
the order of the whole step. The layers report where they are: `unshard` around the use of a weight,
a module hook at launch points without one. A cursor follows the plan with them, and its acts are
executed. A use that the plan does not have (a module called once more than declared, an
evaluation nobody announced) gathers for itself and leaves the cursor alone; a use that did not
happen is caught up with when a later one does. Uses may be nested; what one holds is there until
it ends, whatever the plan frees meanwhile.

[Note: Unannounced] Nobody says when weights change if nobody calls `begin`, and not every write can
be seen [Note: Versions]. So what is gathered ahead then lives no longer than the pass that it was
gathered for: a forward that is at any but the next place of the plan is another pass. The plan is
given up, what is there is dropped, and the layers gather for themselves until the next forward from
the start. Behind a forward without a backward what is kept for that is there until then.

[Note: What stays exposed] The first gather of a step, as far as nothing is left to hide it, and the
last reduce-scatter: no compute is left when it is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from isp.comm import Channel, streams
from isp.comm.cuda import Allocate
from isp.parallel.config import Prefetch, WeightConfig
from isp.parallel.phase import Phase
from isp.weights.declare import (
    DeclaredBlock,
    WeightHolder,
    as_chunks,
    declared_uses,
    parameters_of,
    weight_names,
)
from isp.weights.parameter import ShardedParameter
from isp.weights.plan import Act, ActKind, Plan, PlanCursor, Step, plan
from isp.weights.pool import MemoryPool
from isp.weights.trace import Action, ActionKind, Chunks, Site
from isp.weights.transfers import (
    GatheredLayer,
    GradientReducer,
    GradientSink,
    gather,
)
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
    """Full gradients kept at most while their sums are under way, in bytes as they travel."""

    @classmethod
    def of(cls, weight: WeightConfig, device: torch.device) -> ISPCommModelConfig:
        """Read from a configuration."""
        reduce_dtype = torch.float32 if weight.reduce_dtype == "float32" else None
        return cls(device=device, reduce_dtype=reduce_dtype)


@dataclass(eq=False)
class ISPOverlapState:
    """The weights one model chunk has gathered, flying or there, by name."""

    gathered: dict[str, GatheredLayer] = field(default_factory=dict)


class _ErrorLatch:
    """Keeps the last error within it: a collective that failed leaves ranks at other places."""

    error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.error = error

    def check(self) -> None:
        """Raises RuntimeError if there was one."""
        if self.error is not None:
            raise RuntimeError(
                f"a collective of this communicator failed ({self.error}): its ranks are no"
                f" longer at the same place; end the run and resume from the last checkpoint"
            ) from self.error


_NO_PLAN = object()
_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD  # Python 3.11 looks members up by hand
_GATHER, _WAIT = ActKind.GATHER, ActKind.WAIT


class _Use:
    """A use of `ISPCommunicator`: its step of the plan, if it has one, and what it holds.

    The plan is followed as long as the communicator has the use's cursor.
    """

    __slots__ = (
        "_ahead",
        "_communicator",
        "_cursor",
        "_held",
        "_layer",
        "_phase",
        "_step",
        "_with_bias",
    )

    def __init__(
        self, communicator: ISPCommunicator, layer: WeightHolder, phase: Phase, with_bias: bool
    ) -> None:
        self._communicator, self._layer, self._phase = communicator, layer, phase
        self._with_bias = with_bias
        self._held: GatheredLayer | None = None

    def __enter__(self) -> _Use:
        communicator = self._communicator
        self._step = step = communicator._arrive(id(self._layer), self._phase)
        self._cursor = _NO_PLAN if step is None else communicator._cursor
        self._ahead = () if step is None else step.before
        # A backward has the weight gradient to compute before it reads the weight.
        if self._phase is _BACKWARD and communicator.overlap:
            self._launch_ahead()
        return self

    @property
    def weight(self) -> Tensor:
        weight = self._wait(0)
        # Only now: what is needed at once does not share the wire with what is needed next.
        if self._ahead:
            self._launch_ahead()
        return weight

    @property
    def bias(self) -> Tensor | None:
        return self._wait(1) if self._with_bias else None

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        communicator = self._communicator
        if self._held is not None and communicator._latch.error is None:
            try:
                self._held.let_go()
            except Exception as failed:
                communicator._latch.error = failed
                raise
        step, followed = self._step, self._cursor is communicator._cursor
        if error is None and followed and step is not None and step.after:
            communicator._free(step.after)

    def _launch_ahead(self) -> None:
        acts, self._ahead = self._ahead, ()
        # Waits come first, and are the layer's own.
        if acts and acts[-1].kind is not _WAIT:
            communicator = self._communicator
            if self._cursor is communicator._cursor:
                communicator._launch(acts)

    def _wait(self, index: int) -> Tensor:
        """The full weight, or the bias behind it; waits for it."""
        communicator = self._communicator
        try:
            if self._held is None:
                planned = self._cursor is communicator._cursor
                self._held = communicator._hold(self._layer, planned, self._with_bias)
            return self._held.full[index].wait()
        except Exception as failed:
            communicator._latch.error = failed
            raise


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
        allocate: Allocate | None = None,
    ) -> None:
        prefetch = prefetch or Prefetch()
        self.prefetch = prefetch if overlap is None else replace(prefetch, overlap=overlap)
        self.overlap = self.prefetch.overlap
        """Whether weights are gathered ahead and gradients reduced behind."""
        self.pool = MemoryPool(reuse=enable_memory_pool, poison=poison, allocate=allocate)
        """Buffers weights are gathered into, as many as the plan has there at once."""
        self.reduce_pool = MemoryPool(reuse=enable_memory_pool, poison=poison)
        """Buffers gradients are reduced into where the sink has no tensor for them."""
        self.model_chunk: int | None = None
        """The chunk that runs, if anybody says; see `switch_current_model_chunk`."""
        self._stream = streams.new(config.device)
        """Of the gathers, so that these wait for what published a weight, and compute does not."""
        self._gather = partial(gather, channel=channel, pool=self.pool)
        self._reducer = GradientReducer(
            reduce_channel or channel,
            self.reduce_pool,
            dtype=config.reduce_dtype,
            max_bytes_in_flight=config.max_reduce_bytes,
        )
        self._declared: tuple[tuple[DeclaredBlock, ...], ...] = ()
        self._chunks: Chunks = ()
        self._states: list[ISPOverlapState] = []
        self._names: dict[int, str] = {}
        """The name of each weight, by the id of a layer that has it, and by its own."""
        self._sharded: dict[int, tuple[ShardedParameter, ...]] = {}
        """Weight and bias of each layer, by its id."""
        self._homes: dict[str, tuple[ISPOverlapState, tuple[ShardedParameter, ...], nn.Module]] = {}
        """Store, parameters and block of each weight; of its first use, if there are several,
        with the first bias."""
        self._keys: dict[Site, Hashable] = {}
        """The name that the use at a site gives itself: of a layer, or a launch point."""
        self._forward: list[Hashable] = []
        """The keys of all uses, in forward order."""
        self._prerequisites: list[Callable[[nn.Module], None]] = []
        self._cursor: PlanCursor | None = None
        self._planned: Plan | None = None
        """The plan that was followed last: often the next one, too."""
        self._used: list[Hashable] = []
        """The keys of its steps."""
        self._announced = False
        """Whether somebody calls `begin` [Note: Unannounced]."""
        self.is_recomputing = False
        self._latch = _ErrorLatch()

    @property
    def communication_mode(self) -> str:
        return "isp"

    # -- before training ---------------------------------------------------------------------

    def declare(self, chunks: Sequence[Sequence[DeclaredBlock]]) -> None:
        """Take up the model: its chunks, each with its blocks in forward order."""
        if self._declared:
            raise RuntimeError("this communicator has a model: make another for another model")
        self._declared = tuple(tuple(chunk) for chunk in chunks)
        self._chunks = as_chunks(self._declared)
        self._states = [ISPOverlapState() for _ in self._declared]
        self._names = weight_names(self._declared)
        for site, block, use in declared_uses(self._declared):
            key = site[1:] if use.layer is None else id(use.layer)
            self._keys.update((site._replace(phase=phase), key) for phase in Phase)
            self._forward.append(key)
            if use.layer is not None:
                name = self._names[id(use.layer)] = self._names[id(use.layer.weight)]
                sharded = self._sharded[id(use.layer)] = parameters_of(use.layer)
                home = self._homes.get(name, (self._states[site.chunk], sharded, block.module))
                longer = max(home[1], sharded, key=len)  # a tied head may have a bias of its own
                self._homes[name] = home[0], longer, home[2]
            elif use.at is not None:
                use.at.register_forward_pre_hook(partial(self._pass_by, key))

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
        return plan(self._chunks, tuple(actions), self.prefetch)

    def begin(self, actions: Sequence[Action]) -> None:
        """Follow the plan of `actions` from here on, and launch its first gathers.

        To be called as soon as the weights of the next step are published. What an earlier plan
        left behind is drained.
        """
        self._announced = True
        self._follow(actions)

    def finish(self) -> None:
        """Deliver all gradients and give all buffers back; to be called after the last backward."""
        self._latch.check()
        with self._latch:
            self._reducer.finish()
        self.drain()

    def drain(self) -> None:
        """Wait for the gathers on their way and drop what is there; nothing of it is used again."""
        self._latch.check()
        self._cursor = None
        with self._latch:
            for state in self._states:
                while state.gathered:
                    state.gathered.popitem()[1].let_go()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Forward passes in this context compute again what a backward is about to need."""
        before, self.is_recomputing = self.is_recomputing, True
        try:
            yield
        finally:
            self.is_recomputing = before

    def switch_current_model_chunk(self, chunk: int) -> None:
        """Say which chunk's forward or backward runs from here on."""
        if not 0 <= chunk < len(self._declared):
            raise ValueError(f"chunk {chunk} is not one of the {len(self._declared)} model chunks")
        self.model_chunk = chunk

    # -- what layers call --------------------------------------------------------------------

    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> _Use:
        own = self._sharded.get(id(module)) if phase is _FORWARD else None
        if own is not None and (
            own[0].parameter is not weight or (bias is not None and own[-1].parameter is not bias)
        ):
            raise RuntimeError(
                f"{module.name} has another parameter than when the model was declared: write into"
                f" the declared one, by copy_ or load_state_dict without assign=True"
            )
        return _Use(self, module, phase, bias is not None)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._reducer.travels_in(dtype)

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        self._latch.check()
        sharded = self._shards(module)[is_bias]
        if returned:
            with self._latch:
                return self._reducer.reduce(sharded, grad)
        # Outside: a sink that refuses has not harmed the group.
        place = self._reducer.promise(sharded, grad.dtype)
        with self._latch:
            self._reducer.launch(sharded, grad, place)
            if not self.overlap:
                self._reducer.finish()
        return None

    # -- where the layers are in the plan ----------------------------------------------------

    def _follow(self, actions: Sequence[Action]) -> PlanCursor:
        self.drain()
        planned = self.plan(actions)
        if planned is not self._planned:
            self._planned, self._used = planned, [self._keys[s.site] for s in planned.steps]
        self._cursor = cursor = PlanCursor(planned, self._used)
        streams.follow(self._stream)  # what is queued now, such as an update of the weights
        self._launch(cursor.plan.start)
        return cursor

    def _pass_by(self, key: Hashable, *_: object) -> None:
        """A launch point without a weight, as a module's hook."""
        if (step := self._arrive(key, Phase.FORWARD)) is not None:
            self._launch(step.before)
            self._free(step.after)

    def _arrive(self, key: Hashable, phase: Phase) -> Step | None:
        """The planned step of a use; what was planned on the way to it is done."""
        if self._latch.error is not None:
            self._latch.check()
        if self.is_recomputing and phase is _FORWARD:  # a layer does not know that it is
            phase = Phase.RECOMPUTE
        found = None if self._cursor is None else self._cursor.arrive(key, phase)
        if not self._announced and phase is _FORWARD and (found is None or found[1]):
            found = self._begin_pass(key)
        if found is None:
            return None
        step, skipped = found
        assert self.model_chunk in (None, step.site.chunk), (self.model_chunk, step.site)
        for passed in skipped:
            self._launch(passed.before)
            self._free(passed.after)
        return step

    def _begin_pass(self, key: Hashable) -> tuple[Step, tuple[Step, ...]] | None:
        """A forward that nobody has announced has come to `key` [Note: Unannounced]."""
        if key not in self._forward:  # a layer that nobody has declared is in no plan
            return None
        self.drain()
        if key != self._forward[0]:
            return None
        chunks = range(len(self._chunks))
        forward = [Action(ActionKind.FORWARD, 0, chunk) for chunk in chunks]
        backward = [Action(ActionKind.BACKWARD, 0, chunk) for chunk in reversed(chunks)]
        return self._follow(forward + backward).arrive(key, Phase.FORWARD)

    # -- what is launched, held and freed ----------------------------------------------------

    def _launch(self, acts: Sequence[Act]) -> None:
        """Gather what the plan says, if it is not there; a wait is the layer's own."""
        ready = None
        # [Note: Gather stream] A gather waits for what is on its own stream: the last use of its
        # buffer, and what published the weight. It does not wait for compute queued before it.
        try:
            with streams.on(self._stream):
                for kind, name, bias in acts:
                    state, shards, block = self._homes[name]
                    if kind is _GATHER and name not in state.gathered:
                        if block is not ready:
                            self._make_ready(block)
                            ready = block
                        shards = shards[:1] if bias is None else shards
                        state.gathered[name] = self._gather(shards)
        except Exception as failed:
            self._latch.error = failed
            raise

    def _free(self, acts: Sequence[Act]) -> None:
        """Drop what the plan frees, if it is there."""
        try:
            for _, name, _ in acts:
                gathered = self._homes[name][0].gathered.pop(name, None)
                if gathered is not None:
                    gathered.let_go()
        except Exception as failed:
            self._latch.error = failed
            raise

    def _hold(self, layer: WeightHolder, planned: bool, with_bias: bool) -> GatheredLayer:
        """What a use reads, there until it lets go: as planned, or gathered for it alone."""
        name = self._names.get(id(layer)) or self._names.get(id(layer.weight))
        if name is None:  # nobody has declared this layer
            return self._gather_now(layer, with_bias)
        state, _, block = self._homes[name]
        found = state.gathered.get(name)
        if found is not None and found.is_stale():
            state.gathered.pop(name).let_go()
            found = None
        if found is not None and (not with_bias or found.has_bias):
            return found.hold()
        stays = planned and found is None
        with_bias = with_bias or (stays and self._reads_bias(layer, name))
        own = self._gather_now(layer, with_bias, block)
        if stays:
            state.gathered[name] = own.hold()
        return own

    def _gather_now(
        self, layer: WeightHolder, with_bias: bool, block: nn.Module | None = None
    ) -> GatheredLayer:
        streams.follow(self._stream)  # what has written the weight is queued before the reader
        with streams.on(self._stream):
            if block is not None:
                self._make_ready(block)
            shards = self._shards(layer)
            return self._gather(shards if with_bias else shards[:1])

    def _shards(self, layer: WeightHolder) -> tuple[ShardedParameter, ...]:
        return self._sharded.get(id(layer)) or parameters_of(layer)

    def _reads_bias(self, layer: WeightHolder, name: str) -> bool:
        """Whether `layer` goes forward, which reads a bias, before the plan frees its weight."""
        assert self._cursor is not None
        return layer.bias is not None and self._cursor.goes_forward(id(layer), name)

    def _make_ready(self, block: nn.Module) -> None:
        """Wait for what has to come before a gather of weights of `block`."""
        for fn in self._prerequisites:
            fn(block)
