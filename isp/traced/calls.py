"""The calls of a forward that isp follows."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from isp.mixers.recurrence import StateSizes

__all__ = ["AttentionSizes", "BlockOutput", "Call", "ForwardEnd", "Kind"]


class Kind(StrEnum):
    """The kinds of calls that are followed."""

    LINEAR = "linear"
    TABLE = "embedding"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    SCAN = "scan"
    EXPERTS = "experts"
    BLOCK = "block"
    """A whole block; a trace has its calls instead."""

    @property
    def mixes(self) -> bool:
        """Whether a token's result depends on other tokens."""
        return self in (Kind.ATTENTION, Kind.CONVOLUTION, Kind.SCAN)


class AttentionSizes(NamedTuple):
    """The sizes of one attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    """Of q and k."""
    value_size: int
    """Of v, and of the result."""
    window: int | None
    """In tokens; None: none."""
    chunk: int | None
    """Tokens of the chunks that a document is cut into; None: it is not."""
    causal: bool
    """Whether a token sees only those up to its own place."""
    chosen: int | None = None
    """Keys that a token attends to at most, of those that it sees; None: all."""
    relative: bool = False
    """Whether there is a bias by distance."""
    index_size: int = 0
    """Of the keys by which it chooses; 0: it does not, or sees what an earlier one chose."""

    def pairs(self, length: int) -> int:
        """Twice the pairs of a query and a key that it sees in a causal document, about."""
        whole, rest = divmod(length, self.chunk or length)
        reach = min(self.chunk or length, self.window or length, self.chosen or length)
        pairs = whole * reach * (2 * (self.chunk or length) - reach)
        return pairs + min(rest, reach) * (2 * rest - min(rest, reach))

    def kept(self, tokens: int) -> int:
        """Tokens of so many whose keys a later one may see."""
        return min(tokens, self.window or tokens, self.chunk or tokens)


class Call(NamedTuple):
    """One call in a forward."""

    kind: Kind
    module: str
    """The linear, table or experts that are called; of what mixes tokens, the block it lies in."""
    block: str | None
    """The block that the call lies in; None: outside the blocks."""
    sizes: AttentionSizes | None = None
    """Of attention."""
    route: int | None = None
    """To how many of the experts a token goes; None: the call does not tell."""
    written: bool = False
    """Whether the model writes into the result, of attention."""
    flops: int = 0
    """Of a convolution or scan, for a token, forward."""
    state: StateSizes | None = None
    """Of a convolution or scan."""


class BlockOutput(NamedTuple):
    """The form of what a block gives: a hidden state [B, S, D], alone or in a tuple."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """Those that are no tensors; None for tensors."""
    hidden: int
    """Which leaf is the hidden state."""
    num_tensors: int
    width: int
    """D."""

    @classmethod
    def of(cls, output: Any) -> BlockOutput | None:
        """That of `output`; None if there is no hidden state."""
        found, spec = tree_flatten(output)
        tensors = [i for i, leaf in enumerate(found) if isinstance(leaf, Tensor)]
        hidden = [i for i in tensors if found[i].dim() == 3 and found[i].is_floating_point()]
        if not hidden:
            return None
        others = tuple(None if i in tensors else leaf for i, leaf in enumerate(found))
        return cls(spec, others, hidden[0], len(tensors), found[hidden[0]].shape[-1])

    def around(self, hidden: Tensor) -> Any:
        """What a block gives with this hidden state, and None for its other tensors."""
        leaves = list(self.leaves)
        leaves[self.hidden] = hidden
        return tree_unflatten(leaves, self.spec)

    def hidden_of(self, output: Any) -> Tensor:
        """The hidden state in what a block gave."""
        hidden: Tensor = tree_flatten(output)[0][self.hidden]
        return hidden


class ForwardEnd(Exception):
    """A forward has come to where it ends: to the head, or behind the last block of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden
