"""`RankLayers`: the layouts and collectives of a rank's layers in its mode."""

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
    """Return the all-to-all of logits [B, S/p, V] -> [B, S, V/p], and that of their gradient."""

    def spread(x: Tensor, *, tag: Tag) -> Pending:
        tag = tag._replace(purpose=Purpose.LOGITS)
        return tensor.all_to_all(x, scatter=2, gather=1, tag=tag)

    def join(dy: Tensor, *, tag: Tag) -> Pending:
        tag = tag._replace(purpose=Purpose.LOGITS)
        return tensor.all_to_all(dy, scatter=1, gather=2, tag=tag)

    return Moves(y=spread, dy=join)


@dataclass(frozen=True, kw_only=True)
class RankLayers:
    """The split of a model's layers over ranks, in one mode over given channels.

    In isp mode a weight is cut by rows over the weight group, and a rank computes all features of
    its own tokens. In the other modes a weight is cut by outputs (column) or inputs (row) over the
    tensor group, and a rank computes its part of the features of all tokens.
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
    """Number of chunks in which a rank's tokens are sent to experts; a chunk is sent while the
    chunk before is computed."""
    experts_stay: bool = False
    """True if each expert is whole on one rank, so that no expert's weights are gathered."""
    device: torch.device
    """Device of the layers."""
    dtype: torch.dtype
    """Dtype of the weights."""
    embed_split_hidden: bool = False
    """isp: the embedding table is cut by hidden features instead of vocabulary."""
    host: HostMemory | None = None
    """Host memory for the inputs of recomputed blocks; None: they are kept on the device."""
    sequence: SequenceRanks | None = None
    """isp: head and context ranks of the tensor group; None: each rank attends with some heads to
    the whole sequence."""
    vocab_parallel_loss: bool = False
    """isp: logits are exchanged, so that a rank has a slice of the logits of all tokens."""
    everyone: Channel = field(default_factory=Channel.solo)
    """All ranks, to exchange values in CPU memory on which all ranks base the same choice."""

    @property
    def splits_features(self) -> bool:
        """True if features (heads, hidden units, vocabulary) are split over the tensor group."""
        return self.mode.splits_features

    @property
    def token_ranks(self) -> Channel:
        """The ranks that a sequence's tokens are split over outside of regions; in mtp, this rank.

        In a region, between column and row linears, a rank has all tokens.
        """
        return self.tensor if self.mode.splits_sequence else Channel.solo("tensor")

    def attention(
        self, local: LocalAttention, *, scale: float | None = None, softcap: float | None = None
    ) -> DistributedAttention:
        """Return attention to whole sequences that calls `local` on a rank's heads and tokens.

        `local` applies `scale` and `softcap`.
        """
        # A rank has all tokens for its own heads, so it computes attention alone.
        if self.splits_features:
            return DistributedAttention(local, Channel.solo("tensor"))
        ranks = self.sequence or SequenceRanks.by_heads(self.tensor)
        # A ring merges partial results by log-sum-exp, which no kernel with a soft cap returns.
        return ranks.attention(local, may_ring=softcap is None)

    def recurrence(self, kind: Recurrence) -> Recurrence:
        """Return the recurrence to compute with, `kind` itself.

        The planner overrides this by one that counts memory and time without computing.
        """
        return kind

    def tiles(self, parts: Sequence[slice]) -> Iterable[slice]:
        """Return the parts of a computation to run: all `parts`.

        The planner overrides this to run only the first, and counts the others as equal to it.
        """
        return parts

    def each_tile(self, tiles: Sequence[slice]) -> Iterable[slice]:
        """Return the tiles of tokens that a module runs, each with its transfers: all `tiles`.

        The planner overrides this to run a few of them, and repeats one for the rest.
        """
        return tiles

    @property
    def on_cpu(self) -> bool:
        """True if the layers compute on a CPU."""
        return self.device.type == "cpu"

    @property
    def splits_logits(self) -> bool:
        """True if a rank has, of every token, the logits of a part of the vocabulary.

        False if it has all logits of its own tokens only.
        """
        return self.splits_features or self.vocab_parallel_loss

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark forward passes in this context as recomputation, for the log and communicator."""
        log = self.tensor.log
        # A recompute runs in the middle of a backward: keep the log's state, to restore it after.
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
        # The vocabulary is cut as by `torch.chunk`: the last ranks may have fewer logits, or none.
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
        """Return the losses of `head`, for `chunk_tokens` tokens at a time; see `HeadLoss`."""
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
        """isp: the collectives from logits as a rank computes them to those that its loss reads."""
        return logit_exchange(self.tensor) if self.vocab_parallel_loss else Moves()

    def sharded_layout(
        self, shape: tuple[int, ...], *, dim: int, segments: tuple[int, ...] = ()
    ) -> ParameterLayout:
        """Return the `ParameterLayout` of a parameter cut along `dim` over the weight group."""
        return ParameterLayout(
            global_shape=shape,
            dim=dim,
            segments=segments,
            parts=self.weight.size,
            index=self.weight.rank,
            reduce_over=Axis.WEIGHT_DATA,
        )

    def expert_layout(self, shape: tuple[int, ...]) -> ParameterLayout:
        """Return the `ParameterLayout` of a stack of experts [E, ..], which is cut along E.

        E is cut over expert ranks first. The experts of an expert rank are then cut over its
        expert weight ranks, which gather them from each other.
        """
        return replace(self.sharded_layout(shape, dim=0), groups=self.expert.size)

    def expert_bounds(self, num_experts: int) -> list[int]:
        """Return the index of the first expert of each expert rank, followed by `num_experts`."""
        size = self.expert.size
        return [*(chunk_range(num_experts, size, i).start for i in range(size)), num_experts]

    def replicated_layout(
        self, shape: tuple[int, ...], sees_part: bool | None = None
    ) -> ParameterLayout:
        """Return the `ParameterLayout` of a parameter that is whole on every rank.

        `sees_part`: True if tensor ranks apply it to different tokens or heads, so that gradients
        are summed over the whole stage; False if they apply it to the same values, so that their
        gradients are equal and summed over data ranks only. None: True if the mode splits tokens.
        """
        if sees_part is None:
            sees_part = self.mode.splits_sequence
        return ParameterLayout(
            global_shape=shape, reduce_over=Axis.STAGE if sees_part else Axis.DATA
        )
