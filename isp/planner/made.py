"""Bytes of the tensors that are made while something runs, on whatever device, meta among them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import UntypedStorage

from isp.core.tensors import memory_of, tensors_in
from isp.core.torch_private import TorchDispatchMode, storage_key

__all__ = ["Made"]


class Made(TorchDispatchMode):
    """Counts the memory of what operations in this context make, as long as it is there.

    Looked at after each operation; what one needs inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        """Bytes that were there at once."""
        self._now = 0
        self._there: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {*map(memory_of, tensors_in(args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            if memory_of(x) not in given:
                self._note(x.untyped_storage())
        self.most = max(self.most, self._now)
        return out

    def _note(self, memory: UntypedStorage) -> None:
        key, size = storage_key(memory), memory.nbytes()

        def gone(_: object) -> None:
            del self._there[key]
            self._now -= size

        if key not in self._there:
            self._there[key] = weakref.ref(memory, gone)
            self._now += size
