"""`ISPCommunicator`: each weight gathered before it is needed, each gradient reduced as it appears.

[Note: Plan and cursor] What to do where is decided by the plan (`isp.core.weights.prefetch_plan`),
which knows the order of the whole step. The layers report where they are: `unshard` around the use
of a weight, a module hook at launch points without one. A cursor follows the plan with them, and
its acts are executed. A use that the plan does not have (a module called once more than declared,
an evaluation nobody announced) gathers for itself and leaves the cursor alone; a use that did not
happen is caught up with when a later one does. Uses may be nested; what one holds is there until it
ends, whatever the plan frees meanwhile.

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
from dataclasses import dataclass, replace
from functools import partial

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
    GradientSink,
    WeightGatherer,
)
from isp.core.weights.pool import MemoryPool
from isp.core.weights.prefetch_plan import PlanCursor, PlanEntry, PrefetchPlan, WeightOpKind, plan
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.core.weights.uses import Action, ActionKind, Chunks
from isp.core.weights.wp import WPCommunicator

__all__ = ["ISPCommModelConfig", "ISPCommunicator"]


@dataclass(frozen=True, kw_only=True)
class ISPCommModelConfig:
    """What the communicator has to know of the model."""

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


_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD  # Python 3.11 looks members up by hand
_GATHER = WeightOpKind.GATHER


@dataclass(eq=False, slots=True)
class _Use:
    """A use of a layer's weight, from `ISPCommunicator.unshard` to `reshard`."""

    communicator: ISPCommunicator
    layer: WeightHolder
    with_bias: bool
    step: PlanEntry | None
    """Of the plan, if it has this use."""
    cursor: PlanCursor | None
    """In that plan."""
    launches: bool
    """Whether there is something to gather here for later uses."""
    held: GatheredLayer | None = None

    def __enter__(self) -> _Use:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.communicator.reshard(self, failed=error is not None)

    @property
    def weight(self) -> Tensor:
        return self.communicator.wait(self, 0)

    @property
    def bias(self) -> Tensor | None:
        return self.communicator.wait(self, 1) if self.with_bias else None


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
        experts: tuple[Channel, Channel] | None = None,
        poison: bool = False,
        allocate: Allocate | None = None,
    ) -> None:
        """`reduce_channel`: for gradients; None: `channel`. `experts`: both, of the ranks that
        gather the same experts; None: they are gathered by all."""
        for name, given in (("channel", channel), ("reduce_channel", reduce_channel or channel)):
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
        """Whether weights are gathered ahead and gradients reduced behind."""
        self.pool = MemoryPool(reuse=enable_memory_pool, poison=poison, allocate=allocate)
        """Buffers weights are gathered into, as many as the plan has there at once."""
        self.reduce_pool = MemoryPool(reuse=enable_memory_pool, poison=poison)
        """Buffers gradients are reduced into where the sink has no tensor for them."""
        self.model_chunk: int | None = None
        """The chunk that runs, if anybody says; see `switch_current_model_chunk`."""
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
            dtype=config.reduce_dtype,
            max_bytes_in_flight=config.max_reduce_bytes,
        )
        self._chunks: Chunks = ()
        self._layers: dict[int, tuple[DeclaredWeight, tuple[ShardedParameter, ...]]] = {}
        """Weight and own parameters of each layer, by the id of it or of its weight."""
        self._keys: dict[tuple[int, int, int], Hashable] = {}
        """The name that the use at a place of the model gives itself, in forward order."""
        self._cursor: PlanCursor | None = None
        self._announced = False
        """Whether somebody calls `begin` [Note: Unannounced]."""
        self.is_recomputing = False

    # -- before training ---------------------------------------------------------------------

    def declare(self, chunks: Sequence[Sequence[DeclaredBlock]]) -> None:
        """Take up the model: its chunks, each with its blocks in forward order."""
        if self._chunks:
            raise RuntimeError("this communicator has a model: make another for another model")
        _check_chunks(chunks)
        declared = tuple(tuple(chunk) for chunk in chunks)
        self._chunks = as_chunks(declared)
        names, weights = weight_names(declared), self._gatherer.weights
        for site, block, use in declared_uses(declared):
            place = site[1:]
            key = self._keys[place] = place if use.layer is None else id(use.layer)
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
                self._layers[id(use.layer)] = self._layers[id(use.layer.weight)] = weight, own
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
        self._gatherer.prerequisites.append(fn)

    # -- a step ------------------------------------------------------------------------------

    def plan(self, actions: Sequence[Action]) -> PrefetchPlan:
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
        self._gatherer.drain()

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
        if not 0 <= chunk < len(self._chunks):
            raise ValueError(f"chunk {chunk} is not one of the {len(self._chunks)} model chunks")
        self.model_chunk = chunk

    # -- what layers call --------------------------------------------------------------------

    def unshard(
        self, module: WeightHolder, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> _Use:
        if phase is _FORWARD and (known := self._layers.get(id(module))) is not None:
            own = known[1]
            if own[0].parameter is not weight or (
                bias is not None and own[-1].parameter is not bias
            ):
                raise RuntimeError(
                    f"{module.name} has another parameter than when the model was declared: write"
                    f" into the declared one, by copy_ or load_state_dict without assign=True"
                )
        step = self._arrive(id(module), phase)
        before = () if step is None else step.before
        launches = bool(before) and before[-1].kind is _GATHER  # waits come first
        use = _Use(self, module, bias is not None, step, self._cursor, launches)
        # A backward has the weight gradient to compute before it reads the weight.
        if launches and phase is _BACKWARD and self.overlap:
            self._launch_ahead(use)
        return use

    def wait(self, use: _Use, index: int) -> Tensor:
        """The full weight of `use`, or the bias behind it; waits for it."""
        try:
            if use.held is None:
                use.held = self._hold(use)
            full = use.held.full[index].wait()
        except Exception as failed:
            self._latch.error = failed
            raise
        # Only now: what is needed at once does not share the wire with what is needed next.
        if use.launches:
            self._launch_ahead(use)
        return full

    def reshard(self, use: _Use, *, failed: bool) -> None:
        """The end of a use: nothing that it waited for is read any more."""
        if self._latch.error is None:
            step = None if failed or use.cursor is not self._cursor else use.step
            self._gatherer.free(() if step is None else step.after, use.held)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._reducer.travels_in(dtype)

    def grad_hook(
        self, grad: Tensor, *, module: WeightHolder, is_bias: bool = False, returned: bool = False
    ) -> Tensor | None:
        if self._latch.error is not None:
            self._latch.check()
        sharded = self._parameters(module)[is_bias]
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
        self._cursor = cursor = PlanCursor(self.plan(actions), self._keys)
        self._gatherer.follow()
        self._gatherer.launch(cursor.plan.start)
        return cursor

    def _pass_by(self, key: Hashable, *_: object) -> None:
        """A launch point without a weight, as a module's hook."""
        if (step := self._arrive(key, Phase.FORWARD)) is not None:
            self._gatherer.launch(step.before)
            self._gatherer.free(step.after)

    def _arrive(self, key: Hashable, phase: Phase) -> PlanEntry | None:
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
            self._gatherer.launch(passed.before)
            self._gatherer.free(passed.after)
        return step

    def _begin_pass(self, key: Hashable) -> tuple[PlanEntry, tuple[PlanEntry, ...]] | None:
        """A forward that nobody has announced has come to `key` [Note: Unannounced]."""
        keys = self._keys.values()
        if key not in keys:  # a layer that nobody has declared is in no plan
            return None
        self.drain()
        if key != next(iter(keys)):
            return None
        chunks = range(len(self._chunks))
        forward = [Action(ActionKind.FORWARD, 0, chunk) for chunk in chunks]
        backward = [Action(ActionKind.BACKWARD, 0, chunk) for chunk in reversed(chunks)]
        return self._follow(forward + backward).arrive(key, Phase.FORWARD)

    # -- the weight of a use -----------------------------------------------------------------

    def _launch_ahead(self, use: _Use) -> None:
        use.launches = False
        if use.step is not None and use.cursor is self._cursor:
            self._gatherer.launch(use.step.before)

    def _hold(self, use: _Use) -> GatheredLayer:
        """What a use reads, there until it lets go: as planned, or gathered for it alone."""
        layers, layer, gather = self._layers, use.layer, self._gatherer.gather_now
        known = layers.get(id(layer)) or layers.get(id(layer.weight))
        if known is None:  # nobody has declared this weight
            return gather(self._parameters(layer)[: 1 + use.with_bias])
        weight = known[0]
        if use.with_bias and weight.has_other_biases:  # a plan knows one of them
            return gather(self._parameters(layer), weight.block)
        found = weight.gathered
        if found is not None and found.is_stale():
            weight.gathered = None
            found.let_go()
            found = None
        if found is not None and (len(found.full) > 1 or not use.with_bias):
            return found.hold()
        if found is not None or use.step is None or use.cursor is not self._cursor:
            return gather(self._parameters(layer)[: 1 + use.with_bias], weight.block)
        # It stays until the plan frees it, with the bias if one is read until then.
        biases = [act.bias for act in use.step.before if act.weight == weight.name]
        with_bias = use.with_bias or any(biases)
        weight.gathered = gather(weight.shards[: 1 + with_bias], weight.block)
        return weight.gathered.hold()

    def _parameters(self, layer: WeightHolder) -> tuple[ShardedParameter, ...]:
        known = self._layers.get(id(layer))
        return parameters_of(layer) if known is None else known[1]


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
