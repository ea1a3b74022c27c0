"""How the layers of a model lie on a rank: where a mode becomes layouts and moves."""

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
from isp.core.mesh import Axis, Mode
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.partition import chunk_range
from isp.core.mesh.phase import Phase
from isp.core.mixers.recurrence import Recurrence
from isp.core.weights.wp import WPCommunicator

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
    """How layers are split in one mode over given channels, and what they are computed with.

    In isp mode a weight is cut by rows over the weight group and every rank computes all features
    of its tokens; in the others it is cut by outputs (column) or inputs (row) over the tensor
    group and every rank computes its features of all tokens.
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
    """Parts of the tokens, each of which travels while the one before is computed."""
    experts_stay: bool = False
    """Whether each expert lies on one rank as a whole, so that none is gathered."""
    device: torch.device
    dtype: torch.dtype
    embed_split_hidden: bool = False
    """isp: cut the embedding table by hidden features, not by vocabulary."""
    host: HostMemory | None = None
    """Memory for block inputs that are not kept on the device; None: there is none."""
    sequence: SequenceRanks | None = None
    """isp: how the tensor ranks attend to a sequence; None: each with some heads to all of it."""
    vocab_parallel_loss: bool = False
    """isp: exchange logits, so that a rank has all tokens of its sequence and part of each."""
    everyone: Channel = field(default_factory=Channel.solo)
    """All ranks, for values in CPU memory, by which they choose alike."""

    @property
    def splits_features(self) -> bool:
        """Whether features (heads, hidden units, vocabulary) are split over the tensor group."""
        return self.mode.splits_features

    @property
    def token_ranks(self) -> Channel:
        """The ranks over which the tokens of a sequence are split, outside of what features are."""
        return self.tensor if self.mode.splits_sequence else Channel.solo("tensor")

    def attention(
        self, local: LocalAttention, *, scale: float | None = None, softcap: float | None = None
    ) -> DistributedAttention:
        """Attention by `local`, which has this `scale` and `softcap`, to all of a sequence."""
        if self.splits_features:  # a rank has all tokens of its heads
            return DistributedAttention(local, Channel.solo("tensor"))
        ranks = self.sequence or SequenceRanks.by_heads(self.tensor)
        return ranks.attention(local, may_ring=softcap is None)  # kernels with a cap give no sums

    def recurrence(self, kind: Recurrence) -> Recurrence:
        """What scans the segments of this rank."""
        return kind

    def tiles(self, parts: Sequence[slice]) -> Iterable[slice]:
        """Those of alike parts of a computation that are run: all."""
        return parts

    def each_tile(self, tiles: Sequence[slice]) -> Iterable[slice]:
        """Those of the tiles of a module that are run: all; there may be transfers in each."""
        return tiles

    @property
    def on_cpu(self) -> bool:
        """Whether a CPU computes."""
        return self.device.type == "cpu"

    @property
    def splits_logits(self) -> bool:
        """Whether a rank has a part of the logits of all tokens, or all logits of its tokens."""
        return self.splits_features or self.vocab_parallel_loss

    @property
    def loss_channel(self) -> Channel:
        """The ranks over which the logits of one token are split."""
        return self.tensor if self.splits_logits else Channel.solo("tensor")

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """The layers' forward passes in this context compute again what a backward needs."""
        log = self.tensor.log
        before = log.phase, log.block
        log.enter(Phase.RECOMPUTE, log.block)
        try:
            with self.communicator.recomputing():
                yield
        finally:
            log.enter(*before)

    def first_logit(self, vocab_size: int) -> int:
        """The vocabulary entry of this rank's first logit."""
        return self.loss_channel.rank * math.ceil(vocab_size / self.loss_channel.size)

    def head_loss(
        self,
        head: LinearLayer,
        vocab_size: int,
        *,
        chunk_tokens: int = 0,
        behind: Callable[[Tensor], Tensor] | None = None,
        compile: CompileWhen = False,
    ) -> HeadLoss:
        """The losses of what `head` gives, `chunk_tokens` tokens at a time; see `HeadLoss`."""
        return HeadLoss(
            head,
            moves=head.moves if self.splits_features else self.logit_moves,
            channel=self.loss_channel,
            first=self.first_logit(vocab_size),
            chunk_tokens=chunk_tokens,
            behind=behind,
            compile=compile,
        )

    @property
    def logit_moves(self) -> Moves:
        """isp: what brings the logits that a rank has made to those of its loss, and back."""
        return logit_exchange(self.tensor) if self.vocab_parallel_loss else Moves()

    def sharded_layout(
        self, shape: tuple[int, ...], *, dim: int, segments: tuple[int, ...] = ()
    ) -> ParameterLayout:
        """A parameter that is cut along `dim` over the weight group."""
        return ParameterLayout(
            global_shape=shape,
            dim=dim,
            segments=segments,
            parts=self.weight.size,
            index=self.weight.rank,
            reduce_over=Axis.WEIGHT_DATA,
        )

    def expert_layout(self, shape: tuple[int, ...]) -> ParameterLayout:
        """Experts [E, ..]: over the expert ranks, and those of each over its weight ranks."""
        return replace(self.sharded_layout(shape, dim=0), groups=self.expert.size)

    def expert_bounds(self, num_experts: int) -> list[int]:
        """Where the experts of each expert rank begin, and the last ones end."""
        size = self.expert.size
        return [*(chunk_range(num_experts, size, i).start for i in range(size)), num_experts]

    def replicated_layout(
        self, shape: tuple[int, ...], sees_part: bool | None = None
    ) -> ParameterLayout:
        """A parameter that every rank holds whole.

        Where the tensor ranks see the same tokens and features (mtp) their gradients are equal;
        where each sees its part (its tokens, or its heads) they are partial sums.
        """
        if sees_part is None:
            sees_part = self.mode.splits_sequence
        return ParameterLayout(
            global_shape=shape, reduce_over=Axis.STAGE if sees_part else Axis.DATA
        )
