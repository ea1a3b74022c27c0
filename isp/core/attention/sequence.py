"""The ranks that share a sequence: which has which of its tokens, and how they attend to all of it.

p ranks = h of each head group x c of each context group; S tokens of a row

Each rank has S/p tokens of every row. In attention the ranks of a head group exchange them for
heads, and then hold S/c of the tokens together, of which the plan says which they are; the ranks of
a context group, which have the same heads, exchange the keys and values that these attend to.
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
from isp.core.mesh.sequence_split import NO_WINDOWS, ContextPlan, Windows

__all__ = ["SequenceRanks"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceRanks:
    """The p tensor ranks as head x context ranks; with c = 1 every rank attends to whole rows."""

    head: Channel
    context: Channel
    windows: Windows = NO_WINDOWS
    """Those of the model that attends."""
    head_first: bool = True
    """Whether the ranks of a head group are neighbours, or those of a context group."""
    exchange: ContextExchange = ContextExchange.GATHER
    scan: SequenceScan = SequenceScan.AUTO

    @classmethod
    def of(
        cls, mesh: Mesh, windows: Windows, *, exchange: ContextExchange, scan: SequenceScan
    ) -> SequenceRanks:
        """Those of a mesh, for a model with these windows."""
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
        """All of `tensor` as one head group."""
        return cls(head=tensor, context=Channel.solo(Axis.CONTEXT.value))

    def attention(self, local: LocalAttention, *, may_ring: bool = True) -> DistributedAttention:
        """Attention by `local` to all tokens of a sequence, in a ring if asked for and it may."""
        if self.context.size > 1:
            ring = may_ring and self.exchange is ContextExchange.RING
            local = ContextAttention(local, self.context, self.windows, ring=ring)
        return DistributedAttention(local, self.head)

    def plan(self, lengths: tuple[int, ...]) -> ContextPlan:
        """The context ranks' tokens in a row of documents of these lengths."""
        return ContextPlan.of(lengths, self.context.size, self.windows)

    def arranged(self, rows: Sequence[Tensor], cu_seqlens: Tensor | None) -> list[Tensor]:
        """Tensors of rows [B, S, ..], in which each rank's tokens then are together, rank by rank.

        With the ends of documents, rows are joined to [1, B S, ..], as their documents differ.
        """
        if self.context.size == 1:
            return list(rows)
        order = pinned_memory.send(self.order(self.lengths(rows[0], cu_seqlens)), rows[0].device)
        if cu_seqlens is not None:
            rows = [x.flatten(0, 1).unsqueeze(0) for x in rows]
        return [x.index_select(1, order) for x in rows]

    def lengths(self, rows: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
        """The documents of rows [B, S, ..] that share a plan: packed ones, or a row as one."""
        return (rows.shape[1],) if cu_seqlens is None else tuple(cu_seqlens.diff().tolist())

    def order(self, lengths: tuple[int, ...]) -> Tensor:
        """Where in a row of documents of these lengths the ranks' tokens lie, rank by rank; [S].

        Those of a context rank, in the order of the plan, are cut evenly over its head ranks.
        """
        order = torch.from_numpy(self.plan(lengths).order)
        if self.head_first:
            return order
        return rearrange(order, "(c h s) -> (h c s)", c=self.context.size, h=self.head.size)
