"""`AttentionMask`, which says what each query sees, and the documents of a packed sequence.

[Note: Causal alignment]
Where query and key lengths differ, the *last* query is aligned with the *last* key, on every
backend: query i of Sq sees key j of Sk if j <= i + Sk - Sq. (flash-attn since 2.1 does so; torch's
`is_causal` aligns the first ones, so it is only used where the lengths are equal.)

    Sq = 2, Sk = 5          Sq = 5, Sk = 2          Sq = Sk = 5, window = 3
    1 1 1 1 .               . .                     1 . . . .
    1 1 1 1 1               . .                     1 1 . . .
                            . .                     1 1 1 . .
                            1 .                     . 1 1 1 .
                            1 1                     . . 1 1 1

A query that sees no key gives zeros, and no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["AttentionMask"]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMask:
    """The keys each query sees; made once a micro-batch, handed to every block.

    Aligned as the note [Causal alignment] draws it.
    """

    causal: bool = True
    """Whether a query sees only keys up to its own place."""
    window: int | None = None
    """Keys that a query sees up to and with its own, in tokens; without `causal` as many after."""
    cu_seqlens: Tensor | None = None
    """Ends of the packed documents in the *full* sequence, after a 0: int32 [documents + 1].

    With a batch above 1 the rows are counted one after another, so it ends with B * S and every
    end of a row is in it. None: every row is one document.
    """

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention window={self.window} must be at least 1 token, or None")
        cu = self.cu_seqlens
        if cu is not None and (cu.dtype != torch.int32 or cu.dim() != 1 or cu.numel() < 2):
            raise ValueError(
                f"cu_seqlens must be int32 of shape [documents + 1], got {cu.dtype} of shape"
                f" {list(cu.shape)}"
            )

    @classmethod
    def of_documents(
        cls, lengths: Sequence[int], *, causal: bool = True, window: int | None = None
    ) -> AttentionMask:
        """The mask of documents of these lengths, in tokens, packed one after another."""
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(causal=causal, window=window, cu_seqlens=ends)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """`cu_seqlens` on the host; the first use waits for the device if it is there."""
        assert self.cu_seqlens is not None
        return tuple(self.cu_seqlens.tolist())

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each packed document."""
        return tuple(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest packed document."""
        return max(self.lengths)

    @cached_property
    def _on_device(self) -> dict[torch.device, Tensor]:
        return {}

    def cu_seqlens_on(self, device: torch.device) -> Tensor:
        """`cu_seqlens` on `device`, copied there once."""
        assert self.cu_seqlens is not None
        if device not in self._on_device:
            self._on_device[device] = self.cu_seqlens.to(device)
        return self._on_device[device]

    def check_covers(self, batch_size: int, query_length: int, key_length: int) -> None:
        """Raise ValueError if the packed documents are not those of [B, S] queries and keys."""
        if self.cu_seqlens is None:
            return
        if query_length != key_length:
            raise ValueError(
                f"packed documents need as many queries as keys, got {query_length} and"
                f" {key_length}"
            )
        total = batch_size * query_length
        if self.bounds[0] != 0 or self.bounds[-1] != total or min(self.lengths) < 0:
            raise ValueError(
                f"cu_seqlens must rise from 0 to the {total} tokens of the full sequence"
                f" ({batch_size} x {query_length}), got {_shorten(self.bounds)}"
            )
        missing = set(range(0, total, query_length or 1)) - set(self.bounds)
        if missing:
            raise ValueError(
                f"a document cannot go on from one row of the batch to the next: cu_seqlens"
                f" {_shorten(self.bounds)} lacks the end of row {min(missing)}"
            )


def _shorten(values: tuple[int, ...]) -> str:
    if len(values) <= 8:
        return str(list(values))
    return f"[{', '.join(map(str, values[:4]))}, ..., {', '.join(map(str, values[-3:]))}]"
