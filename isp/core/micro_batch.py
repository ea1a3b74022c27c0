"""`MicroBatch`: the input of one forward.

Shapes: B `micro_bsz`, S `seq_len`, n documents of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isp.core.comm import pinned_memory

__all__ = ["MicroBatch", "document_bounds"]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The input of one forward. Packed: rows are joined to one, and `cu_seqlens` cuts it."""

    tokens: Tensor
    """int64 [1, B * S] packed, else [B, S]."""

    labels: Tensor
    """As `tokens`: the token to predict, or -100 where there is none."""

    positions: Tensor
    """As `tokens`: for rotary embeddings, restarting in each document's piece when packed."""

    cu_seqlens: Tensor | None
    """int32 [n + 1], packed only: where each document's piece begins in the row; last: B * S.

    In host memory, on whatever device the others are.
    """

    padding: tuple[int, ...] = ()
    """Padding tokens at the end of each of the B rows; empty where none is known of."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return self.tokens.numel() - sum(self.padding)

    @property
    def document_lengths(self) -> list[int]:
        """Length in tokens of each document's piece, or of each row if not packed; no padding."""
        num_rows = len(self.padding) or self.tokens.shape[0]
        row_length = self.tokens.numel() // num_rows
        padding = self.padding or (0,) * num_rows
        if self.cu_seqlens is None:
            return [row_length - of_row for of_row in padding]
        # Where a row's padding begins, a piece begins that is no document.
        ends = {(row + 1) * row_length - size for row, size in enumerate(padding) if size}
        starts, lengths = self.cu_seqlens[:-1].tolist(), self.cu_seqlens.diff().tolist()
        pieces = zip(starts, lengths, strict=True)
        return [length for start, length in pieces if start not in ends]

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on another device."""
        rows = (self.tokens, self.labels, self.positions)
        tokens, labels, positions = (pinned_memory.send(x, device) for x in rows)
        return MicroBatch(tokens, labels, positions, self.cu_seqlens, self.padding)


def document_bounds(starts: Tensor) -> Tensor:
    """`cu_seqlens` [n + 1], int32, of n documents that begin where `starts` [tokens] is true."""
    begins = starts.nonzero().squeeze(-1)
    return torch.cat((begins, torch.tensor([len(starts)]))).to(torch.int32)
