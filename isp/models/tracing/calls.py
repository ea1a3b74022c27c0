"""The calls of a forward that isp follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isp.core.attention.kinds import AttentionKind
from isp.core.tensors import memory_of
from isp.core.torch_private import TreeSpec, tree_flatten, tree_unflatten

__all__ = [
    "Ahead",
    "AttentionSizes",
    "BlockOutput",
    "Call",
    "ForwardEnd",
    "Kind",
    "TokenOutput",
    "same_rows",
    "weights_among",
]


class Kind(StrEnum):
    """The kinds of calls that are followed."""

    LINEAR = "linear"
    TABLE = "embedding"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    SCAN = "scan"
    EXPERTS = "experts"
    TILED = "tiled module"
    """A module in tiles of tokens; a trace has its calls instead."""
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
    scale: float | None = None
    """The factor of the logits; None: 1 / sqrt(d)."""
    softcap: float | None = None
    """The bound of the logits, by tanh; None: no bound."""
    sinks: bool = False
    """Whether each head has a further logit, without a value."""

    @property
    def attention_kind(self) -> AttentionKind:
        """The kind of attention to make for these calls."""
        return AttentionKind(
            self.scale,
            self.softcap,
            self.sinks,
            self.chosen is not None,
            self.relative,
            self.head_size,
            self.num_heads // self.num_kv_heads,
        )

    def pairs(self, length: int) -> int:
        """About twice the number of pairs of a query and a key it sees, in a causal document."""
        whole, rest = divmod(length, self.chunk or length)
        reach = min(self.chunk or length, self.window or length, self.chosen or length)
        pairs = whole * reach * (2 * (self.chunk or length) - reach)
        return pairs + min(rest, reach) * (2 * rest - min(rest, reach))


class Ahead(NamedTuple):
    """A module that is called behind experts, with their tokens [Note: Computed ahead]."""

    module: str
    dims: int
    """Of what it is called with."""


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
    """The number of experts that a token goes to; None: the call does not show it."""
    weighs: bool = False
    """Whether experts are called with routing weights, too."""
    width: int = 0
    """Of experts whose `route` is known: features of a token."""
    written: bool = False
    """Whether the model writes into the result, of attention."""
    flops: int = 0
    """Of a convolution or scan, for a token, forward."""
    given: int | None = None
    """Of a linear: the number of the tensor that it was called with."""
    ahead: Ahead | None = None
    """Of experts: what may be computed where they are called, ahead of its own call."""


def weights_among(given: Sequence[Any], numbers: Tensor) -> int | None:
    """The index of the weights of experts `numbers` [N, k] in what experts are called with."""
    for i, x in enumerate(given):
        if i > 1 and isinstance(x, Tensor) and x.is_floating_point() and x.shape == numbers.shape:
            return i
    return None


def same_rows(x: Tensor, tokens: Tensor) -> bool:
    """Whether x [.., D] is `tokens` [N, D], in the same memory."""
    rows = x.flatten(0, -2)
    same = memory_of(rows) == memory_of(tokens)
    place = (rows.shape, rows.stride(), rows.storage_offset())
    return same and place == (tokens.shape, tokens.stride(), tokens.storage_offset())


class BlockOutput(NamedTuple):
    """The form of what a block gives: hidden states [B, S, ..] in a tree, which travel as one."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """Those that are no tensors; None for tensors."""
    sizes: dict[int, tuple[int, ...]]
    """By leaf that is a hidden state, its sizes behind [B, S]."""

    @property
    def width(self) -> int:
        """Features of a token in all hidden states."""
        return sum(map(math.prod, self.sizes.values()))

    @classmethod
    def of(cls, output: Any, rows: tuple[int, int]) -> BlockOutput | None:
        """That of `output`; None if none of it is a hidden state of `rows`, [B, S]."""
        found, spec = tree_flatten(output)
        tensors = {i: leaf for i, leaf in enumerate(found) if isinstance(leaf, Tensor)}
        sizes = {
            i: tuple(leaf.shape[2:])
            for i, leaf in tensors.items()
            if leaf.shape[:2] == rows and leaf.dim() > 2 and leaf.is_floating_point()
        }
        others = tuple(None if i in tensors else leaf for i, leaf in enumerate(found))
        return cls(spec, others, sizes) if sizes else None

    def around(self, hidden: Tensor) -> Any:
        """What a block gives with these hidden states, [B, S, D], and None for other tensors."""
        leaves, start = list(self.leaves), 0
        for leaf, sizes in self.sizes.items():
            stop = start + math.prod(sizes)
            own = hidden if len(self.sizes) == 1 else hidden[..., start:stop]
            leaves[leaf] = own.unflatten(-1, sizes) if len(sizes) > 1 else own
            start = stop
        return tree_unflatten(leaves, self.spec)

    def hidden_of(self, output: Any) -> Tensor:
        """The hidden states in what a block gave, [B, S, D]."""
        leaves = tree_flatten(output)[0]
        found = [leaves[leaf].flatten(2) for leaf in self.sizes]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


class TokenOutput(NamedTuple):
    """The form of what a module gives for its tokens: tensors in a tree, packed as one."""

    spec: TreeSpec
    sizes: tuple[tuple[int, ...], ...]
    """Sizes of each tensor after its tokens."""
    flat: tuple[bool, ...]
    """Whether each tensor is [B S, E], as the scores of a router are, or [B, S, ..]."""

    @classmethod
    def of(cls, output: Any, rows: tuple[int, int]) -> TokenOutput | None:
        """The form of `output`, given for `rows` [B, S]; None if not all of it is of tokens."""
        leaves, spec = tree_flatten(output)
        if not leaves or not all(isinstance(x, Tensor) and x.is_floating_point() for x in leaves):
            return None
        flat = tuple(x.dim() == 2 for x in leaves)
        tokens = ([math.prod(rows)] if x.dim() == 2 else [*rows] for x in leaves)
        if not all([*x.shape[: len(of)]] == of for x, of in zip(leaves, tokens, strict=True)):
            return None
        sizes = tuple(
            tuple(x.shape[1 if one else 2 :]) for x, one in zip(leaves, flat, strict=True)
        )
        return cls(spec, sizes, flat) if all(sizes) else None

    def packed(self, output: Any, rows: int) -> Tensor:
        """Pack what the module gave for B = `rows` as [B, S, E]."""
        leaves = zip(tree_flatten(output)[0], self.flat, strict=True)
        parts = [x.unflatten(0, (rows, -1)) if flat else x.flatten(2) for x, flat in leaves]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def unpacked(self, packed: Tensor, dtypes: Sequence[torch.dtype]) -> Any:
        """Return what the module gives, with tensors of these dtypes, of [B, S, E]."""
        widths = [math.prod(size) for size in self.sizes]
        parts = [packed] if len(widths) == 1 else packed.split(widths, -1)
        leaves = [
            (x.flatten(0, 1) if flat else x if len(size) == 1 else x.unflatten(-1, size)).to(dtype)
            for x, flat, size, dtype in zip(parts, self.flat, self.sizes, dtypes, strict=True)
        ]
        return tree_unflatten(leaves, self.spec)


class ForwardEnd(Exception):
    """A forward has come to where it ends: to the head, or behind the last block of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden
