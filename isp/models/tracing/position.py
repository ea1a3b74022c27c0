"""`Position`: the place of the running forward in the model's trace and in the prefetch plan.

B batch, S sequence, S' tokens of this rank
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from isp.core.attention.mask import AttentionMask
from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel
from isp.core.mixers.api import Mixers, mix_by
from isp.core.mixers.placement import Placement
from isp.core.recompute.kept_calls import KeptCalls
from isp.core.weights.wp_communicator import WPCommunicator
from isp.models.forwards import ModuleForward, Wrapper
from isp.models.tracing.calls import Call, Kind

__all__ = ["ForwardPass", "Instead", "Masks", "Position", "mixing_key"]


class Masks:
    """The attention masks and the token placement of one micro-batch, each made on first use."""

    def __init__(self, cu_seqlens: Tensor | None, lengths: Tensor | None = None) -> None:
        """`cu_seqlens`: starts of the documents [documents + 1], int32; None: not packed.

        `lengths` [B, S']: the length of each token's document; None: the model does not need it.
        """
        self.lengths = lengths
        self._cu_seqlens = cu_seqlens
        self._made: dict[tuple[Any, ...], AttentionMask] = {}
        self._placement: Placement | None = None

    def __call__(
        self, causal: bool, window: int | None, chunk: int | None, shape: tuple[int, int]
    ) -> AttentionMask:
        """Return the mask of rows of this `shape` = (B, S).

        `chunk`: tokens of the attention chunks that documents are cut into; None: no chunks.
        """
        key = causal, window, chunk, shape
        if key not in self._made:
            self._made[key] = self._make(causal, window, chunk, shape)
        return self._made[key]

    def _make(
        self, causal: bool, window: int | None, chunk: int | None, shape: tuple[int, int]
    ) -> AttentionMask:
        """Make a mask; the arguments are those of `__call__`."""
        if chunk is None:
            return AttentionMask(causal=causal, window=window, cu_seqlens=self._cu_seqlens)
        rows, tokens = shape
        ends = self._cu_seqlens
        lengths = [tokens] * rows if ends is None else ends.diff().tolist()
        # A token attends within its chunk, as it would if each chunk were a document.
        parts = [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]
        return AttentionMask.of_documents(parts, causal=causal, window=window)

    def placement(self, sequence: SequenceRanks, channel: Channel, x: Tensor) -> Placement:
        """Return which rank of `channel` has which tokens; x [B, S', ..]: this rank's tokens."""
        if self._placement is None:
            cu = self._cu_seqlens
            rows = x.shape[0], x.shape[1] * channel.size
            # Context ranks divide all rows of a packed batch as one sequence.
            if cu is not None and sequence.context.size > 1:
                rows = 1, int(cu[-1])
            bounds: Sequence[int] = () if cu is None else cu.tolist()
            self._placement = Placement.of(sequence, channel, rows, bounds)
        return self._placement


class Instead(NamedTuple):
    """The parts of the model that one forward leaves out, and what replaces them."""

    left_out: frozenset[str] = frozenset()
    """Blocks that do not run. They return `received`, or their input if `received` is None."""
    received: Tensor | None = None
    """Hidden states from the pipeline stage before; None on the first stage."""
    last_block: str | None = None
    """The block after which the forward ends early; None: it runs to the end of the model."""
    calls: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})
    """By name of a linear or table outside of the blocks, the function to call in its place."""


_AS_TRACED = Instead()
"""An `Instead` with which a forward makes all calls that the trace has."""


class ForwardPass:
    """A pass through a block, a tile or the rest of the model: its calls, and how many were made.

    The calls must come in the order of the trace, because the prefetch plan follows that order.
    """

    def __init__(
        self,
        name: str,
        calls: tuple[Call, ...],
        masks: Masks,
        *,
        kept: KeptCalls | None = None,
        instead: Instead = _AS_TRACED,
        planned: bool = True,
    ) -> None:
        """`calls`: the traced calls of the pass, in order; `kept`: the kept calls of a block.

        `planned`: False for a pass that the prefetch plan does not contain: the recompute of what
        is between a block's linears, which reads no weight.
        """
        self.name = name
        self.masks = masks
        self.kept = kept
        self.instead = instead
        self.planned = planned
        self.ahead: dict[str, tuple[Tensor, Tensor, list[Any]]] = {}
        """By name of a module that was computed before its call: its tokens, its output, and a list
        to which the call is added; see `ComputedAhead`."""
        self._calls = calls
        self.num_calls = 0
        """The number of calls so far, which is the index of the next one."""

    def arrive(self, kind: Kind, module: str) -> Call:
        """Count a call and return its entry in the trace; raise RuntimeError if it is not the
        next."""
        if self.num_calls < len(self._calls):
            expected = self._calls[self.num_calls]
            if expected.kind is kind and expected.module == module:
                self.num_calls += 1
                return expected
        raise self._error(f"{kind} of {module} was called")

    def keep(self, kind: Kind, call: Callable[[], Tensor], dropped: Tensor | None = None) -> Tensor:
        """Return `call()`, or in a recompute its kept result; see `KeptCalls`.

        `dropped`: the input of the call, if it is recomputed and not kept with the result.
        """
        return call() if self.kept is None else self.kept(kind, call, dropped)

    def skip(self, module: str, calls: tuple[Call, ...]) -> None:
        """Count all `calls` inside of a module; raise RuntimeError if they are not the next."""
        if self._calls[self.num_calls : self.num_calls + len(calls)] != calls:
            raise self._error(f"{module} was called")
        self.num_calls += len(calls)

    def end(self) -> None:
        """Count all remaining calls as made, because the forward ended early on purpose."""
        self.num_calls = len(self._calls)

    def finish(self) -> None:
        """End the pass; raise RuntimeError if calls of the trace are missing."""
        if self.num_calls < len(self._calls):
            raise self._error("the end was reached")

    def _error(self, found: str) -> RuntimeError:
        """Return the error for a call, or an end, that differs from the trace.

        `found`: the call or end that came, in words.
        """
        rest = self._calls[self.num_calls :]
        expected = f"{rest[0].kind} of {rest[0].module}" if rest else "nothing more"
        return RuntimeError(
            f"in {self.name}, {found} where {expected} came when the model was traced: isp"
            f" supports models whose calls come in one order"
        )


def mixing_key(block: str, number: int) -> Hashable:
    """Return the key in the prefetch plan of a call that mixes tokens, which has no module.

    `number`: the index of the call in its block.
    """
    return block, number


class Position:
    """The place of the running forward in the trace: the current pass, and its next call.

    Passes nest: a tile runs inside of a block's pass, and a block inside of the pass of the model
    around its blocks. The wrapper `Wrap.CALL` of a module counts its calls here; the mixers count
    the calls that mix tokens. The prefetch plan advances with the trace: a layer with a sharded
    weight calls the communicator's `unshard`, and for a place of the plan without a sharded weight
    this class calls `pass_by`.
    """

    def __init__(self, communicator: WPCommunicator) -> None:
        self.now: ForwardPass | None = None
        """The current pass; None outside of a forward that ISP runs."""
        self.mixers: Mixers | None = None
        """The mixers of all passes; set after `__init__`, because they need this object."""
        self._communicator = communicator
        self._mixing_hooks: dict[Hashable, OrderedDict[int, Callable[[Tensor], object]]] = {}

    def register_mixing_hook(
        self, key: Hashable, hook: Callable[[Tensor], object]
    ) -> RemovableHandle:
        """Call `hook` with the tokens x of each call that mixes them at the place `key`.

        For recorders, because such a call has no module to hook into. `key`: from `mixing_key`. If
        a whole block is recomputed, the hook is also called in the recompute; if only what is
        between linears is recomputed, it is not.
        """
        # Register the hook as torch registers hooks of a module: the handle removes it from this
        # dict.
        hooks = self._mixing_hooks.setdefault(key, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def current(self, called: str) -> ForwardPass:
        """Return the current pass; raise RuntimeError that names `called` if there is none."""
        if self.now is None:
            raise self._outside(called)
        return self.now

    @contextmanager
    def passing(self, forward_pass: ForwardPass) -> Iterator[None]:
        """Make `forward_pass` the current pass in this context, nested in the one before.

        Raises RuntimeError at the end if calls of the trace are missing, unless the context ends
        with an exception: a recompute ends with one as soon as it has restored what backward needs.
        """
        assert self.mixers is not None
        before, self.now = self.now, forward_pass
        try:
            # Set the mixers again in each pass: backward runs recomputes in a thread of its own on
            # CUDA, and threads do not share the context variables that send attention to the
            # mixers.
            with mix_by(self.mixers):
                yield
            forward_pass.finish()
        finally:
            self.now = before

    def mix(self, kind: Kind, x: Tensor) -> tuple[ForwardPass, Call]:
        """Count a call that mixes the tokens x; return the current pass and the call as traced."""
        now = self.current(kind)
        key = mixing_key(now.name, now.num_calls)
        # The trace has calls that mix tokens under the name of their block.
        call = now.arrive(kind, now.name)
        if now.planned:
            # Advance the prefetch plan, which may launch the all-gathers of the next block here.
            self._communicator.pass_by(key)
            if self._mixing_hooks:
                # Go through a copy of the hooks, because a hook may remove itself.
                for hook in [*self._mixing_hooks.get(key, {}).values()]:
                    hook(x)
        return now, call

    def pass_experts(self, module: str) -> None:
        """Advance the prefetch plan past experts whose weights the communicator does not gather."""
        if self.current(module).planned:
            self._communicator.pass_by(module)

    def document_lengths(self) -> Tensor | None:
        """Return the document length of each of this rank's tokens [B, S']; None: not needed."""
        return self.current("rotary positions").masks.lengths

    def called(
        self,
        kind: Kind,
        module: str,
        *,
        reads_shard: bool = True,
        substituted: bool = False,
        kept: bool = False,
    ) -> Wrapper:
        """Return the wrapper `Wrap.CALL` of a linear, a table or experts of the trace.

        `reads_shard`: False for experts that stay whole on one rank. They do not call `unshard`, so
        the wrapper passes their place of the plan. `substituted`: True if a pass may name another
        function to call, see `Instead`. `kept`: True if a recompute may reuse the forward's result.
        """

        def wrap(inner: ModuleForward) -> ModuleForward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                now = self.now
                if now is None:
                    # The model's own gradient checkpointing, for example, calls modules in
                    # backward.
                    raise self._outside(module)
                # Count the call first, because it counts even if another function replaces it.
                now.arrive(kind, module)
                if not reads_shard:
                    self.pass_experts(module)
                if substituted and (instead := now.instead.calls.get(module)) is not None:
                    return instead(*args, **kwargs)
                if kept:
                    # A linear's input is made between linears, so it is recomputed and not kept.
                    dropped = args[0] if kind is Kind.LINEAR else None
                    return now.keep(kind, lambda: inner(*args, **kwargs), dropped)
                return inner(*args, **kwargs)

            return forward

        return wrap

    def instead(self, module: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function to call in place of a linear or table in this pass; None: call the
        module."""
        return self.current(module).instead.calls.get(module)

    @staticmethod
    def _outside(called: str) -> RuntimeError:
        """Return the error for a call without a current pass."""
        return RuntimeError(
            f"{called} was called outside of a forward that isp runs: call a parallelized"
            f" model only through the run's `loss`, `log_probs`, `logits` or `hidden`, or"
            f" isp.integrations.transformers.Trainer, and use model.checkpoint for"
            f" recomputation, not the model's own gradient checkpointing"
        )
