"""`StageModule`: a traced model on one rank, or a pipeline stage of it.

B batch, S sequence, D hidden size, V vocabulary; S' the tokens of this rank
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isp.core.comm import Channel
from isp.core.layers.compiled import CompileWhen
from isp.core.layers.head import HeadLoss
from isp.core.layers.head_results import results_of_head, results_of_logits
from isp.core.layers.linear import multiply
from isp.core.layers.rank_layers import RankLayers
from isp.core.layers.token_results import ResultRules
from isp.core.layers.vocab_loss import vocab_parallel_cross_entropy
from isp.core.rng import generator_states, restore_generators, seed_generators
from isp.core.weights.declare import DeclaredBlock
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.models.huggingface.initial_weights import InitialWeights
from isp.models.huggingface.interface import Host, check_row
from isp.models.moe.load_balance import ExpertLoad
from isp.models.moe.router_losses import RouterLosses
from isp.models.positions import by_document, token_lengths
from isp.models.runtime.weight_holders import WeightHolders
from isp.models.sharding.pipeline_split import Stage
from isp.models.tracing.calls import Call, ForwardEnd, Kind
from isp.models.tracing.forward_pass import ForwardPass, Instead, Masks
from isp.models.tracing.trace import check_not_compiled

__all__ = ["StageModule"]


class StageModule:
    """A traced model on this rank: its modules hold shards, its calls are followed."""

    def __init__(
        self,
        host: Host,
        holders: WeightHolders,
        *,
        weights: InitialWeights | None,
        loss_chunk_tokens: int,
        compile: CompileWhen,
        gives_scores: bool,
        routers: RouterLosses | None,
        expert_load: ExpertLoad | None,
    ) -> None:
        """`weights`: the source of the initial ones; None: they are there.

        If the trace has a head, losses are computed `loss_chunk_tokens` tokens at a time, 0: all,
        and compiled if `compile` says so.
        `gives_scores`: gradients of `scores` may be asked for.
        """
        self._stage: Stage | None = None
        """None: the whole model."""
        self._gives_scores = gives_scores
        self.routers = routers
        """Losses of routers; None: without."""
        self.expert_load = expert_load
        """None: it has no experts, or does not train."""
        self.model, self.trace = holders.model, holders.follower.trace
        self.splits_logits = holders.layers.splits_logits
        """Whether the losses need the labels of the whole sequence, or those of its tokens."""
        self._host, self._layers = host, holders.layers
        self.holders, self._follower = holders, holders.follower
        self._weights = weights
        self._outer_calls = tuple(
            calls[0] if calls[0].block is None else Call(Kind.BLOCK, name, name)
            for name, calls in self.trace.parts()
        )
        self._blocks = frozenset(self.trace.blocks)
        self._outside = frozenset(self.trace.called_at)
        self._ends = {} if self.trace.head is None else {self.trace.head: _end}
        self._length_limits = host.length_limits(self.model)
        self._most_tokens = host.most_tokens(self.model)
        for part, limit in self._length_limits.items():
            part.forward = by_document(limit, self._document_lengths, part.forward)
        self._loss: HeadLoss | None = None
        """Those of the head, if there is one."""
        if self.trace.head is not None:
            self._loss = self._layers.head_loss(
                holders.linear(self.trace.head),
                self.trace.vocab_size,
                chunk_tokens=loss_chunk_tokens,
                # Where the model changes nothing, its code need not run.
                after_head=self._behind_head if self.trace.changes_logits else None,
                compile=compile,
            )

    @property
    def vocab_size(self) -> int:
        """Logits of a token, over all ranks."""
        return self.trace.vocab_size

    @property
    def learns(self) -> bool:
        """Whether a first forward shows what later ones need not keep."""
        return self._follower.blocks.learns

    # -- what the runtime asks ---------------------------------------------------------------

    def of_stage(self, stage: Stage) -> StageModule:
        """The same chunk, of which one stage is run and has parameters."""
        other = copy.copy(self)
        other._stage = stage
        return other

    def __call__(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """This rank's logits: x and positions [B, S'] -> [B, S', V'], or what the head is given.

        x are the tokens; of a later stage, what the one before gave, [B, S', D]. All positions,
        [B, S], where the table leaves a rank its tokens. cu_seqlens [documents + 1], int32, in host
        memory: where the documents of the sequence of all ranks begin, B being 1; None if it is not
        packed.
        """
        stage, instead = self._stage, Instead(calls=self._ends)
        if stage is not None:
            outside = self._outside - stage.parts
            instead = Instead(
                left_out=self._blocks - stage.parts,
                received=None if stage.is_first else x,
                last_block=None if stage.is_last else stage.blocks[-1],
                calls={**self.holders.zeros_of(outside), **self._ends},
            )
            x = x if stage.is_first else torch.zeros_like(positions)
        return self._forward(x, positions, cu_seqlens, instead)

    def logits(self, output: Tensor) -> Tensor:
        """The logits [B, S', V'] of what a forward gave."""
        if self._loss is None:
            return output
        head = self._loss.head
        return self._behind_head(multiply(output, head.weight, head.bias, head))

    def logits_of(
        self,
        x: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor | None,
        pick: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The logits [B, n, V'] of the tokens that `pick`, [B, .., F] -> [B, n, F], leaves.

        x, positions, cu_seqlens: those of a forward. The others' are not computed, if the model has
        a head. Where a region before the head joins the tokens of all ranks, `pick` is given these.
        """
        if self._loss is None:
            return pick(self(x, positions, cu_seqlens))
        head = self._loss.head
        picked = {head.name: lambda h: multiply(pick(h), head.weight, head.bias, head)}
        return self._forward(x, positions, cu_seqlens, Instead(calls=picked))

    def loss(self, output: Tensor, labels: Tensor, expected: Tensor | None = None) -> Tensor:
        """The sum of the tokens' cross-entropies: what a forward gave, and labels [B, S'] -> [].

        Labels are [B, S] if `splits_logits`. `expected` [], not 0, is the gradient that the sum
        will have if there is a backward: gradients are computed together with the loss.
        """
        if self._loss is None:
            return self._whole_losses(output, labels).sum()
        log = self._layers.tensor.log
        log.enter(log.phase, self._loss.head.name)
        return self._loss.total(output, labels, expected)

    def losses(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token, as the labels; of what `loss` gives the sum of. No gradient."""
        if self._loss is None:
            return self._whole_losses(output, labels)
        return self._loss.each(output, labels)

    def results(
        self, output: Tensor, beside: Tensor, make: Callable[[Channel, int, int], ResultRules]
    ) -> Tensor:
        """As `isp.core.layers.head_results`, with gradients: of what a forward gave -> [B, n, K].

        `beside` [B, n, ..] is of the tokens that `loss` takes labels of. `make` is given the ranks
        over which a token's logits are split, this rank's first logit, and the number of all.
        """
        size, channel = self.trace.vocab_size, self._layers.loss_channel
        rules = make(channel, self._layers.first_logit(size), size)
        if self._loss is None:
            return results_of_logits(output, beside, rules)
        return results_of_head(self._loss, output, beside, rules)

    def shards(self) -> Iterator[ShardedParameter]:
        """The parameters, each once, with their names in the model; of a stage, those it reads."""
        own = self._stage and self._stage.parameters
        return (item for item in self.holders.named if own is None or item.name in own)

    def init_weights(self, seed: int | None) -> None:
        """Give the parameters their initial weights, the same in every layout.

        The model's own, or those of their source. None leaves the parameters to others; buffers
        that no checkpoint has get their values. A weight that two stages of a rank have is filled
        twice.
        """
        if self._weights is not None:
            self._weights.fill(self.model, () if seed is None else [*self.shards()], seed or 0)

    def parts(self) -> dict[str, nn.Module]:
        """As `WeightHolders.parts`; of a stage, those that have parameters of it."""
        every = self.holders.parts()
        if self._stage is None:
            return every
        own = {item.parameter for item in self.shards()}
        return {name: part for name, part in every.items() if not own.isdisjoint(part.parameters())}

    def weight_blocks(self) -> tuple[DeclaredBlock, ...]:
        """As `WeightHolders.weight_blocks`, of the stage if it is one."""
        return self.holders.weight_blocks(self._stage, head_in_backward=self._gives_scores)

    # -- inside ------------------------------------------------------------------------------

    def _forward(
        self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None, instead: Instead
    ) -> Tensor:
        masks = self._masks(positions, cu_seqlens)
        blocks = self._follower.blocks
        blocks.begin(next(b for b in blocks.recomputed if b not in instead.left_out))
        with _random_numbers(self.model.training, self._layers):
            return self._passed(x, positions, masks, instead)

    def _passed(self, x: Tensor, positions: Tensor, masks: Masks, instead: Instead) -> Tensor:
        """What the model's own forward gives, or what ended it."""
        forward_pass = ForwardPass("the model", self._outer_calls, masks, instead=instead)
        with self._follower.passing(forward_pass):
            try:
                return self._host.forward(self.model, x, positions)
            except ForwardEnd as end:
                forward_pass.end()
                return end.hidden

    def _document_lengths(self) -> Tensor | None:
        """Those of this rank's tokens, in the forward that is under way."""
        return self._follower.under_way("rotary positions").masks.lengths

    def _masks(self, positions: Tensor, cu_seqlens: Tensor | None) -> Masks:
        """Those of a micro-batch with these positions, [B, S'] or [B, S]."""
        check_not_compiled(self.model)
        parts = self._layers.tensor.size if self._layers.mode.slices_batch else 1
        check_row(self._most_tokens, positions.shape[1] * parts)
        if not self._length_limits:
            return Masks(cu_seqlens)
        return Masks(cu_seqlens, token_lengths(positions, cu_seqlens, self._layers))

    # -- behind the head ---------------------------------------------------------------------

    def _whole_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits,
            labels,
            first=self._layers.first_logit(self.trace.vocab_size),
            channel=self._layers.loss_channel,
        )

    def _behind_head(self, y: Tensor) -> Tensor:
        """The logits that the model makes of what its head gives, [B, n, V]."""
        ids = torch.zeros(y.shape[:2], dtype=torch.int64, device=y.device)
        positions = torch.arange(y.shape[1], device=y.device).expand(y.shape[:2])
        assert self.trace.head is not None
        calls = {**self.holders.zeros_of(self._outside), self.trace.head: lambda _: y}
        instead = Instead(self._blocks, calls=calls)
        before = generator_states(self._layers.device) if self.model.training else None
        try:
            return self._passed(ids, positions, Masks(None), instead)
        finally:
            if before is not None:  # what is left out may have drawn numbers
                restore_generators(self._layers.device, before)


def _end(x: Tensor) -> Tensor:
    raise ForwardEnd(x)


@contextmanager
def _random_numbers(training: bool, layers: RankLayers) -> Iterator[None]:
    """A forward whose draws (dropout) follow from one number of the host's generator, and the rank.

    Where the ranks of a sequence have the same tokens (mtp), they draw the same. Nothing is drawn
    but in `training`.
    """
    if not training:
        yield
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not layers.mode.splits_sequence:
        rank -= layers.tensor.rank
    seed = int(torch.randint(1 << 48, ()))
    before = generator_states(layers.device)
    seed_generators(layers.device, seed + rank)
    try:
        yield
    finally:
        restore_generators(layers.device, before)
