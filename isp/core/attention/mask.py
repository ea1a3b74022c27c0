"""`AttentionMask`, the keys each query sees by documents, order and windows; `Chosen` keys.

In causal masks the *last* query is aligned with the *last* key: query i of Sq sees key j of Sk if
j <= i + Sk - Sq. See [Note: Causal alignment] in docs/design/notes/attention.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from isp.core.comm import Channel, Pending, pinned_memory
from isp.core.comm.tag import Purpose, Tag

__all__ = ["AttentionMask", "Chosen", "seen_by"]


# eq=False: masks are keys of caches, by identity; hashing their tensors' values would be slow.
@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMask:
    """The keys that each query sees; made once for a micro-batch and passed to every block.

    The last query of a document is aligned with its last key [Note: Causal alignment].
    """

    causal: bool = True
    """A query sees only keys up to its own position."""
    window: int | None = None
    """Number of keys a query sees up to and including its own; None: all. Without `causal` it also
    sees `window` - 1 keys after its own."""
    cu_seqlens: Tensor | None = None
    """A 0, then the ends of the packed documents in the *full* sequence: int32 [documents + 1].

    With a batch above 1, positions count over all rows, so the ends of rows are among the entries
    and the last one is B * S. None: each row is one document. Keep it in host memory: reading it
    then does not wait for the device.
    """
    cu_seqlens_k: Tensor | None = None
    """A 0, then the ends of the documents' keys; None: as `cu_seqlens`. For batch 1 only."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention window={self.window} must be at least 1 token, or None")
        cu, of_keys = self.cu_seqlens, self.cu_seqlens_k
        if cu is not None and (cu.dtype != torch.int32 or cu.dim() != 1 or cu.numel() < 2):
            raise ValueError(
                f"cu_seqlens must be int32 of shape [documents + 1], got {cu.dtype} of shape"
                f" {list(cu.shape)}"
            )
        if of_keys is not None and (
            cu is None or (of_keys.dtype, of_keys.shape) != (cu.dtype, cu.shape)
        ):
            raise ValueError(
                f"cu_seqlens_k must have the dtype and shape of cu_seqlens, {_described(cu)}, got"
                f" {of_keys.dtype} of shape {list(of_keys.shape)}: give both an entry for each"
                f" document"
            )

    @classmethod
    def of_documents(
        cls,
        lengths: Sequence[int],
        key_lengths: Sequence[int] | None = None,
        *,
        causal: bool = True,
        window: int | None = None,
    ) -> AttentionMask:
        """Return the mask of packed documents with `lengths` tokens each.

        `key_lengths`: numbers of keys of the documents; None: as many keys as tokens.
        """
        ends, key_ends = (
            None
            if of is None
            else torch.tensor([0, *of], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for of in (lengths, key_lengths)
        )
        return cls(causal=causal, window=window, cu_seqlens=ends, cu_seqlens_k=key_ends)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """`cu_seqlens` as Python numbers; if it is on a device, the first read waits for it."""
        assert self.cu_seqlens is not None
        return tuple(self.cu_seqlens.tolist())

    @cached_property
    def key_bounds(self) -> tuple[int, ...]:
        """`cu_seqlens_k` as Python numbers, or `cu_seqlens` if it is None."""
        return self.bounds if self.cu_seqlens_k is None else tuple(self.cu_seqlens_k.tolist())

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each packed document."""
        return _between(self.bounds)

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        """Number of keys of each packed document."""
        return self.lengths if self.cu_seqlens_k is None else _between(self.key_bounds)

    @cached_property
    def max_lengths(self) -> tuple[int, int]:
        """Largest number of queries, and of keys, of any packed document."""
        return max(self.lengths), max(self.key_lengths)

    @cached_property
    def equal_length(self) -> int | None:
        """The number of tokens and keys of each packed document if all are equal, else None."""
        first, *others = {*self.lengths, *self.key_lengths}
        return None if others else first

    @cached_property
    def _on_device(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def cu_seqlens_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `cu_seqlens` and `cu_seqlens_k` on `device`; copied once, without a wait."""
        assert self.cu_seqlens is not None
        if device not in self._on_device:
            ends, of_keys = pinned_memory.send(self.cu_seqlens, device), self.cu_seqlens_k
            of_keys = ends if of_keys is None else pinned_memory.send(of_keys, device)
            self._on_device[device] = ends, of_keys
        return self._on_device[device]

    def check_covers(self, batch_size: int, query_length: int, key_length: int) -> None:
        """Raise ValueError if the packed documents do not fill B rows of queries and keys."""
        sizes = batch_size, query_length, key_length
        if self.cu_seqlens is None or sizes in self._covered:
            return
        # If `cu_seqlens` is on a device, the first check waits for it, because `bounds` reads it.
        if self.cu_seqlens_k is not None:
            if batch_size != 1:
                raise ValueError(
                    f"cu_seqlens_k needs a batch of one sequence, got {batch_size}: join the"
                    f" sequences into one"
                )
            _check_rises("cu_seqlens_k", self.key_bounds, batch_size, key_length)
        elif query_length != key_length:
            raise ValueError(
                f"packed documents with {query_length} queries and {key_length} keys need"
                f" cu_seqlens_k: pass it, or as many queries as keys"
            )
        _check_rises("cu_seqlens", self.bounds, batch_size, query_length)
        # Kernels get only documents: one that spanned two rows would mix their tokens.
        total = batch_size * query_length
        missing = set(range(0, total, query_length or 1)) - set(self.bounds)
        if missing:
            raise ValueError(
                f"a document cannot span two sequences of the batch: cu_seqlens"
                f" {_shorten(self.bounds)} lacks the end of row {min(missing)}"
            )
        self._covered.add(sizes)

    @cached_property
    def _covered(self) -> set[tuple[int, int, int]]:
        """The sizes for which `check_covers` has passed, so that it checks each only once.

        A check of 2,000 documents takes 0.4 ms.
        """
        return set()


def _between(bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Return the differences of neighboring bounds."""
    return tuple(b - a for a, b in pairwise(bounds))


def _check_rises(name: str, bounds: tuple[int, ...], batch_size: int, length: int) -> None:
    total = batch_size * length
    if bounds[0] != 0 or bounds[-1] != total or min(_between(bounds)) < 0:
        raise ValueError(
            f"{name} must rise from 0 to the {total} tokens of the full sequence"
            f" ({batch_size} x {length}), got {_shorten(bounds)}"
        )


def _described(x: Tensor | None) -> str:
    return "None" if x is None else f"{x.dtype} of shape {list(x.shape)}"


def _shorten(values: tuple[int, ...]) -> str:
    if len(values) <= 8:
        return str(list(values))
    return f"[{', '.join(map(str, values[:4]))}, ..., {', '.join(map(str, values[-3:]))}]"


class Chosen(NamedTuple):
    """The keys that sparse attention selects for each query; the mask may hide some of them.

    Keys are given by indices within the query's document. G is the number of KV heads or 1, n the
    number of indices for a query.
    """

    numbers: Tensor
    """Indices [B, S, G, n], int32; -1 and indices after the last key select nothing."""
    run: int = 1
    """Number of keys that one index selects: index i selects keys i * run to (i + 1) * run - 1."""

    def gathered(self, channel: Channel) -> Pending:
        """Launch the all-gather of all ranks' indices, [B, S/p, G, n] -> [B, S, G, n]."""
        return channel.all_gather(self.numbers, 1, tag=Tag(Purpose.HEADS, tensor="indices"))


def seen_by(numbers: Tensor, run: int, num_keys: int) -> Tensor:
    """Return the mask [G, 1, R, C] of the C keys that R queries' indices [R, G, n] select."""
    runs = -(-num_keys // run)
    # Indices without a key go to an extra column, which is cut off after the scatter.
    outside = (numbers < 0) | (numbers >= runs)
    places = numbers.masked_fill(outside, runs).long().transpose(0, 1)  # [G, R, n]
    seen = torch.zeros(*places.shape[:2], runs + 1, dtype=torch.bool, device=numbers.device)
    seen = seen.scatter_(-1, places, True)[..., :runs].repeat_interleave(run, -1)
    return seen[..., :num_keys].unsqueeze(1)
