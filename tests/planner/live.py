"""What tensors take while something runs: the peak, and what is there at it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the memory of every tensor that an operation in this context makes or takes.

    Looked at after each operation; what one needs inside is not seen.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.peak = 0
        self.where = ""
        """The operation after which the peak was seen."""
        for x in known:
            self._note(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        new = [self._note(x) for x in tree_iter((args, kwargs, out)) if isinstance(x, Tensor)]
        if True not in new:
            return out
        if self.now > self.peak:
            self.peak, self.where = self.now, str(func)
        return out

    @property
    def now(self) -> int:
        """Bytes of what is there."""
        return sum(memory.nbytes() for memory in self._live.values())

    def _note(self, x: Tensor) -> bool:
        """Whether the memory of x is new."""
        memory = x.untyped_storage()
        if x.is_meta:
            return False
        new = memory._cdata not in self._live
        self._live[memory._cdata] = memory
        return new
