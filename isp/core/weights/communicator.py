"""`ISPCommunicator`: gathers each weight before it is read, reduces each gradient in backward.

It runs the operations of a prefetch plan (`isp.core.weights.prefetch_plan`) at the uses that layers
report. See [Note: Plan and cursor] in docs/design/notes/weights.md.
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
    """The model's device and the precision of its gradients, for an `ISPCommunicator`."""

    device: torch.device
    """Device of the weights, or its name."""
    reduce_dtype: torch.dtype | None = torch.float32
    """Dtype in which gradients are summed and delivered; gradients in a wider dtype keep it. None:
    all gradients keep their dtype."""
    max_reduce_bytes: int = 1 << 28
    """Limit on the memory of full gradients that wait for their reduce-scatters in flight, in bytes
    of the dtype in which they are sent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device))

    @classmethod
    def of(cls, weight: WeightConfig, device: torch.device) -> ISPCommModelConfig:
        """Return the config for a configuration's `weight` and a device."""
        reduce_dtype = torch.float32 if weight.reduce_dtype == "float32" else None
        return cls(device=device, reduce_dtype=reduce_dtype)


# Constants: Python 3.11 takes as long to look up an enum's member as to call a function.
_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD
_GATHER = WeightOpKind.GATHER
_LAUNCH_POINT = "launch point"
_CACHED_PLANS = 8


class _DeclaredLayer(NamedTuple):
    """A declared layer: the weight that is gathered for it, and its own parameters."""

    weight: DeclaredWeight
    """The weight, which other layers may share."""
    own: tuple[ShardedParameter, ...]
    """The layer's weight, and after it its bias if it has one."""


@dataclass(eq=False, slots=True)
class _FollowedEntry:
    """A `PlanEntry` with the `DeclaredWeight`s in place of the names of weights."""

    chunk: int
    """Index of the model chunk that the entry is in."""
    before: tuple[WeightOp, ...]
    """The operations before the use, as planned."""
    gathers: tuple[PlannedGather, ...]
    """The gathers to launch before the use."""
    frees: tuple[DeclaredWeight, ...]
    """The weights to free after the use."""
    launches: bool
    """True if the use launches gathers for later uses, not only one for itself."""


class _FollowedPlan(NamedTuple):
    """A `PrefetchPlan` with the `DeclaredWeight`s in place of the names of weights.

    It is made once, for all steps that follow the plan.
    """

    start: tuple[PlannedGather, ...]
    """Gathers to launch before the first entry."""
    entries: tuple[_FollowedEntry, ...]
    planned: tuple[PlanEntry, ...]
    """The entries of the `PrefetchPlan` itself, in the same order as `entries`."""
    expected: tuple[tuple[Hashable, Phase], ...]
    """For each entry, the key and phase of the use that reaches it."""


class _Use:
    """A use of a layer's weight: the context that `ISPCommunicator.unshard` returns."""

    __slots__ = (
        "_communicator",
        "_held",
        "_with_bias",
        "cursor",
        "entry",
        "known",
        "launches",
        "layer",
    )

    def __init__(
        self,
        communicator: ISPCommunicator,
        layer: WeightHolder,
        known: _DeclaredLayer | None,
        entry: _FollowedEntry | None,
        with_bias: bool,
    ) -> None:
        self._communicator, self._with_bias = communicator, with_bias
        self.layer, self.known = layer, known
        self.entry = entry
        """The plan's entry for this use; None: the use is not planned."""
        self.cursor = communicator._cursor
        """The cursor at the start of the use; if the communicator has another one since, it
        follows another plan."""
        self.launches = entry is not None and entry.launches
        """True until this use has launched the entry's gathers for later uses."""
        self._held: GatheredLayer | None = None

    @property
    def weight(self) -> Tensor:
        return self._read(0)

    @property
    def bias(self) -> Tensor | None:
        return self._read(1) if self._with_bias else None

    def planned(self) -> _FollowedEntry | None:
        """Return the plan's entry for this use.

        None if the plan has no entry for it, or if this plan is not followed any more.
        """
        return self.entry if self.cursor is self._communicator._cursor else None

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
        # Only after the wait, so that this weight does not share bandwidth with the next ones.
        if self.launches:
            communicator._launch_ahead(self)
        return full

    def __enter__(self) -> _Use:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """End the use: free the weights that the plan frees after it."""
        communicator = self._communicator
        # After a failed collective, freeing would wait for gathers that may never arrive.
        if communicator._latch.error is None:
            entry = self.planned() if error is None else None
            communicator._gatherer.free(() if entry is None else entry.frees, self._held)


class ISPCommunicator(WPCommunicator):
    """Overlapped weight all-gather and gradient reduce-scatter for the layers of a model.

        communicator = ISPCommunicator(channel, config)
        model = ...                                   # its layers made with this communicator
        communicator.declare([isp.weight_blocks(model, model.layers)])
        communicator.begin(sequential_actions(n))     # as soon as the optimizer has published
        ...                                           # n times forward and backward
        communicator.finish()                         # the gradients are delivered

    Without `begin`, the plan of one forward and one backward repeats, as long as layers run in its
    order. See [Note: Unannounced] in docs/design/notes/weights.md.
    `prefetch`, `overlap` (None: `prefetch.overlap`) and `enable_memory_pool` change when and where
    transfers happen, but no bit of the result. Two transfers of a step are not hidden: the
    first gather, and the last reduce-scatter. A process may have several communicators; each
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

        `reduce_channel` is the channel for gradients; None: `channel`. `experts` are two channels
        over the ranks that gather the same experts, for the weights and for the gradients of
        experts; None: experts use `channel` and `reduce_channel`. `poison` fills released buffers
        with NaN; `allocate` makes buffers of gathered weights: see `MemoryPool`.
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
        """True if gathers and reduce-scatters overlap with compute."""
        self.pool = MemoryPool(reuse=enable_memory_pool, poison=poison, allocate=allocate)
        """Buffers for gathered weights: as many as the plan has gathered at one time."""
        self.reduce_pool = MemoryPool(reuse=enable_memory_pool, poison=poison)
        """Buffers for reduced gradients, if the sink provides no tensor for them."""
        self.model_chunk: int | None = None
        """The running chunk; None: `switch_current_model_chunk` was not called."""
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
        self._layers: dict[int, _DeclaredLayer] = {}
        """The layers of the model, by the id of the layer and by that of its weight."""
        self._keys: dict[tuple[int, int, int], Hashable] = {}
        """The key of the use at each place (chunk, block, use), in forward order."""
        self._launch_points: set[Hashable] = set()
        """The keys of the places without a weight, by which models call `pass_by`."""
        self._followed_plans: dict[tuple[Action, ...], _FollowedPlan] = {}
        """Cache by the actions of a step; a run repeats few of them."""
        self._entries: tuple[_FollowedEntry, ...] = ()
        """The entries of the plan that is followed; the cursor's position is an index of them."""
        self._cursor: PlanCursor | None = None
        """The position in the plan; None: no plan is followed."""
        self._announced = False
        """True if `begin` has been called [Note: Unannounced]."""
        self.is_recomputing = False

    # -- before training ---------------------------------------------------------------------

    def declare(self, chunks: Sequence[Sequence[DeclaredBlock]]) -> None:
        """Declare the model: its chunks, each with its blocks in forward order.

        Raises RuntimeError if a model was declared before.
        """
        if self._chunks:
            raise RuntimeError(
                "declare was called before: use one ISPCommunicator for each model, and declare all"
                " chunks of a model in one call"
            )
        _check_chunks(chunks)
        declared = tuple(tuple(chunk) for chunk in chunks)
        self._chunks = as_chunks(declared)
        names, weights = weight_names(declared), self._gatherer.weights
        for site, block, use in declared_uses(declared):
            # Layers are looked up by their id, launch points by a key that the caller chose. As a
            # pair with `_LAUNCH_POINT`, such a key cannot be equal to an id.
            launch_point = _LAUNCH_POINT, use.key
            self._keys[site[1:]] = launch_point if use.layer is None else id(use.layer)
            if use.layer is not None:
                name, own = names[id(use.layer.weight)], parameters_of(use.layer)
                if name not in weights:
                    weights[name] = DeclaredWeight(name, block.module, own)
                weight = weights[name]
                # If layers share a weight, some may have a bias and others none, such as a head
                # and the table that it is tied to. `shards` is that of a layer with a bias.
                weight.shards = max(weight.shards, own, key=len)
                # The bias that is gathered with the weight; empty if this layer has no bias.
                others = weight.shards[1 : len(own)]
                if any(
                    a.parameter is not b.parameter for a, b in zip(own[1:], others, strict=True)
                ):
                    weight.has_other_biases = True
                found = _DeclaredLayer(weight, own)
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

        Not a hook of torch; the name is InternEvo's. Raises TypeError if `fn` is not callable.
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

        Call this as soon as the weights of the next step are published. Gathers that an earlier
        plan has launched are waited for and dropped. Raises TypeError if `actions` is no sequence
        of actions.
        """
        if not isinstance(actions, Sequence) or not all(isinstance(a, Action) for a in actions):
            raise TypeError(
                f"actions must be a sequence of isp.Action, got {actions!r:.80}: pass"
                " isp.sequential_actions(n) for n micro-batches, each forward and backward"
            )
        self._announced = True
        self._follow(actions)

    def finish(self) -> None:
        """Deliver all gradients and release all buffers; call this after the last backward."""
        self._latch.check()
        self._reducer.finish()
        self.drain()

    def drain(self) -> None:
        """Wait for gathers in flight, drop all gathered weights and give up the plan."""
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
        """Set the chunk whose forward or backward runs from now on.

        Raises ValueError if the model has no such chunk.
        """
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
        # In backward, launch the gathers for later uses at once, not when this use's own weight has
        # arrived: a linear waits for its weight only after it has computed the weight gradient.
        if use.launches and phase is _BACKWARD and self.overlap:
            self._launch_ahead(use)
        return use

    def pass_by(self, key: Hashable) -> None:
        """Report that a forward has reached the place without a weight that has `key`: attention.

        Models call it there. It launches the gathers that the prefetch plan has at this place.
        Raises KeyError if no `DeclaredUse` has this key.
        """
        launch_point = _LAUNCH_POINT, key
        if launch_point not in self._launch_points:
            raise KeyError(
                f"the forward called pass_by({key!r}), but no use is declared with this key: add"
                f" DeclaredUse(.., key={key!r}) to the uses of its DeclaredBlock"
            )
        if (entry := self._arrive(launch_point, _FORWARD)) is not None:
            self._run(entry)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._reducer.sent_dtype(dtype)

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        """Launch the reduce-scatter of a full gradient; see `WPCommunicator.grad_hook`."""
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
        """Begin a step that has these actions: launch the first gathers of their prefetch plan.

        Returns the cursor, which then moves through the entries of the plan.
        """
        found = self._followed_plan(tuple(actions))
        self.drain()
        self._entries = found.entries
        self._cursor = cursor = PlanCursor(found.planned, found.expected)
        self._gatherer.follow()
        self._gatherer.launch(found.start)
        return cursor

    def _followed_plan(self, actions: tuple[Action, ...]) -> _FollowedPlan:
        """Return the plan of `actions` with its weights and keys looked up, from a cache."""
        if (known := self._followed_plans.get(actions)) is not None:
            return known
        planned, weights = self.plan(actions), self._gatherer.weights

        def gathers(ops: Iterable[WeightOp]) -> tuple[PlannedGather, ...]:
            # Waits are left out: a layer waits where it reads its weight.
            launched = (op for op in ops if op.kind is _GATHER)
            return tuple((weights[op.weight], op.bias is not None) for op in launched)

        entries = tuple(
            _FollowedEntry(
                entry.site.chunk,
                entry.before,
                gathers(entry.before),
                tuple(weights[op.weight] for op in entry.after),
                # Operations are in this order: the gather of the use's own weight, the wait for
                # it, gathers for later uses.
                bool(entry.before) and entry.before[-1].kind is _GATHER,
            )
            for entry in planned.entries
        )
        expected = tuple((self._keys[e.site[1:]], e.site.phase) for e in planned.entries)
        # If so many plans are cached, the actions do not repeat, so the old plans are of no use.
        if len(self._followed_plans) >= _CACHED_PLANS:
            self._followed_plans.clear()
        found = _FollowedPlan(gathers(planned.start), entries, planned.entries, expected)
        self._followed_plans[actions] = found
        return found

    def _arrive(self, key: Hashable, phase: Phase) -> _FollowedEntry | None:
        """Return the plan's entry for a use, after running the entries skipped before it.

        None if the use is not planned.
        """
        if self._latch.error is not None:
            self._latch.check()
        # Layers do not know that they run in a recompute: they pass FORWARD in both cases.
        if self.is_recomputing and phase is _FORWARD:
            phase = Phase.RECOMPUTE
        cursor, start, index = self._cursor, 0, None
        if cursor is not None:
            start, index = cursor.position, cursor.arrive(key, phase)
        # If the caller has not called `begin`, a forward that comes to another use than the next
        # one of the plan begins the plan of a new forward and backward.
        if not self._announced and phase is _FORWARD and (index is None or index > start):
            start, index = 0, self._begin_unannounced(key)
        if index is None:
            return None
        entry = self._entries[index]
        assert self.model_chunk in (entry.chunk, None), (self.model_chunk, entry)
        if index > start:
            for skipped in self._entries[start:index]:
                self._run(skipped)
        return entry

    def _begin_unannounced(self, key: Hashable) -> int | None:
        """Follow the plan of a forward and backward that `begin` did not announce.

        Returns the index of the entry of `key`. Returns None, and follows no plan, if `key` is not
        the model's first use. See [Note: Unannounced] in docs/design/notes/weights.md.
        """
        keys = self._keys.values()
        # A layer that was not declared is in no plan. Its use changes nothing: the current plan
        # is still followed.
        if key not in keys:
            return None
        self.drain()
        if key != next(iter(keys)):
            return None
        chunks = range(len(self._chunks))
        forward = [Action(ActionKind.FORWARD, 0, chunk) for chunk in chunks]
        backward = [Action(ActionKind.BACKWARD, 0, chunk) for chunk in reversed(chunks)]
        return self._follow(forward + backward).arrive(key, _FORWARD)

    def _run(self, entry: _FollowedEntry) -> None:
        """Run the gathers and frees of an entry at which no weight is read.

        It is a launch point, or a use that was skipped.
        """
        if entry.gathers:
            self._gatherer.launch(entry.gathers)
        if entry.frees:
            self._gatherer.free(entry.frees)

    # -- the weight of a use -----------------------------------------------------------------

    def _launch_ahead(self, use: _Use) -> None:
        """Launch the gathers that the plan has at `use` for later uses, if that is not done yet."""
        use.launches = False
        if (entry := use.planned()) is not None:
            self._gatherer.launch(entry.gathers)

    def _hold(self, use: _Use, with_bias: bool) -> GatheredLayer:
        """Return the full tensors that `use` reads; they are kept until it calls `let_go`.

        If they were not gathered as planned, they are gathered now. If the plan has this use, they
        then stay for later uses until the plan frees them; else they are for this use alone.
        """
        layer, gather = use.layer, self._gatherer.gather_now
        known = use.known or self._layers.get(id(layer.weight))
        # A weight that was not declared is in no plan.
        if known is None:
            return gather(self._parameters(layer)[: 1 + with_bias])
        weight = known.weight
        # Layers with different biases share this weight, and the plan gathers only one of the
        # biases with it: gather the weight and this layer's bias for this use alone.
        if with_bias and weight.has_other_biases:
            return gather(self._parameters(layer), weight.block)
        found = weight.gathered
        if found is not None:
            if not found.is_stale():
                if not with_bias or len(found.full) > 1:
                    return found.hold()
                # The plan has gathered the weight without its bias, because in the plan no forward
                # reads the bias before the weight is freed.
                return gather(self._parameters(layer)[:2], weight.block)
            weight.gathered = None
            found.let_go()
        if (entry := use.planned()) is None:
            return gather(self._parameters(layer)[: 1 + with_bias], weight.block)
        # The weight stays gathered until the plan frees it. So gather the bias, too, if this use or
        # a later use reads it before that.
        biases = [op.bias for op in entry.before if op.weight == weight.name]
        weight.gathered = gather(weight.shards[: 1 + (with_bias or any(biases))], weight.block)
        return weight.gathered.hold()

    def _parameters(self, layer: WeightHolder) -> tuple[ShardedParameter, ...]:
        """Return a layer's weight and bias as `ShardedParameter`s.

        They are the declared ones; for a layer that was not declared, new ones.
        """
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
