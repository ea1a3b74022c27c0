"""Memory of tensors during a computation: the peak, and the tensors alive at the peak."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LiveBytes", "live_bytes", "tensors_here", "tensors_in"]


class LiveBytes(TorchDispatchMode):
    """Counts the memory of each tensor that an operation in this context creates or reads.

    Bytes are counted after each operation, so memory inside an operation is not seen.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[Any]] = {}
        self.now = 0
        """Bytes of the tensors alive now."""
        self.peak = 0
        self.where = ""
        """The operation after which the peak occurred."""
        for x in known:
            self._note(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tensors_in((args, kwargs, out)):
            self._note(x)
        if self.now > self.peak:
            self.peak, self.where = self.now, str(func)
        return out

    def _note(self, x: Tensor) -> None:
        memory = x.untyped_storage()
        key, size = memory._cdata, memory.nbytes()
        if x.is_meta or key in self._live:
            return

        def gone(_: object) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = weakref.ref(memory, gone)
        self.now += size


def live_bytes(step: Callable[[], object], *, earlier: Container[int]) -> LiveBytes:
    """Return the peak of `step`, including tensors made since `tensors_here` returned `earlier`."""
    gc.collect()
    with LiveBytes(x for key, x in tensors_here().items() if key not in earlier) as live:
        step()
    return live


def tensors_in(x: Any) -> list[Tensor]:
    """Yield the tensors of nested lists, tuples and dictionaries; faster than torch's pytree."""
    found: list[Tensor] = []
    _collect(x, found)
    return found


def _collect(x: Any, found: list[Tensor]) -> None:
    if isinstance(x, Tensor):
        found.append(x)
    elif isinstance(x, list | tuple):
        for part in x:
            _collect(part, found)
    elif isinstance(x, dict):
        for part in x.values():
            _collect(part, found)


def tensors_here() -> dict[int, Tensor]:
    """Return one tensor for each storage that this rank has created and that still exists."""
    kinds = Tensor, nn.Parameter
    found = (x for x in gc.get_objects() if type(x) in kinds)
    return {x.untyped_storage()._cdata: x for x in found}
