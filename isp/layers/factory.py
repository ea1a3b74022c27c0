"""The layers of a model for a mode: the one place where a mode becomes layouts and moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isp.attention import DistributedAttention, LocalAttention
from isp.attention.cached import CachedAttention, KeyValueCache
from isp.attention.sequence import SequenceRanks
from isp.comm import Channel
from isp.comm.host import HostMemory
from isp.layers.embedding import VocabParallelEmbedding
from isp.layers.head import HeadLoss, VocabParallelHead
from isp.layers.linear import LinearLayer, Moves, ParallelLinear, Role, moves_for
from isp.layers.norm import RMSNorm
from isp.layers.tiled_mlp import TiledMLP
from isp.mixers.recurrence import Recurrence
from isp.parallel import Axis, Mode
from isp.parallel.layout import ParameterLayout
from isp.parallel.phase import Phase
from isp.weights.wp import (
    EmbeddingWeightParallelCommunicator,
    HeadWeightParallelCommunicator,
    WPCommunicator,
)

__all__ = ["LayerFactory"]


@dataclass(frozen=True, kw_only=True)
class LayerFactory:
    """Layers for one mode over given channels; the model's code is the same in every mode.

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
    compiled: bool = False
    """Whether norms, rotations and activations are compiled, `isp.layers.compiled`."""
    cache: KeyValueCache | None = None
    """Keeps the keys and values of earlier tokens, where text is generated."""

    @property
    def splits_features(self) -> bool:
        """Whether features (heads, hidden units, vocabulary) are split over the tensor group."""
        return self.mode.facts.splits_features

    @property
    def feature_parts(self) -> int:
        """The ranks over which features are split."""
        return self.tensor.size if self.splits_features else 1

    @property
    def token_ranks(self) -> Channel:
        """The ranks over which the tokens of a sequence are split, outside of what features are."""
        return self.tensor if self.mode.facts.splits_sequence else Channel.solo("tensor")

    def attention(
        self, local: LocalAttention, *, scale: float | None = None, softcap: float | None = None
    ) -> DistributedAttention:
        """Attention by `local`, which has this `scale` and `softcap`, to all of a sequence."""
        if self.cache is not None:
            local = CachedAttention(local, self.cache, scale=scale, softcap=softcap)
        if self.splits_features:  # a rank has all tokens of its heads
            return DistributedAttention(local, Channel.solo("tensor"))
        return (self.sequence or SequenceRanks.by_heads(self.tensor)).attention(local)

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

    def column(
        self, in_features: int, out_features: tuple[int, ...], *, bias: bool = False, std: float
    ) -> ParallelLinear:
        """A linear to the fused `out_features`, of which each rank computes its share."""
        total = sum(out_features)
        assert all(n % self.feature_parts == 0 for n in out_features), (out_features, self.tensor)
        segments = out_features if self.splits_features else (total,)
        return ParallelLinear(
            self.sharded_layout((total, in_features), dim=0, segments=segments),
            bias_layout=self.sharded_layout((total,), dim=0, segments=segments) if bias else None,
            moves=moves_for(self.mode, Role.COLUMN, self.tensor),
            communicator=self.communicator,
            init_std=std,
            device=self.device,
            dtype=self.dtype,
        )

    def row(
        self, in_features: int, out_features: int, *, bias: bool = False, std: float
    ) -> ParallelLinear:
        """A linear from split `in_features`, the dual of `column`."""
        assert in_features % self.feature_parts == 0, (in_features, self.tensor)
        bias_layout = None
        if bias and self.splits_features:
            bias_layout = self.replicated_layout((out_features,))
        elif bias:
            bias_layout = self.sharded_layout((out_features,), dim=0)
        return ParallelLinear(
            self.sharded_layout((out_features, in_features), dim=int(self.splits_features)),
            bias_layout=bias_layout,
            bias_after_move=self.splits_features,
            moves=moves_for(self.mode, Role.ROW, self.tensor),
            communicator=self.communicator,
            init_std=std,
            device=self.device,
            dtype=self.dtype,
        )

    def embedding(self, vocab_size: int, hidden_size: int, *, std: float) -> VocabParallelEmbedding:
        """The table of token embeddings, split by vocabulary (in isp mode, if asked, by hidden)."""
        layout, communicator = self.sharded_layout((vocab_size, hidden_size), dim=0), None
        if not self.splits_features:
            communicator = EmbeddingWeightParallelCommunicator(
                self.communicator, self.weight, split_hidden=self.embed_split_hidden
            )
            layout = communicator.table_layout(vocab_size, hidden_size)
        return VocabParallelEmbedding(
            layout,
            # As in a row linear, each rank has a part of the sum.
            moves=moves_for(self.mode, Role.ROW, self.tensor),
            communicator=communicator or self.communicator,
            init_std=std,
            device=self.device,
            dtype=self.dtype,
        )

    def head(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        std: float,
        tied_to: VocabParallelEmbedding | None = None,
        loss_chunk_tokens: int = 0,
    ) -> VocabParallelHead:
        """The linear to the logits, split by vocabulary; may share the embedding's table.

        Its loss is computed `loss_chunk_tokens` tokens at a time, 0: all at once.
        """
        layout = self.sharded_layout((vocab_size, hidden_size), dim=0)
        if tied_to is not None:
            layout = tied_to.layouts["weight"]
        column = moves_for(self.mode, Role.COLUMN, self.tensor)
        head = VocabParallelHead(
            layout,
            moves=column if self.splits_features else self.logit_moves,
            communicator=self.communicator,
            init_std=std,
            tied_to=None if tied_to is None else tied_to.weight,
            device=self.device,
            dtype=self.dtype,
        )
        head.losses = self.head_loss(head, vocab_size, chunk_tokens=loss_chunk_tokens)
        return head

    def head_loss(
        self,
        head: LinearLayer,
        vocab_size: int,
        *,
        chunk_tokens: int = 0,
        label_smoothing: float = 0.0,
        behind: Callable[[Tensor], Tensor] | None = None,
    ) -> HeadLoss:
        """The losses of what `head` gives, `chunk_tokens` tokens at a time; see `HeadLoss`."""
        return HeadLoss(
            head,
            moves=head.moves if self.splits_features else self.logit_moves,
            channel=self.loss_channel,
            first=self.first_logit(vocab_size),
            chunk_tokens=chunk_tokens,
            label_smoothing=label_smoothing,
            behind=behind,
        )

    @property
    def logit_moves(self) -> Moves:
        """isp: what brings the logits that a rank has made to those of its loss, and back."""
        last = HeadWeightParallelCommunicator(
            self.communicator,
            self.weight,
            self.tensor,
            retain_out_sharded=True if self.vocab_parallel_loss else None,
        )
        return Moves(y=last.output_hook, dy=last.grad_output_hook)

    def rms_norm(self, size: int, *, eps: float, per_head: bool = False) -> RMSNorm:
        """A norm over the hidden size of a token or (`per_head`) over each head."""
        layout = self.replicated_layout((size,), sees_part=True if per_head else None)
        return RMSNorm(
            layout, eps=eps, device=self.device, dtype=self.dtype, compiled=self.compiled
        )

    def tiled_mlp(
        self,
        *,
        norm: RMSNorm,
        column: ParallelLinear,
        activation: Callable[[Tensor], Tensor],
        row: ParallelLinear,
        tokens: int,
    ) -> TiledMLP:
        """An MLP of these layers, `tokens` at a time."""
        return TiledMLP(norm=norm, column=column, activation=activation, row=row, tokens=tokens)

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

    def replicated_layout(
        self, shape: tuple[int, ...], sees_part: bool | None = None
    ) -> ParameterLayout:
        """A parameter that every rank holds whole.

        Where the tensor ranks see the same tokens and features (mtp) their gradients are equal;
        where each sees its part (its tokens, or its heads) they are partial sums.
        """
        if sees_part is None:
            sees_part = self.mode.facts.splits_sequence
        return ParameterLayout(
            global_shape=shape, reduce_over=Axis.STAGE if sees_part else Axis.DATA
        )
