"""`MicroBatch`: the input of one forward.

Shapes: B rows (`micro_bsz`), S tokens of a row (`seq_len`), n documents of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isp.core.comm import pinned_memory

__all__ = ["MicroBatch", "document_bounds"]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The input of one forward; if packed, rows are joined to one, which `cu_seqlens` cuts."""

    tokens: Tensor
    """Token ids, int64 [1, B * S] if packed, else [B, S]."""

    labels: Tensor
    """The token to predict at each place, or -100 for none; shape and dtype as `tokens`."""

    positions: Tensor
    """Positions for rotary embeddings, shaped like `tokens`; they restart at 0 in each packed
    document."""

    cu_seqlens: Tensor | None
    """int32 [n + 1]: where each of the n packed documents begins, and at the end B * S, counted in
    the tokens of all B rows, one row after another. None: not packed.

    In host memory, whatever the device of the other tensors is.
    """

    padding: tuple[int, ...] = ()
    """Number of padding tokens at the end of each of the B rows; empty: none, or not known."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not padding."""
        return self.tokens.numel() - sum(self.padding)

    @property
    def document_lengths(self) -> list[int]:
        """Number of tokens of each document, or of each row if not packed; without padding."""
        num_rows = len(self.padding) or self.tokens.shape[0]
        row_length = self.tokens.numel() // num_rows
        padding = self.padding or (0,) * num_rows
        if self.cu_seqlens is None:
            return [row_length - of_row for of_row in padding]
        # `cu_seqlens` counts the padding of a row like one more document: leave it out.
        padding_starts = {(row + 1) * row_length - size for row, size in enumerate(padding) if size}
        starts, lengths = self.cu_seqlens[:-1].tolist(), self.cu_seqlens.diff().tolist()
        pieces = zip(starts, lengths, strict=True)
        return [length for start, length in pieces if start not in padding_starts]

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with its tensors on `device`, except `cu_seqlens`."""
        rows = (self.tokens, self.labels, self.positions)
        tokens, labels, positions = (pinned_memory.send(x, device) for x in rows)
        return MicroBatch(tokens, labels, positions, self.cu_seqlens, self.padding)


def document_bounds(starts: Tensor) -> Tensor:
    """Return int32 `cu_seqlens` [n + 1] for documents that begin where `starts` [B * S] is True."""
    begins = starts.nonzero().squeeze(-1)
    return torch.cat((begins, torch.tensor([len(starts)]))).to(torch.int32)
