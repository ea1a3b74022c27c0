"""`ForwardPass`: the calls of one pass, compared with the trace; another order is an error.

B batch, S sequence, S' tokens of this rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from isp.core.attention.mask import AttentionMask
from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel
from isp.core.mixers.placement import Placement
from isp.core.recompute.kept_calls import KeptCalls
from isp.models.tracing.trace import Call, Kind

__all__ = ["ForwardPass", "Instead", "Masks"]


class Masks:
    """The attention masks and the placement of one micro-batch, each made once."""

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
        if chunk is None:
            return AttentionMask(causal=causal, window=window, cu_seqlens=self._cu_seqlens)
        rows, tokens = shape
        ends = self._cu_seqlens
        lengths = [tokens] * rows if ends is None else ends.diff().tolist()
        parts = [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]
        return AttentionMask.of_documents(parts, causal=causal, window=window)

    def placement(self, sequence: SequenceRanks, channel: Channel, x: Tensor) -> Placement:
        """Return which rank of `channel` has which tokens; x [B, S', ..]: those of this rank."""
        if self._placement is None:
            cu = self._cu_seqlens
            rows = x.shape[0], x.shape[1] * channel.size
            if cu is not None and sequence.context.size > 1:  # all rows are one packed sequence
                rows = 1, int(cu[-1])
            bounds: Sequence[int] = () if cu is None else cu.tolist()
            self._placement = Placement.of(sequence, channel, rows, bounds)
        return self._placement


class Instead(NamedTuple):
    """The parts of the model that a forward leaves out, and their replacements."""

    left_out: frozenset[str] = frozenset()
    """Blocks that return `received`, or their input if that is None."""
    received: Tensor | None = None
    """Hidden states from the pipeline stage before; None on the first stage."""
    last_block: str | None = None
    """The block after which the forward ends; None: it ends as the model's does."""
    calls: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})
    """By name of a linear or table outside of the blocks, the function to call in its place."""


_AS_TRACED = Instead()


class ForwardPass:
    """A pass through a block, a tile or the rest of the model, compared with the trace."""

    def __init__(
        self,
        name: str,
        calls: tuple[Call, ...],
        masks: Masks,
        *,
        kept: KeptCalls | None = None,
        instead: Instead = _AS_TRACED,
    ) -> None:
        """`calls`: the traced calls of the pass, in order; `kept`: the kept calls of a block."""
        self.name = name
        self.masks = masks
        self.kept = kept
        self.instead = instead
        self.ahead: dict[str, tuple[Tensor, Tensor, list[Any]]] = {}
        """By name of a module that is computed before its call: the tokens, the output, and a list
        to which the call is added."""
        self._calls = calls
        self.passed = 0
        """The number of calls so far."""

    def arrive(self, kind: Kind, module: str) -> Call:
        """Count a call and return it as traced; raise RuntimeError if it is not the next one."""
        if self.passed < len(self._calls):
            expected = self._calls[self.passed]
            if expected.kind is kind and expected.module == module:
                self.passed += 1
                return expected
        raise self._error(f"{kind} of {module} was called")

    def keep(self, kind: Kind, call: Callable[[], Tensor], dropped: Tensor | None = None) -> Tensor:
        """Return `call()`, or its kept result in a recompute, see `KeptCalls`.

        `dropped`: the input of the call, if that is not kept.
        """
        return call() if self.kept is None else self.kept(kind, call, dropped)

    def skip(self, module: str, calls: tuple[Call, ...]) -> None:
        """Count all `calls` of a module at once; raise RuntimeError if they are not the next."""
        if self._calls[self.passed : self.passed + len(calls)] != calls:
            raise self._error(f"{module} was called")
        self.passed += len(calls)

    def end(self) -> None:
        """Expect no further call: the forward ended early, as it was meant to."""
        self.passed = len(self._calls)

    def finish(self) -> None:
        """End the pass.  Raises RuntimeError if calls of the trace are missing."""
        if self.passed < len(self._calls):
            raise self._error("the end was reached")

    def _error(self, found: str) -> RuntimeError:
        """Return the error for something that the trace does not have here."""
        rest = self._calls[self.passed :]
        expected = f"{rest[0].kind} of {rest[0].module}" if rest else "nothing more"
        return RuntimeError(
            f"in {self.name}, {found} where {expected} came when the model was traced: isp"
            f" supports models whose calls come in one order"
        )
