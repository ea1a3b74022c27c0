"""`LinearOutputs`: follow what a model's code does with the outputs of its linears.

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
    """A mode that records how linears' outputs are split, and what is made from the last output.

    A part of an output [B, S, O] is taken directly by a split, a chunk or a slice; or by an index,
    as `unbind` does, after O was divided into several dims. What the code does with a part later
    does not matter.

    The head is the linear from whose output alone the logits are made. The loss runs the model's
    code after the head (a soft cap, a scale) again for each loss chunk, without the code before the
    head. That is right only if the logits are made from the head's output and constants.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outputs: dict[int, tuple[str, Tensor]] = {}
        """By storage, the name of a linear and its output, which is kept so that no other tensor
        gets its storage."""
        self._parts: dict[str, set[tuple[int, int]]] = {}
        """By linear, (start, length) of each range of out features that the model's code takes."""
        self._linear = ""
        """The linear that was called last."""
        self._made: dict[int, Tensor] = {}
        """By id, the last linear's output and all tensors made from it, which are kept so that no
        other tensor gets their ids."""
        self._mixed = False
        """True if a tensor of `_made` was also made from tensors that are not in it."""
        self.used = False
        """True if any operation read a tensor of `_made`."""
        self._odd_blocks: set[str] = set()
        """The blocks that a forward cannot leave out by returning their first argument, because
        their output has another shape."""

    def linear_returned(self, name: str, output: Tensor) -> None:
        """Record that the linear `name` has returned `output`."""
        self._outputs[memory_of(output)] = name, output
        self._linear, self._made, self._mixed = name, {id(output): output}, False
        # Set this last, because `memory_of` above counts as an operation that uses the output.
        self.used = False

    def block_returned(self, block: str, given: tuple[Any, ...], output: Any) -> None:
        """Record whether a block's `output` is one tensor with the shape of its first argument."""
        tensors = given and isinstance(given[0], Tensor) and isinstance(output, Tensor)
        if not tensors or given[0].shape != output.shape:
            self._odd_blocks.add(block)

    def head(self, logits: Tensor, blocks: tuple[str, ...]) -> str | None:
        """Return the name of the head, if `logits` are made from its output alone; else None.

        None also if one of `blocks` cannot be left out, because then the code after the head cannot
        run alone.
        """
        fits = id(logits) in self._made and not self._mixed
        return self._linear if fits and self._odd_blocks.isdisjoint(blocks) else None

    def splits(self) -> dict[str, tuple[int, ...]]:
        """Return by linear the sizes of the parts of its output, if they cover it without gaps."""
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
            # A constant may take part if it is a scalar: a larger tensor may depend on tokens, and
            # a parameter needs a gradient.
            self._mixed |= any(x.dim() > 0 or isinstance(x, nn.Parameter) for x in others)
            self._made |= {id(x): x for x in made}
        parent = args[0] if args and made else None
        if isinstance(parent, Tensor):
            key = memory_of(parent)
            name, output = self._outputs.get(key, ("", parent))
            for x in made if name else ():
                if memory_of(x) == key:
                    # x is a view of the linear's output.
                    self._note(name, output, parent, x)
        return out

    def _note(self, name: str, output: Tensor, parent: Tensor, x: Tensor) -> None:
        """Record which part of a linear's `output` the tensor x is.

        x is a view of `parent`, and `parent` is the output or a view of it.
        """
        width = output.shape[-1]
        as_it_is = parent.dim() <= output.dim() and parent.shape[-1] == width
        # The dims of x within the features of a token are those with strides below O.
        dims = sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if s < width)
        whole = parent.numel() == output.numel()
        # Ignore a part of a part, and a view that only reshapes.
        if not whole or x.numel() == output.numel() or not (as_it_is or x.dim() < parent.dim()):
            return
        # `dense` is True if each stride is the product of the smaller dims, so that the features
        # are contiguous.
        dense = all(s == math.prod(n for _, n in dims[:i]) for i, (s, _) in enumerate(dims))
        if dense and dims:
            start = int(x.storage_offset() - output.storage_offset()) % width
            length = math.prod(n for _, n in dims)
            if length < width:
                self._parts.setdefault(name, set()).add((start, length))
