"""`LinearOutputs`: what a model's code does with the outputs of its linears.

B batch, S sequence, O out features
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isp.core.tensors import memory_of, tensors_in

__all__ = ["LinearOutputs"]


class LinearOutputs(TorchFunctionMode):
    """Follows which parts of outputs [B, S, O] become tensors, and what the last one becomes.

    A part is taken from the output as it is, by a split, a chunk or a slice; or by one number, as
    `unbind` does, from dims that O was cut into. What is done to the parts is not looked at.

    The head is the linear whose output alone the logits are made of. What the model does to logits
    behind it (a soft cap, a scale) is the model's own code, which runs again for a chunk of tokens,
    without what lies before the head. That is right if the logits are made of what the head gives
    and of constants.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outputs: dict[int, tuple[str, Tensor]] = {}
        """Linears and what they gave, by storage, which is kept from being used again."""
        self._parts: dict[str, set[tuple[int, int]]] = {}
        """(start, length) of features."""
        self._linear = ""
        """The last that was called."""
        self._made: dict[int, Tensor] = {}
        """What was made of its output."""
        self._mixed = False
        """Whether something else went into it."""
        self.used = False
        """Whether anything was done with it."""
        self._odd_blocks: set[str] = set()

    def called(self, name: str, output: Tensor) -> None:
        """A linear has given `output`."""
        self._outputs[memory_of(output)] = name, output
        self._linear, self._made, self._mixed = name, {id(output): output}, False
        self.used = False  # last: reading the output's storage above counts as a use

    def passed(self, block: str, given: tuple[Any, ...], output: Any) -> None:
        """A block has given `output`; left out, it gives what it is given first."""
        alike = given and isinstance(given[0], Tensor) and isinstance(output, Tensor)
        if not alike or given[0].shape != output.shape:
            self._odd_blocks.add(block)

    def head(self, logits: Tensor, blocks: tuple[str, ...]) -> str | None:
        """The name of the head, if `logits` are made of its output alone."""
        fits = id(logits) in self._made and not self._mixed
        return self._linear if fits and self._odd_blocks.isdisjoint(blocks) else None

    def splits(self) -> dict[str, tuple[int, ...]]:
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
        given = tensors_in(args, kwargs)
        made = tensors_in(out)
        if any(id(x) in self._made for x in given):
            self.used = True
            others = [x for x in given if id(x) not in self._made]
            self._mixed |= any(x.dim() > 0 or isinstance(x, nn.Parameter) for x in others)
            self._made |= {id(x): x for x in made}
        parent = args[0] if args and made else None
        if isinstance(parent, Tensor):
            key = memory_of(parent)
            name, output = self._outputs.get(key, ("", parent))
            for x in made if name else ():
                if memory_of(x) == key:
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
