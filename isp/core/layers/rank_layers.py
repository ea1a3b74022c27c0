"""`RankLayers`, which turns a mode into the layouts and collectives of a rank's layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from isp.core.attention.local import LocalAttention
from isp.core.attention.sequence import SequenceRanks
from isp.core.attention.ulysses import DistributedAttention
from isp.core.comm import Channel, Pending
from isp.core.comm.host_offload import HostMemory
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.compiled import CompileWhen
from isp.core.layers.head import HeadLoss
from isp.core.layers.linear import LinearLayer, Moves
from isp.core.layers.vocab_loss import LogitShard
from isp.core.mesh import Axis, Mode
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.partition import chunk_range
from isp.core.mesh.phase import Phase
from isp.core.mixers.recurrence import Recurrence
from isp.core.weights.wp_communicator import WPCommunicator

__all__ = ["RankLayers", "logit_exchange"]


def logit_exchange(tensor: Channel) -> Moves:
    """Return the moves of logits [B, S/p, V] to [B, S, V/p], and of their gradient back."""

    def spread(x: Tensor, *, tag: Tag) -> Pending:
        tag = tag._replace(purpose=Purpose.LOGITS)
        return tensor.all_to_all(x, scatter=2, gather=1, tag=tag)

    def join(dy: Tensor, *, tag: Tag) -> Pending:
        tag = tag._replace(purpose=Purpose.LOGITS)
        return tensor.all_to_all(dy, scatter=1, gather=2, tag=tag)

    return Moves(y=spread, dy=join)


@dataclass(frozen=True, kw_only=True)
class RankLayers:
    """The split of a model's layers in one mode over given channels.

    In isp mode a weight is cut by rows over the weight group, and every rank computes all features
    of its tokens. In the other modes it is cut by outputs (column) or inputs (row) over the tensor
    group, and every rank computes its features of all tokens.
    """

    mode: Mode
    tensor: Channel
    """The ranks that share one sequence."""
    weight: Channel
    """The ranks that share one copy of the weights."""
    communicator: WPCommunicator
    """Gathers weights and reduces their gradients."""
    expert: Channel = field(default_factory=Channel.solo)
    """The ranks that have different experts of a layer, and send each other tokens."""
    expert_chunks: int = 1
    """Number of pieces a rank's tokens are sent in; each is sent while the one before is
    computed."""
    experts_stay: bool = False
    """Each expert is on one rank as a whole, so that none is gathered."""
    device: torch.device
    dtype: torch.dtype
    embed_split_hidden: bool = False
    """isp: cut the embedding table by hidden features, not by vocabulary."""
    host: HostMemory | None = None
    """Host memory for block inputs that are not kept on the device; None: they are kept there."""
    sequence: SequenceRanks | None = None
    """isp: head and context ranks of the tensor group; None: each rank attends with some heads to
    the whole sequence."""
    vocab_parallel_loss: bool = False
    """isp: exchange logits, so that a rank has a slice of the logits of all tokens."""
    everyone: Channel = field(default_factory=Channel.solo)
    """All ranks, for values in CPU memory from which all make the same choice."""

    @property
    def splits_features(self) -> bool:
        """True if features (heads, hidden units, vocabulary) are split over the tensor group."""
        return self.mode.splits_features

    @property
    def token_ranks(self) -> Channel:
        """The ranks over which a sequence's tokens are split between linears split by features."""
        return self.tensor if self.mode.splits_sequence else Channel.solo("tensor")

    def attention(
        self, local: LocalAttention, *, scale: float | None = None, softcap: float | None = None
    ) -> DistributedAttention:
        """Return attention to whole sequences by `local`, which has this `scale` and `softcap`."""
        if self.splits_features:  # a rank has all tokens of its heads
            return DistributedAttention(local, Channel.solo("tensor"))
        ranks = self.sequence or SequenceRanks.by_heads(self.tensor)
        # A ring merges results by log-sum-exp, which no kernel with a soft cap returns.
        return ranks.attention(local, may_ring=softcap is None)

    def recurrence(self, kind: Recurrence) -> Recurrence:
        """Return the scan of this rank's segments (the planner puts a dry one in its place)."""
        return kind

    def tiles(self, parts: Sequence[slice]) -> Iterable[slice]:
        """Return all slices of a computation (the planner runs one of each size)."""
        return parts

    def each_tile(self, tiles: Sequence[slice]) -> Iterable[slice]:
        """Return all tiles of a module, each of which may contain transfers."""
        return tiles

    @property
    def on_cpu(self) -> bool:
        """True if the layers compute on a CPU."""
        return self.device.type == "cpu"

    @property
    def splits_logits(self) -> bool:
        """True if a rank has a slice of all tokens' logits, False if all logits of its tokens."""
        return self.splits_features or self.vocab_parallel_loss

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark forward passes in this context as recomputation, for the log and communicator."""
        log = self.tensor.log
        before = log.phase, log.block
        log.enter(Phase.RECOMPUTE, log.block)
        try:
            with self.communicator.recomputing():
                yield
        finally:
            log.enter(*before)

    def logit_shard(self, vocab_size: int, compile: CompileWhen = False) -> LogitShard:
        """Return the part of a token's logits that this rank's losses read; see `LogitShard`."""
        channel = self.tensor if self.splits_logits else Channel.solo("tensor")
        first = channel.rank * math.ceil(vocab_size / channel.size)
        return LogitShard(channel, first, vocab_size, compile)

    def head_loss(
        self,
        head: LinearLayer,
        vocab_size: int,
        *,
        chunk_tokens: int = 0,
        after_head: Callable[[Tensor], Tensor] | None = None,
        compile: CompileWhen = False,
    ) -> HeadLoss:
        """Return the losses of `head`'s logits, `chunk_tokens` tokens at a time; see `HeadLoss`."""
        return HeadLoss(
            head,
            moves=head.moves if self.splits_features else self.logit_moves,
            logit_shard=self.logit_shard(vocab_size, compile),
            chunk_tokens=chunk_tokens,
            after_head=after_head,
            num_slices=self.token_ranks.size if self.splits_logits else 1,
        )

    @property
    def logit_moves(self) -> Moves:
        """isp: the collectives between the logits a rank computes and those its loss reads."""
        return logit_exchange(self.tensor) if self.vocab_parallel_loss else Moves()

    def sharded_layout(
        self, shape: tuple[int, ...], *, dim: int, segments: tuple[int, ...] = ()
    ) -> ParameterLayout:
        """Return the layout of a parameter cut along `dim` over the weight group."""
        return ParameterLayout(
            global_shape=shape,
            dim=dim,
            segments=segments,
            parts=self.weight.size,
            index=self.weight.rank,
            reduce_over=Axis.WEIGHT_DATA,
        )

    def expert_layout(self, shape: tuple[int, ...]) -> ParameterLayout:
        """Return the layout of experts [E, ..]: cut over expert ranks, then expert weight ranks."""
        return replace(self.sharded_layout(shape, dim=0), groups=self.expert.size)

    def expert_bounds(self, num_experts: int) -> list[int]:
        """Return the first expert of each expert rank, and after them `num_experts`."""
        size = self.expert.size
        return [*(chunk_range(num_experts, size, i).start for i in range(size)), num_experts]

    def replicated_layout(
        self, shape: tuple[int, ...], sees_part: bool | None = None
    ) -> ParameterLayout:
        """Return the layout of a parameter that every rank holds whole.

        If the tensor ranks see the same tokens and features (mtp), their gradients are equal and
        only the data ranks' are summed. If each sees its own (`sees_part`: its tokens, or its
        heads), the gradients are partial sums over the whole stage.
        """
        if sees_part is None:
            sees_part = self.mode.splits_sequence
        return ParameterLayout(
            global_shape=shape, reduce_over=Axis.STAGE if sees_part else Axis.DATA
        )
