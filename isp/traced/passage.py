"""A model's calls next to its trace: who is called in another order is told so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from torch import Tensor

from isp.attention import AttentionMask
from isp.traced.trace import Call, Kind, ModelTrace

__all__ = ["Masks", "Passage", "outer_calls"]


class Masks:
    """The masks of one micro-batch, each made once."""

    def __init__(self, cu_seqlens: Tensor | None) -> None:
        self._cu_seqlens = cu_seqlens
        self._made: dict[tuple[bool, int | None], AttentionMask] = {}

    def __call__(self, causal: bool, window: int | None) -> AttentionMask:
        key = causal, window
        if key not in self._made:
            self._made[key] = AttentionMask(
                causal=causal, window=window, cu_seqlens=self._cu_seqlens
            )
        return self._made[key]


class Passage:
    """One way through a block, or through what is outside of the blocks, next to its trace."""

    def __init__(self, name: str, calls: tuple[Call, ...], masks: Masks) -> None:
        self.name = name
        self.masks = masks
        self._calls = calls
        self._next = 0

    @property
    def passed(self) -> int:
        """The calls that have come."""
        return self._next

    def arrive(self, kind: Kind, module: str) -> None:
        """A call.  Raises RuntimeError if it is not the next one of the trace."""
        if self._next < len(self._calls):
            expected = self._calls[self._next]
            if expected.kind is kind and expected.module == module:
                self._next += 1
                return
        raise self._error(f"{kind} of {module} was called")

    def finish(self) -> None:
        """The end.  Raises RuntimeError if calls of the trace are missing."""
        if self._next < len(self._calls):
            raise self._error("the end was reached")

    def _error(self, found: str) -> RuntimeError:
        rest = self._calls[self._next :]
        expected = f"{rest[0].kind} of {rest[0].module}" if rest else "nothing more"
        return RuntimeError(
            f"in {self.name}, {found} where {expected} came when the model was traced: isp drives"
            f" models whose calls come in one order"
        )


def outer_calls(trace: ModelTrace) -> Iterator[Call]:
    """The calls outside of the blocks, and those of the blocks as wholes."""
    for block, calls in groupby(trace.calls, key=lambda call: call.block):
        if block is None:
            yield from calls
        else:
            yield Call(Kind.BLOCK, block, block)
