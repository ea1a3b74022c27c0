"""`SequenceRanks`: which tokens each rank of a sequence has, and how it attends to all of them.

p ranks = h of each head group x c of each context group; S tokens of a row

Each rank has S/p tokens of every row. In attention the ranks of a head group exchange tokens for
heads, so that each has some heads of S/c tokens, chosen by a `SequenceSplit`. The ranks of a
context group have the same heads, and exchange the keys and values that their queries attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from isp.core.attention.context_parallel.attention import ContextAttention
from isp.core.attention.local import LocalAttention
from isp.core.attention.ulysses import DistributedAttention
from isp.core.comm import Channel, Mesh, pinned_memory
from isp.core.mesh import Axis
from isp.core.mesh.config import ContextExchange, SequenceScan
from isp.core.mesh.sequence_split import NO_WINDOWS, SequenceSplit, Windows

__all__ = ["SequenceRanks"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceRanks:
    """The p ranks that share a sequence, as h head ranks x c context ranks (p = h c).

    With c = 1, each rank attends with its heads to all tokens of a row.
    """

    head: Channel
    """Channel of this rank's head group, whose ranks exchange tokens for heads."""
    context: Channel
    """Channel of this rank's context group, whose ranks have the same heads of other tokens."""
    windows: Windows = NO_WINDOWS
    """Attention windows of all layers: tokens are split so that the ranks have about the same
    attention FLOPs in these layers together."""
    head_first: bool = True
    """True if ranks of a head group are neighbors, False if ranks of a context group are."""
    exchange: ContextExchange = ContextExchange.GATHER
    """The way in which context ranks exchange keys and values."""
    scan: SequenceScan = SequenceScan.AUTO
    """The way in which the p ranks compute a scan."""

    @classmethod
    def of(
        cls, mesh: Mesh, windows: Windows, *, exchange: ContextExchange, scan: SequenceScan
    ) -> SequenceRanks:
        """Return the head and context ranks of `mesh`, for a model with these attention windows."""
        return cls(
            head=mesh[Axis.HEAD],
            context=mesh[Axis.CONTEXT],
            windows=windows or NO_WINDOWS,
            head_first=mesh.topology.head_first,
            exchange=exchange,
            scan=scan,
        )

    @classmethod
    def by_heads(cls, tensor: Channel) -> SequenceRanks:
        """Return all ranks of the channel `tensor` as one head group, without context ranks."""
        return cls(head=tensor, context=Channel.solo(Axis.CONTEXT.value))

    def attention(self, local: LocalAttention, *, may_ring: bool = True) -> DistributedAttention:
        """Return attention to all tokens by `local`, in a ring if configured and `may_ring`."""
        if self.context.size > 1:
            ring = may_ring and self.exchange is ContextExchange.RING
            local = ContextAttention(local, self.context, self.windows, ring=ring)
        return DistributedAttention(local, self.head)

    def split(self, lengths: tuple[int, ...]) -> SequenceSplit:
        """Return the split of a row of documents of these lengths over the context ranks."""
        return SequenceSplit.of(lengths, self.context.size, self.windows)

    def arranged(self, rows: Sequence[Tensor], cu_seqlens: Tensor | None) -> list[Tensor]:
        """Reorder the tokens of tensors [B, S, ..] so that rank 0's come first, then rank 1's.

        With `cu_seqlens`, rows are joined to [1, B S, ..]: each row has other documents and would
        need an order of its own.
        """
        if self.context.size == 1:
            return list(rows)
        order = pinned_memory.send(self.order(self.lengths(rows[0], cu_seqlens)), rows[0].device)
        if cu_seqlens is not None:
            rows = [x.flatten(0, 1).unsqueeze(0) for x in rows]
        return [x.index_select(1, order) for x in rows]

    def lengths(self, rows: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
        """Return the lengths of the documents that one split covers.

        These are all packed documents of the batch or, without `cu_seqlens`, one row as a document.
        """
        return (rows.shape[1],) if cu_seqlens is None else tuple(cu_seqlens.diff().tolist())

    def order(self, lengths: tuple[int, ...]) -> Tensor:
        """Return the indices [S], in a row of documents, of rank 0's tokens, then of rank 1's, ..

        `lengths` are the lengths of the documents. A context rank's tokens, in the order of its
        slices, are cut evenly over its head ranks.
        """
        # The split orders tokens by context rank, and within a context rank by head rank.
        order = torch.from_numpy(self.split(lengths).order)
        if self.head_first:
            return order
        return rearrange(order, "(c h s) -> (h c s)", c=self.context.size, h=self.head.size)
