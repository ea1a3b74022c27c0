"""`ISPCommunicator`: each weight gathered before it is needed, each gradient reduced as it appears.

[Note: Plan and cursor] What to do where is decided by the plan (`isp.core.weights.prefetch_plan`),
which knows the order of the whole step. Forwards report their position: `unshard` around the use of
a weight, `pass_by` at launch points without one. A cursor follows the plan with them, and the
communicator runs the operations of the entries it reaches. A use that the plan lacks (a module
called once more than declared, an evaluation without `begin`) gathers its own weight and leaves the
cursor alone. Entries that were skipped are run when a later use arrives. Uses may be nested; a
weight that a use holds stays until the use ends, even if the plan frees it before.

[Note: Unannounced] Without `begin` the communicator is not told when weights change, and not every
write can be seen [Note: Versions]. So a weight gathered ahead lives no longer than the pass it was
gathered for. A forward at any position but the plan's next one is a new pass: the plan is given
up, gathered weights are dropped, and layers gather their own weights until the next forward from
the start. Weights kept for a backward that does not come are dropped then, too.

[Note: What stays exposed] The first gather of a step, where no compute is left to hide it, and the
last reduce-scatter, which is launched after the last compute.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isp.core.comm import Channel
from isp.core.comm.channel import check_channel
from isp.core.comm.cuda import Allocate
from isp.core.mesh.config import Prefetch, WeightConfig
from isp.core.mesh.phase import Phase
from isp.core.mesh.topology import Axis
from isp.core.weights.declare import (
    DeclaredBlock,
    WeightHolder,
    as_chunks,
    declared_uses,
    parameters_of,
    weight_names,
)
from isp.core.weights.gather_reduce import (
    DeclaredWeight,
    ErrorLatch,
    GatheredLayer,
    GradientReducer,
    PlannedGather,
    WeightGatherer,
)
from isp.core.weights.gradients import GradientSink
from isp.core.weights.pool import MemoryPool
from isp.core.weights.prefetch_plan import (
    PlanCursor,
    PlanEntry,
    PrefetchPlan,
    WeightOp,
    WeightOpKind,
    plan,
)
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.core.weights.uses import Action, ActionKind, Chunks
from isp.core.weights.wp_communicator import WPCommunicator

__all__ = ["ISPCommModelConfig", "ISPCommunicator"]


@dataclass(frozen=True, kw_only=True)
class ISPCommModelConfig:
    """Facts about the model that the communicator needs."""

    device: torch.device
    """Device of the weights; its name will do."""
    reduce_dtype: torch.dtype | None = torch.float32
    """Dtype of sums and of delivered gradients, if wider than their own; None: their own."""
    max_reduce_bytes: int = 1 << 28
    """Limit, in bytes as sent, of full gradients kept while their reduce-scatters are in flight."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device))

    @classmethod
    def of(cls, weight: WeightConfig, device: torch.device) -> ISPCommModelConfig:
        """Read from a configuration."""
        reduce_dtype = torch.float32 if weight.reduce_dtype == "float32" else None
        return cls(device=device, reduce_dtype=reduce_dtype)


_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD  # Python 3.11 looks members up by hand
_GATHER = WeightOpKind.GATHER
_LAUNCH_POINT = "launch point"
_CACHED_PLANS = 8


class _Declared(NamedTuple):
    """A layer of the model: the weight that is gathered for it, and its own parameters."""

    weight: DeclaredWeight
    own: tuple[ShardedParameter, ...]


@dataclass(eq=False, slots=True)
class _FollowedEntry:
    """An entry of the plan, whose operations refer to weights in place of names."""

    chunk: int
    """The entry's model chunk."""
    before: tuple[WeightOp, ...]
    """The operations before the use, as planned."""
    gathers: tuple[PlannedGather, ...]
    frees: tuple[DeclaredWeight, ...]
    launches: bool
    """True if its last operation is a gather: the use launches gathers for later uses."""


class _FollowedPlan(NamedTuple):
    """A plan as the communicator follows it: made once, and followed step after step."""

    start: tuple[PlannedGather, ...]
    """Gathers to launch before the first stop."""
    stops: tuple[_FollowedEntry, ...]
    entries: tuple[PlanEntry, ...]
    expected: tuple[tuple[Hashable, Phase], ...]
    """For each stop, the key and phase of the use that reaches it."""


class _Use:
    """A use of a layer's weight: the context that `ISPCommunicator.unshard` returns."""

    __slots__ = (
        "_communicator",
        "_held",
        "_with_bias",
        "cursor",
        "known",
        "launches",
        "layer",
        "stop",
    )

    def __init__(
        self,
        communicator: ISPCommunicator,
        layer: WeightHolder,
        known: _Declared | None,
        stop: _FollowedEntry | None,
        with_bias: bool,
    ) -> None:
        self._communicator, self._with_bias = communicator, with_bias
        self.layer, self.known = layer, known
        self.stop = stop
        """The stop of the plan for this use; None if it is not planned."""
        self.cursor = communicator._cursor
        """The cursor at the start of the use; a later one follows another plan."""
        self.launches = stop is not None and stop.launches
        """True until the gathers of the stop for later uses are launched."""
        self._held: GatheredLayer | None = None

    @property
    def weight(self) -> Tensor:
        return self._read(0)

    @property
    def bias(self) -> Tensor | None:
        return self._read(1) if self._with_bias else None

    def planned(self) -> _FollowedEntry | None:
        """Return the stop of the plan that is followed now, if this use has one there."""
        return self.stop if self.cursor is self._communicator._cursor else None

    def _read(self, index: int) -> Tensor:
        """Wait for the full weight (`index` 0) or bias (1) and return it."""
        communicator = self._communicator
        try:
            if self._held is None:
                self._held = communicator._hold(self, self._with_bias)
            full = self._held.full[index].wait()
        except Exception as failed:
            communicator._latch.error = failed
            raise
        # Only now, so that this weight does not share the link with the next ones.
        if self.launches:
            communicator._launch_ahead(self)
        return full

    def __enter__(self) -> _Use:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """End the use: weight and bias are not read any more."""
        communicator = self._communicator
        if communicator._latch.error is None:
            stop = self.planned() if error is None else None
            communicator._gatherer.free(() if stop is None else stop.frees, self._held)


class ISPCommunicator(WPCommunicator):
    """Overlapped weight all-gather and gradient reduce-scatter for the layers of a model.

        communicator = ISPCommunicator(channel, config)
        model = ...                                   # its layers made with this communicator
        communicator.declare([isp.weight_blocks(model, model.layers)])
        communicator.begin(sequential_actions(n))     # as soon as the optimizer has published
        ...                                           # n times forward and backward
        communicator.finish()                         # the gradients are delivered

    Without `begin`, the plan of one forward and one backward repeats, as long as layers run in its
    order [Note: Unannounced].
    `prefetch`, `overlap` (None: as `prefetch` says) and `enable_memory_pool` change when and where
    transfers happen, never a bit of the result. A process may have several communicators; each
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
        experts: tuple[Channel, Channel] | None = None,
        poison: bool = False,
        allocate: Allocate | None = None,
    ) -> None:
        """Make a communicator over `channel`, the ranks that shard the weights.

        `reduce_channel`: for gradients; None: `channel`. `experts`: both channels for weights of
        experts, over the ranks that gather the same experts; None: as all other weights.
        """
        checked = {"channel": channel, "reduce_channel": reduce_channel or channel}
        for number, of_experts in enumerate(experts or ()):
            checked[f"experts[{number}]"] = of_experts
        for name, given in checked.items():
            check_channel(name, given)
        if not isinstance(config, ISPCommModelConfig):
            raise TypeError(
                f"config must be an isp.ISPCommModelConfig, got {type(config).__name__}: pass"
                " isp.ISPCommModelConfig(device=device)"
            )
        self.channel, self.device = channel, config.device
        prefetch = prefetch or Prefetch()
        self.prefetch = prefetch if overlap is None else replace(prefetch, overlap=overlap)
        self.overlap = self.prefetch.overlap
        """Whether gathers and reduce-scatters overlap with compute."""
        self.pool = MemoryPool(reuse=enable_memory_pool, poison=poison, allocate=allocate)
        """Buffers for gathered weights: as many as the plan has gathered at one time."""
        self.reduce_pool = MemoryPool(reuse=enable_memory_pool, poison=poison)
        """Buffers for reduced gradients, where the sink provides no tensor."""
        self.model_chunk: int | None = None
        """The running chunk, if `switch_current_model_chunk` was called."""
        self._latch = ErrorLatch()
        own = channel, reduce_channel or channel
        gathers, reduces = (
            {Axis.WEIGHT: of_all, Axis.EXPERT_WEIGHT: of_experts}
            for of_all, of_experts in zip(own, experts or own, strict=True)
        )
        self._gatherer = WeightGatherer(gathers, self.pool, config.device, self._latch)
        self._reducer = GradientReducer(
            reduces,
            self.reduce_pool,
            self._latch,
            dtype=config.reduce_dtype,
            max_bytes_in_flight=config.max_reduce_bytes,
        )
        self._chunks: Chunks = ()
        self._layers: dict[int, _Declared] = {}
        """The layers of the model, by the id of the layer and of its weight."""
        self._keys: dict[tuple[int, int, int], Hashable] = {}
        """The key of the use at each place (chunk, block, use), in forward order."""
        self._launch_points: set[Hashable] = set()
        """The keys of uses without a layer."""
        self._itineraries: dict[tuple[Action, ...], _FollowedPlan] = {}
        """Cache by the actions of a step; a run repeats few of them."""
        self._stops: tuple[_FollowedEntry, ...] = ()
        """The stops that the cursor counts."""
        self._cursor: PlanCursor | None = None
        self._announced = False
        """Whether `begin` has been called [Note: Unannounced]."""
        self.is_recomputing = False

    # -- before training ---------------------------------------------------------------------

    def declare(self, chunks: Sequence[Sequence[DeclaredBlock]]) -> None:
        """Declare the model: its chunks, each with its blocks in forward order; once.

        Raises RuntimeError if a model was declared before.
        """
        if self._chunks:
            raise RuntimeError("this communicator has a model: make another for another model")
        _check_chunks(chunks)
        declared = tuple(tuple(chunk) for chunk in chunks)
        self._chunks = as_chunks(declared)
        names, weights = weight_names(declared), self._gatherer.weights
        for site, block, use in declared_uses(declared):
            # A key of the caller's never meets the id of a layer.
            launch_point = _LAUNCH_POINT, use.key
            self._keys[site[1:]] = launch_point if use.layer is None else id(use.layer)
            if use.layer is not None:
                name, own = names[id(use.layer.weight)], parameters_of(use.layer)
                if name not in weights:
                    weights[name] = DeclaredWeight(name, block.module, own)
                weight = weights[name]
                weight.shards = max(weight.shards, own, key=len)  # a tied head may have a bias
                others = weight.shards[1 : len(own)]  # of the bias, if it has one
                if any(
                    a.parameter is not b.parameter for a, b in zip(own[1:], others, strict=True)
                ):
                    weight.has_other_biases = True
                found = _Declared(weight, own)
                self._layers[id(use.layer)] = self._layers[id(use.layer.weight)] = found
            elif use.key is not None:
                self._launch_points.add(launch_point)
            else:
                raise ValueError(
                    f"{use.use.name} in {block.name} has neither a layer nor a key, so no forward"
                    f" could report it: pass DeclaredUse(.., key=key), and call pass_by(key) there"
                )

    def deliver_to(self, sink: GradientSink) -> None:
        """Deliver reduced gradients to `sink`; by default they are added to `parameter.grad`."""
        self._reducer.sink = sink

    def register_prerequisite_for_forward_prefetch_hooks(
        self, fn: Callable[[nn.Module], None]
    ) -> None:
        """Call `fn` with a block before its weights are gathered, e.g. to wait for the optimizer.

        Raises TypeError if `fn` is not callable.
        """
        if not callable(fn):
            raise TypeError(f"a prerequisite must be callable, got {type(fn).__name__}")
        self._gatherer.prerequisites.append(fn)

    # -- a step ------------------------------------------------------------------------------

    def plan(self, actions: Sequence[Action]) -> PrefetchPlan:
        """Return the prefetch plan of a step that runs these actions."""
        return plan(self._chunks, tuple(actions), self.prefetch)

    def begin(self, actions: Sequence[Action]) -> None:
        """Follow the plan of `actions` from now on, and launch its first gathers.

        Call it as soon as the weights of the next step are published. Gathers left over from an
        earlier plan are drained. Raises TypeError if `actions` is no sequence of actions.
        """
        if not isinstance(actions, Sequence) or not all(isinstance(a, Action) for a in actions):
            raise TypeError(
                f"actions must be a sequence of isp.Action, got {actions!r:.80}: pass"
                " isp.sequential_actions(n) for n micro-batches, each forward and backward"
            )
        self._announced = True
        self._follow(actions)

    def finish(self) -> None:
        """Deliver all gradients and give all buffers back; call it after the last backward."""
        self._latch.check()
        self._reducer.finish()
        self.drain()

    def drain(self) -> None:
        """Wait for gathers in flight and drop all gathered weights."""
        self._latch.check()
        self._cursor = None
        self._gatherer.drain()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark forward passes in this context as recomputation."""
        before, self.is_recomputing = self.is_recomputing, True
        try:
            yield
        finally:
            self.is_recomputing = before

    def switch_current_model_chunk(self, chunk: int) -> None:
        """Set the chunk whose forward or backward runs from now on.  Raises ValueError."""
        if not 0 <= chunk < len(self._chunks):
            raise ValueError(f"chunk {chunk} is not one of the {len(self._chunks)} model chunks")
        self.model_chunk = chunk

    # -- what layers call --------------------------------------------------------------------

    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> _Use:
        key = id(module)
        known = self._layers.get(key)
        if known is not None and phase is _FORWARD:
            own = known.own
            if own[0].parameter is not weight or (
                bias is not None and own[-1].parameter is not bias
            ):
                raise RuntimeError(
                    f"{module.name} has another parameter than when the model was declared: write"
                    f" into the declared one, by copy_ or load_state_dict without assign=True"
                )
        use = _Use(self, module, known, self._arrive(key, phase), bias is not None)
        # A backward has the weight gradient to compute before it reads the weight.
        if use.launches and phase is _BACKWARD and self.overlap:
            self._launch_ahead(use)
        return use

    def pass_by(self, key: Hashable) -> None:
        """Report that a forward has reached the launch point without a weight declared as `key`.

        Raises KeyError if no launch point was declared with this key.
        """
        launch_point = _LAUNCH_POINT, key
        if launch_point not in self._launch_points:
            raise KeyError(f"no launch point is declared as {key!r}: pass DeclaredUse(.., key=key)")
        if (stop := self._arrive(launch_point, _FORWARD)) is not None:
            self._run(stop)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._reducer.travels_in(dtype)

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        if self._latch.error is not None:
            self._latch.check()
        sharded = self._parameters(module)[is_bias]
        if returned:
            return self._reducer.reduce(sharded, grad)
        self._reducer.add(sharded, grad)
        if not self.overlap:
            self._reducer.finish()
        return None

    # -- where the layers are in the plan ----------------------------------------------------

    def _follow(self, actions: Sequence[Action]) -> PlanCursor:
        """Follow the plan of `actions` from its start."""
        found = self._itinerary(tuple(actions))
        self.drain()
        self._stops = found.stops
        self._cursor = cursor = PlanCursor(found.entries, found.expected)
        self._gatherer.follow()
        self._gatherer.launch(found.start)
        return cursor

    def _itinerary(self, actions: tuple[Action, ...]) -> _FollowedPlan:
        """Return the plan of `actions`, whose weights and keys are looked up once."""
        if (known := self._itineraries.get(actions)) is not None:
            return known
        planned, weights = self.plan(actions), self._gatherer.weights

        def gathers(ops: Iterable[WeightOp]) -> tuple[PlannedGather, ...]:
            # Waits are left to the layers: a weight is waited for where it is read.
            launched = (op for op in ops if op.kind is _GATHER)
            return tuple((weights[op.weight], op.bias is not None) for op in launched)

        stops = tuple(
            _FollowedEntry(
                entry.site.chunk,
                entry.before,
                gathers(entry.before),
                tuple(weights[op.weight] for op in entry.after),
                # Waits come first, and before them the gather of a weight that is read here.
                bool(entry.before) and entry.before[-1].kind is _GATHER,
            )
            for entry in planned.entries
        )
        expected = tuple((self._keys[e.site[1:]], e.site.phase) for e in planned.entries)
        if len(self._itineraries) >= _CACHED_PLANS:  # actions that do not repeat
            self._itineraries.clear()
        found = _FollowedPlan(gathers(planned.start), stops, planned.entries, expected)
        self._itineraries[actions] = found
        return found

    def _arrive(self, key: Hashable, phase: Phase) -> _FollowedEntry | None:
        """Return the plan's stop for a use, after running the stops skipped before it."""
        if self._latch.error is not None:
            self._latch.check()
        if self.is_recomputing and phase is _FORWARD:  # layers do not know that they recompute
            phase = Phase.RECOMPUTE
        cursor, start, index = self._cursor, 0, None
        if cursor is not None:
            start, index = cursor.position, cursor.arrive(key, phase)
        if not self._announced and phase is _FORWARD and (index is None or index > start):
            start, index = 0, self._begin_pass(key)
        if index is None:
            return None
        stop = self._stops[index]
        assert self.model_chunk in (stop.chunk, None), (self.model_chunk, stop)
        if index > start:
            for skipped in self._stops[start:index]:
                self._run(skipped)
        return stop

    def _begin_pass(self, key: Hashable) -> int | None:
        """Start following a forward without `begin` that has reached `key` [Note: Unannounced].

        Returns the index of its stop, or None if it is not the start of a pass.
        """
        keys = self._keys.values()
        if key not in keys:  # an undeclared layer is in no plan
            return None
        self.drain()
        if key != next(iter(keys)):
            return None
        chunks = range(len(self._chunks))
        forward = [Action(ActionKind.FORWARD, 0, chunk) for chunk in chunks]
        backward = [Action(ActionKind.BACKWARD, 0, chunk) for chunk in reversed(chunks)]
        return self._follow(forward + backward).arrive(key, _FORWARD)

    def _run(self, stop: _FollowedEntry) -> None:
        """Run the operations of a stop without a use: a launch point, or one that was skipped."""
        if stop.gathers:
            self._gatherer.launch(stop.gathers)
        if stop.frees:
            self._gatherer.free(stop.frees)

    # -- the weight of a use -----------------------------------------------------------------

    def _launch_ahead(self, use: _Use) -> None:
        use.launches = False
        if (stop := use.planned()) is not None:
            self._gatherer.launch(stop.gathers)

    def _hold(self, use: _Use, with_bias: bool) -> GatheredLayer:
        """Return what a use reads, held for it: gathered as planned, or for this use alone."""
        layer, gather = use.layer, self._gatherer.gather_now
        known = use.known or self._layers.get(id(layer.weight))
        if known is None:  # an undeclared weight
            return gather(self._parameters(layer)[: 1 + with_bias])
        weight = known.weight
        if with_bias and weight.has_other_biases:  # the plan gathers only one of them
            return gather(self._parameters(layer), weight.block)
        found = weight.gathered
        if found is not None:
            if not found.is_stale():
                if not with_bias or len(found.full) > 1:
                    return found.hold()
                return gather(self._parameters(layer)[:2], weight.block)
            weight.gathered = None
            found.let_go()
        if (stop := use.planned()) is None:
            return gather(self._parameters(layer)[: 1 + with_bias], weight.block)
        # The weight stays until the plan frees it, with a bias if one is read until then.
        biases = [op.bias for op in stop.before if op.weight == weight.name]
        weight.gathered = gather(weight.shards[: 1 + (with_bias or any(biases))], weight.block)
        return weight.gathered.hold()

    def _parameters(self, layer: WeightHolder) -> tuple[ShardedParameter, ...]:
        known = self._layers.get(id(layer))
        return parameters_of(layer) if known is None else known.own


def _check_chunks(chunks: object) -> None:
    """Raise TypeError if `chunks` is no sequence of sequences of `DeclaredBlock`."""
    for chunk in chunks if isinstance(chunks, Sequence) else [chunks]:
        wrong = chunk
        if isinstance(chunk, Sequence):
            wrong = next((block for block in chunk if not isinstance(block, DeclaredBlock)), None)
        if wrong is not None:
            raise TypeError(
                "chunks must have a sequence of DeclaredBlock for each model chunk, got"
                f" {type(wrong).__name__}: pass [isp.weight_blocks(model, blocks)]"
            )
