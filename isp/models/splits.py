"""`SplitFinder`: into which parts a model's code splits what its linears give.

B batch, S sequence, O out features
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["SplitFinder"]


class SplitFinder(TorchFunctionMode):
    """Watches which features of the output [B, S, O] of a linear become tensors of their own.

    A part is taken from the output as it is, by a split, a chunk or a slice; or by one number, as
    `unbind` does, from dims that O was cut into. What is done to the parts is not looked at.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outputs: dict[int, tuple[str, Tensor]] = {}
        """Linears and what they gave, by storage, which is kept from being used again."""
        self._parts: dict[str, set[tuple[int, int]]] = {}
        """(start, length) of features."""

    def called(self, name: str, output: Tensor) -> None:
        """A linear has given `output`."""
        self._outputs[output.untyped_storage()._cdata] = name, output

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of the parts, one behind the other, of each linear that is split as a whole."""
        found = {}
        for name, output in self._outputs.values():
            parts = sorted(self._parts.get(name, ()))
            ends = [0, *accumulate(length for _, length in parts)]
            if [*(start for start, _ in parts), output.shape[-1]] == ends:
                found[name] = tuple(length for _, length in parts)
        return found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        parent = args[0] if args else None
        if isinstance(parent, Tensor) and not isinstance(out, int | bool):
            key = parent.untyped_storage()._cdata
            name, output = self._outputs.get(key, ("", parent))
            for x in tree_leaves(out) if name else ():
                if isinstance(x, Tensor) and x.untyped_storage()._cdata == key:
                    self._note(name, output, parent, x)
        return out

    def _note(self, name: str, output: Tensor, parent: Tensor, x: Tensor) -> None:
        """`x` is a view of a view, `parent`, of an output."""
        width = output.shape[-1]
        as_it_is = parent.dim() <= output.dim() and parent.shape[-1] == width
        dims = sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if s < width)
        whole = parent.numel() == output.numel()
        if not whole or x.numel() == output.numel() or not (as_it_is or x.dim() < parent.dim()):
            return
        dense = all(s == math.prod(n for _, n in dims[:i]) for i, (s, _) in enumerate(dims))
        if dense and dims:
            start = int(x.storage_offset() - output.storage_offset()) % width
            length = math.prod(n for _, n in dims)
            if length < width:
                self._parts.setdefault(name, set()).add((start, length))
