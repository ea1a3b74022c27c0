"""Records of the calls of a forward, and of the outputs of blocks and tiled modules.

B batch, S sequence, D hidden size, E features of an output, N tokens, k experts of each token
"""

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
    """The kinds of calls that a forward reports, to be compared with the calls of the trace."""

    LINEAR = "linear"
    TABLE = "embedding"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    SCAN = "scan"
    EXPERTS = "experts"
    TILED = "tiled module"
    """A module that runs in tiles of tokens; the trace contains the calls inside of it."""
    BLOCK = "block"
    """A whole block; the trace contains the calls inside of it."""

    @property
    def mixes(self) -> bool:
        """True if a token's result depends on other tokens."""
        return self in (Kind.ATTENTION, Kind.CONVOLUTION, Kind.SCAN)


class AttentionSizes(NamedTuple):
    """The sizes and options of one call of attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    """Features of a head of q and k."""
    value_size: int
    """Features of a head of v and of the result."""
    window: int | None
    """The attention window in tokens; None: no window."""
    chunk: int | None
    """Tokens of the attention chunks that a document is cut into; None: no chunks."""
    causal: bool
    """True if a token attends only to tokens up to its own position."""
    chosen: int | None = None
    """The largest number of keys that an indexer chooses for a token; None: no indexer."""
    relative: bool = False
    """True if a bias by distance is added to the logits."""
    scale: float | None = None
    """The factor of the logits; None: 1 / sqrt(head_size)."""
    softcap: float | None = None
    """The bound of the logits, by tanh; None: no bound."""
    sinks: bool = False
    """True if each head has one more logit, without a value (an attention sink)."""

    @property
    def attention_kind(self) -> AttentionKind:
        """The options and sizes of the call that an implementation of attention is made for."""
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
        """Return about twice the number of (query, key) pairs in a causal document.

        `length`: tokens of the document. The number is doubled so that it is an integer.
        """
        # In a chunk of c tokens, query i sees min(i, r) keys, where r is the window or the number
        # of chosen keys: twice their sum is r^2 + 2 r (c - r) = r (2c - r), without the diagonal.
        whole, rest = divmod(length, self.chunk or length)
        reach = min(self.chunk or length, self.window or length, self.chosen or length)
        pairs = whole * reach * (2 * (self.chunk or length) - reach)
        return pairs + min(rest, reach) * (2 * rest - min(rest, reach))


class Ahead(NamedTuple):
    """A module that can be computed before the experts that it is called after.

    It gets the same tokens as the experts. See [Note: Computed ahead] in
    docs/design/notes/experts.md.
    """

    module: str
    dims: int
    """The number of dims of the module's input: 2 for [N, D], 3 for [B, S, D]."""


class Call(NamedTuple):
    """One call in a forward: of a linear, a table or experts, or a call that mixes tokens."""

    kind: Kind
    module: str
    """The name of the linear, table or experts; for a call that mixes tokens, that of its block."""
    block: str | None
    """The block that contains the call; None: outside of the blocks."""
    sizes: AttentionSizes | None = None
    """Number of heads, head size and options of a call of attention; None for other kinds."""
    route: int | None = None
    """For experts: the number of experts of each token; None: unknown, because the experts are not
    called as in transformers."""
    weighs: bool = False
    """For experts: True if the routing weights are among the arguments."""
    width: int = 0
    """For experts with a known `route`: the number of features of a token."""
    written: bool = False
    """For attention: True if the model's code writes into the result, in place."""
    flops: int = 0
    """For convolutions and scans: the FLOPs of a forward for one token."""
    given: int | None = None
    """For linears: a number that is equal for consecutive calls with the same input tensor."""
    ahead: Ahead | None = None
    """For experts: a module that is called later, but can already be computed when these are."""


def weights_among(given: Sequence[Any], numbers: Tensor) -> int | None:
    """Return the index of the routing weights in the arguments `given` of experts; None: not found.

    Routing weights have the shape of the expert indices `numbers` [N, k] and come after them.
    """
    # Skip the arguments 0 and 1, which are the tokens and the expert indices.
    for i, x in enumerate(given):
        if i > 1 and isinstance(x, Tensor) and x.is_floating_point() and x.shape == numbers.shape:
            return i
    return None


def same_rows(x: Tensor, tokens: Tensor) -> bool:
    """Return whether x [.., D], flattened to [N, D], has the same memory and strides as
    `tokens`."""
    rows = x.flatten(0, -2)
    same = memory_of(rows) == memory_of(tokens)
    place = (rows.shape, rows.stride(), rows.storage_offset())
    return same and place == (tokens.shape, tokens.stride(), tokens.storage_offset())


class BlockOutput(NamedTuple):
    """The structure of a block's output, such as a tuple, and where its hidden states are.

    Hidden states are tensors [B, S, ..]. `hidden_of` packs them as one tensor [B, S, D], which
    pipeline stages send, and `around` makes an output of it.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """The flattened output (`tree_flatten`), with None in place of each tensor."""
    sizes: dict[int, tuple[int, ...]]
    """By index of a hidden state in the flattened output, its sizes after [B, S]."""

    @property
    def width(self) -> int:
        """The number of features of a token in all hidden states."""
        return sum(map(math.prod, self.sizes.values()))

    @classmethod
    def of(cls, output: Any, rows: tuple[int, int]) -> BlockOutput | None:
        """Return the structure of `output`; None if it has no hidden state [B, S, ..].

        `rows`: (B, S).
        """
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
        """Return a block's output that contains the packed hidden states [B, S, D].

        Other tensors of the output become None.
        """
        leaves, start = list(self.leaves), 0
        for leaf, sizes in self.sizes.items():
            stop = start + math.prod(sizes)
            own = hidden if len(self.sizes) == 1 else hidden[..., start:stop]
            leaves[leaf] = own.unflatten(-1, sizes) if len(sizes) > 1 else own
            start = stop
        return tree_unflatten(leaves, self.spec)

    def hidden_of(self, output: Any) -> Tensor:
        """Return the hidden states of an output, packed as [B, S, D]."""
        leaves = tree_flatten(output)[0]
        found = [leaves[leaf].flatten(2) for leaf in self.sizes]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


class TokenOutput(NamedTuple):
    """The structure of a tiled module's output: a tensor, or a tuple or dict of tensors.

    Each tensor is [B, S, ..] or [B S, E]. `packed` makes one tensor [B, S, E] of them, so that
    tiles can be concatenated, and `unpacked` does the reverse.
    """

    spec: TreeSpec
    sizes: tuple[tuple[int, ...], ...]
    """The sizes of each tensor of the output after its token dims [B, S] or [B S]."""
    flat: tuple[bool, ...]
    """For each tensor, True if it is [B S, E], like the scores of a router; False if [B, S, ..]."""

    @classmethod
    def of(cls, output: Any, rows: tuple[int, int]) -> TokenOutput | None:
        """Return the structure of `output` for a batch of `rows` = (B, S).

        Returns None unless all leaves are floating-point tensors [B, S, ..] or [B S, E].
        """
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
        """Return the module's `output` for B = `rows`, packed as one tensor [B, S, E]."""
        leaves = zip(tree_flatten(output)[0], self.flat, strict=True)
        parts = [x.unflatten(0, (rows, -1)) if flat else x.flatten(2) for x, flat in leaves]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def unpacked(self, packed: Tensor, dtypes: Sequence[torch.dtype]) -> Any:
        """Return the module's output, with tensors of these dtypes, from `packed` [B, S, E]."""
        widths = [math.prod(size) for size in self.sizes]
        parts = [packed] if len(widths) == 1 else packed.split(widths, -1)
        leaves = [
            (x.flatten(0, 1) if flat else x if len(size) == 1 else x.unflatten(-1, size)).to(dtype)
            for x, flat, size, dtype in zip(parts, self.flat, self.sizes, dtypes, strict=True)
        ]
        return tree_unflatten(leaves, self.spec)


class ForwardEnd(Exception):
    """An exception that ends a forward early: at the head, or after a pipeline stage's last
    block."""

    def __init__(self, hidden: Tensor) -> None:
        """`hidden`: the result of the forward: the head's input, or hidden states [B, S, D]."""
        super().__init__()
        self.hidden = hidden
