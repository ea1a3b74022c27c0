"""The head of a traced model: the linear whose output alone the logits are made of.

What the model does to logits behind it (a soft cap, a scale) is the model's own code, which runs
again for a chunk of tokens: with all that lies before the head left out, and what the head gives
put in its place. That is right where the logits are made of what the head gives and of constants.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["HeadFinder"]


class HeadFinder(TorchFunctionMode):
    """Follows what is made of the output of the last linear that was called."""

    def __init__(self) -> None:
        super().__init__()
        self._linear = ""
        self._made: dict[int, Tensor] = {}
        """What was made of its output."""
        self._mixed = False
        """Whether something else went into it."""
        self.used = False
        """Whether anything was done with it."""
        self._odd_blocks: set[str] = set()

    def called(self, name: str, output: Tensor) -> None:
        """A linear has given `output`."""
        self._linear, self._made, self._mixed = name, {id(output): output}, False
        self.used = False

    def passed(self, block: str, given: tuple[Any, ...], output: Any) -> None:
        """A block has given `output`; left out, it gives what it is given first."""
        alike = given and isinstance(given[0], Tensor) and isinstance(output, Tensor)
        if not alike or given[0].shape != output.shape:
            self._odd_blocks.add(block)

    def head(self, logits: Tensor, blocks: tuple[str, ...]) -> str | None:
        """The name of the head, if `logits` are made of its output alone."""
        fits = id(logits) in self._made and not self._mixed
        return self._linear if fits and self._odd_blocks.isdisjoint(blocks) else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(id(x) in self._made for x in given):
            self.used = True
            constant = (x.dim() == 0 and not isinstance(x, nn.Parameter) for x in given)
            self._mixed |= not all(
                id(x) in self._made or c for x, c in zip(given, constant, strict=True)
            )
            self._made |= {id(x): x for x in tree_leaves(out) if isinstance(x, Tensor)}
        return out
