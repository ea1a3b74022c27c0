"""`LinearOutputs`: a mode that follows what a model's code does with the outputs of its linears.

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
    """A mode that notes how outputs of linears [B, S, O] are split, and what the last one becomes.

    A part is taken directly from the output, by a split, a chunk or a slice; or by an index, as
    `unbind` does, after O was divided into several dims. The further use of parts does not matter.

    The head is the linear from whose output alone the logits are made. The model's own code after
    it (a soft cap, a scale) runs again for each loss chunk of tokens, without what comes before the
    head. That is right if the logits are made from the head's output and constants.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outputs: dict[int, tuple[str, Tensor]] = {}
        """By storage, the name and output of a linear; kept, so that no storage is used again."""
        self._parts: dict[str, set[tuple[int, int]]] = {}
        """By linear, the (start, length) of parts of its out features."""
        self._linear = ""
        """The linear that was called last."""
        self._made: dict[int, Tensor] = {}
        """By id, the last linear's output and the tensors made from it; kept, as ids are reused."""
        self._mixed = False
        """True if these were made from other tensors, too."""
        self.used = False
        """True if any operation read these."""
        self._odd_blocks: set[str] = set()
        """Blocks that cannot be left out: their output has another form than their first input."""

    def called(self, name: str, output: Tensor) -> None:
        """Note that a linear has returned `output`."""
        self._outputs[memory_of(output)] = name, output
        self._linear, self._made, self._mixed = name, {id(output): output}, False
        self.used = False  # last: reading the output's storage above counts as a use

    def passed(self, block: str, given: tuple[Any, ...], output: Any) -> None:
        """Note a block that cannot be left out: it would return its first argument instead."""
        alike = given and isinstance(given[0], Tensor) and isinstance(output, Tensor)
        if not alike or given[0].shape != output.shape:
            self._odd_blocks.add(block)

    def head(self, logits: Tensor, blocks: tuple[str, ...]) -> str | None:
        """Return the name of the head, if `logits` are made from its output alone; else None.

        None also if one of `blocks` cannot be left out, so that the code after the head cannot run
        without them.
        """
        fits = id(logits) in self._made and not self._mixed
        return self._linear if fits and self._odd_blocks.isdisjoint(blocks) else None

    def splits(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the parts of each linear whose output is split without gaps."""
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
            # Scalars may take part. Larger tensors may depend on tokens, parameters need gradients.
            self._mixed |= any(x.dim() > 0 or isinstance(x, nn.Parameter) for x in others)
            self._made |= {id(x): x for x in made}
        parent = args[0] if args and made else None
        if isinstance(parent, Tensor):
            key = memory_of(parent)
            name, output = self._outputs.get(key, ("", parent))
            for x in made if name else ():
                if memory_of(x) == key:  # a view of the output
                    self._note(name, output, parent, x)
        return out

    def _note(self, name: str, output: Tensor, parent: Tensor, x: Tensor) -> None:
        """Note the part of a linear's `output` that `x` is, a view of its view `parent`."""
        width = output.shape[-1]
        as_it_is = parent.dim() <= output.dim() and parent.shape[-1] == width
        # Dims of x within the features of a token: those with a stride below their number.
        dims = sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if s < width)
        whole = parent.numel() == output.numel()
        # A part of a part is not noted, nor a view that only reshapes.
        if not whole or x.numel() == output.numel() or not (as_it_is or x.dim() < parent.dim()):
            return
        dense = all(s == math.prod(n for _, n in dims[:i]) for i, (s, _) in enumerate(dims))
        if dense and dims:  # contiguous features
            start = int(x.storage_offset() - output.storage_offset()) % width
            length = math.prod(n for _, n in dims)
            if length < width:
                self._parts.setdefault(name, set()).add((start, length))
