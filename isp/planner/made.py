"""Bytes of the tensors that are made while something runs, on whatever device, meta among them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["Made"]


class Made(TorchDispatchMode):
    """Counts the memory of what operations in this context make, as long as it is there.

    Looked at after each operation; what one needs inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        """Bytes that were there at once."""
        self._there: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_id(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        new = [x for x in tree_iter(out) if isinstance(x, Tensor) and _id(x) not in given]
        self._there.update((_id(x), x.untyped_storage()) for x in new)
        if new:
            self.most = max(self.most, sum(memory.nbytes() for memory in self._there.values()))
        return out


def _id(x: Tensor) -> int:
    key: int = x.untyped_storage()._cdata
    return key
