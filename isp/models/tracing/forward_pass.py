"""A model's calls, compared with its trace: another order of calls is an error."""

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
    """The masks of one micro-batch, each made once."""

    def __init__(self, cu_seqlens: Tensor | None, lengths: Tensor | None = None) -> None:
        """`lengths` [B, S']: of the document of each token; None: nothing in the model asks."""
        self.lengths = lengths
        self._cu_seqlens = cu_seqlens
        self._made: dict[tuple[Any, ...], AttentionMask] = {}
        self._placement: Placement | None = None

    def __call__(
        self, causal: bool, window: int | None, chunk: int | None, shape: tuple[int, int]
    ) -> AttentionMask:
        """The mask of rows of this `shape`, [B, S]; the documents are cut into chunks."""
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
        """Which rank of `channel` has which tokens; x [B, S', ..] are this rank's."""
        if self._placement is None:
            cu = self._cu_seqlens
            rows = x.shape[0], x.shape[1] * channel.size
            if cu is not None and sequence.context.size > 1:  # sequences are joined
                rows = 1, int(cu[-1])
            bounds: Sequence[int] = () if cu is None else cu.tolist()
            self._placement = Placement.of(sequence, channel, rows, bounds)
        return self._placement


class Instead(NamedTuple):
    """The parts of the model that a forward leaves out, and what it computes in their place."""

    left_out: frozenset[str] = frozenset()
    """Blocks that hand on `received`, or what they are given."""
    received: Tensor | None = None
    last_block: str | None = None
    """The block behind which the forward ends."""
    calls: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})
    """Called in place of linears and tables outside of the blocks."""


_AS_TRACED = Instead()


class ForwardPass:
    """A forward of a block, or of what is outside of the blocks, compared with its trace."""

    def __init__(
        self,
        name: str,
        calls: tuple[Call, ...],
        masks: Masks,
        *,
        kept: KeptCalls | None = None,
        instead: Instead = _AS_TRACED,
    ) -> None:
        self.name = name
        self.masks = masks
        self.kept = kept
        self.instead = instead
        self.ahead: dict[str, tuple[Tensor, Tensor, list[Any]]] = {}
        """By module that is computed ahead of its call: the tokens, the output, and a list to which
        the call is added."""
        self._calls = calls
        self.passed = 0
        """How many calls have come."""

    def arrive(self, kind: Kind, module: str) -> Call:
        """Note a call, and return it as traced.  Raises RuntimeError if it is not the next one."""
        if self.passed < len(self._calls):
            expected = self._calls[self.passed]
            if expected.kind is kind and expected.module == module:
                self.passed += 1
                return expected
        raise self._error(f"{kind} of {module} was called")

    def keep(self, kind: Kind, call: Callable[[], Tensor], dropped: Tensor | None = None) -> Tensor:
        """`call()`, or what it gave, see `KeptCalls`."""
        return call() if self.kept is None else self.kept(kind, call, dropped)

    def skip(self, module: str, calls: tuple[Call, ...]) -> None:
        """Note all `calls` of a module at once.  Raises RuntimeError if they are not the next."""
        if self._calls[self.passed : self.passed + len(calls)] != calls:
            raise self._error(f"{module} was called")
        self.passed += len(calls)

    def end(self) -> None:
        """Expect no further call."""
        self.passed = len(self._calls)

    def finish(self) -> None:
        """End the pass.  Raises RuntimeError if calls of the trace are missing."""
        if self.passed < len(self._calls):
            raise self._error("the end was reached")

    def _error(self, found: str) -> RuntimeError:
        rest = self._calls[self.passed :]
        expected = f"{rest[0].kind} of {rest[0].module}" if rest else "nothing more"
        return RuntimeError(
            f"in {self.name}, {found} where {expected} came when the model was traced: isp"
            f" supports models whose calls come in one order"
        )
