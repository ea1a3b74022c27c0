"""What a recomputed part keeps of its input: a part on each rank, a copy on the host, or nothing.

[Note: Held in its place] What a recompute is given lives as long as its graph, so something else
has to be given to it in place of the input: `Held`, of which the input is made again. Autograd
keeps it, where it is a tensor; where it is none, it goes with the graph all the same.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from isp.core.comm import Channel
from isp.core.comm.host_offload import HostMemory, Stored
from isp.core.comm.tag import Purpose, Tag
from isp.core.megatron.mappings import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks

__all__ = ["HostInputs", "Restore", "Segment", "in_parts"]

Restore = Callable[[Any], Tensor]
"""Makes a tensor, without a graph, of what is held in its place [Note: Held in its place]."""

_TAG = Tag(Purpose.BLOCK_INPUT, tensor="block input")


def in_parts(x: Tensor, channel: Channel) -> tuple[Tensor, Restore]:
    """1/p of the elements of x on each rank of `channel`; the same x on all of them.

    Raises ValueError if they do not divide by p.
    """
    shape = x.shape
    part = split_tensor_into_1d_equal_chunks(x, channel, new_buffer=True)
    return part, lambda part: gather_split_1d_tensor(part, channel, tag=_TAG).view(shape)


class HostInputs:
    """Inputs in host memory, brought back one ahead of their use.

    Backward passes take the inputs of a forward pass in reverse order, and the passes themselves
    in theirs. As one is asked for, the next sets off. The input that was kept last stays on the
    device, too, until there is another: where a backward follows its forward, it needs it at once.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._passes: deque[list[weakref.ref[Stored]]] = deque()
        self._latest: weakref.ref[Stored] | None = None

    def begin(self) -> None:
        """Another forward pass begins."""
        while self._passes and not _alive(self._passes[0]):
            self._passes.popleft()
        self._passes.append([])

    def __call__(self, x: Tensor, restore: Restore) -> tuple[Stored, Restore]:
        """What is held in place of x, and what gives `restore` x again."""
        if self._latest is not None and (latest := self._latest()) is not None:
            latest.leave()
        stored = self._memory.store(x, tag=_TAG)
        self._latest = weakref.ref(stored)
        if not self._passes:
            self.begin()
        self._passes[-1].append(self._latest)
        return stored, lambda stored: restore(self._fetched(stored))

    def _fetched(self, stored: Stored) -> Tensor:
        x = stored.get()
        if (following := self._next(stored)) is not None:
            following.fetch()
        return x

    def _next(self, stored: Stored) -> Stored | None:
        """The input that backward asks for after this one."""
        passes = [_alive(kept) for kept in self._passes]
        own = next(kept for kept in passes if stored in kept)
        if place := own.index(stored):
            return own[place - 1]
        return next((kept[-1] for kept in passes if kept and kept is not own), None)


def _alive(kept: list[weakref.ref[Stored]]) -> list[Stored]:
    return [stored for ref in kept if (stored := ref()) is not None]


class Segment:
    """Parts in a row, each of which takes what the one before gives; only the first input is kept.

    Of several things that a part gives the first; what the next one takes beside it is kept.

    The first of the others that asks for its input has all parts before it computed again, which
    fills in the inputs of all of them.
    """

    def __init__(self, first: Callable[[], Tensor]) -> None:
        """`first`: restores the first input."""
        self._first = first
        self._again: list[Callable[[Tensor], Any]] = []
        self._inputs: dict[int, Tensor] = {}
        self._given: weakref.ref[Tensor] | None = None

    def follows(self, x: Tensor) -> bool:
        """Whether x is what the last part gave."""
        return self._given is not None and self._given() is x

    def add(self, again: Callable[[Tensor], Any]) -> Restore:
        """A further part, and how to compute it again without a graph; what restores its input."""
        number = len(self._again)
        self._again.append(again)
        return lambda _: self._input(number)

    def gave(self, y: Any) -> None:
        """The result of the last part."""
        x = _first(y)
        self._given = weakref.ref(x) if isinstance(x, Tensor) else None

    def _input(self, number: int) -> Tensor:
        if number not in self._inputs:
            x = self._first()
            for index, again in enumerate(self._again[:number]):
                self._inputs[index] = x
                x = _first(again(x))
            self._inputs[number] = x
        return self._inputs.pop(number)


def _first(given: Any) -> Any:
    return given[0] if isinstance(given, tuple) else given
