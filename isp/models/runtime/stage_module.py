"""`StageModule`: a traced model on one rank, or one pipeline stage of the model.

B batch, S sequence, D hidden size, V vocabulary; S' tokens and V' logits of this rank, F features
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isp.core.layers.compiled import CompileWhen
from isp.core.layers.head import HeadLoss
from isp.core.layers.linear import multiply
from isp.core.layers.rank_layers import RankLayers
from isp.core.layers.token_results import (
    ResultRules,
    RowLabels,
    results_of_head,
    results_of_logits,
)
from isp.core.layers.vocab_loss import vocab_parallel_cross_entropy
from isp.core.rng import generator_states, restore_generators, seed_generators
from isp.core.weights.declare import DeclaredBlock
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.models.huggingface.initial_weights import InitialWeights
from isp.models.huggingface.interface import ModelInterface, check_row
from isp.models.moe.load_balance import ExpertLoad
from isp.models.moe.router_losses import RouterLosses
from isp.models.positions import token_lengths
from isp.models.runtime.blocks import Blocks
from isp.models.runtime.weight_holders import WeightHolders
from isp.models.sharding.pipeline_split import Stage
from isp.models.tracing.calls import Call, ForwardEnd, Kind
from isp.models.tracing.position import ForwardPass, Instead, Masks
from isp.models.tracing.trace import check_not_compiled

__all__ = ["StageModule"]


class StageModule:
    """A traced model on one rank: its modules hold shards, and its calls are checked.

    A rank with several pipeline stages has one such object for each stage (`of_stage`). These
    objects share model, shards and position; each runs its own stage.
    """

    def __init__(
        self,
        interface: ModelInterface,
        holders: WeightHolders,
        blocks: Blocks,
        *,
        weights: InitialWeights | None,
        loss_chunk_tokens: int,
        compile: CompileWhen,
        gives_scores: bool,
        routers: RouterLosses | None,
        expert_load: ExpertLoad | None,
    ) -> None:
        """Prepare the loss of the model whose weights are in `holders`.

        `weights`: source of the initial weights; None: the model has them already.
        `loss_chunk_tokens`: tokens whose logits a loss computes at a time, if the trace has a head;
        0: all tokens. `compile`: when that loss is compiled.
        `gives_scores`: True if `results` may need gradients, so that backward reads the head's
        weight.
        """
        self._stage: Stage | None = None
        """The pipeline stage that is run; None: the whole model."""
        self._gives_scores = gives_scores
        self.routers = routers
        """The losses of routers; None: their coefficients are 0, or the model is on meta."""
        self.expert_load = expert_load
        """The token counts of experts; None: the model has no experts, or is on meta."""
        self.model, self.trace = holders.model, holders.trace
        self.splits_logits = holders.layers.splits_logits
        """True if losses need the labels of the whole sequence, False if those of this rank's
        tokens."""
        self._interface, self._layers = interface, holders.layers
        self.holders, self.position, self._blocks = holders, holders.position, blocks
        # List the modules once: listing them in each forward takes 0.01 ms a block. Modules that
        # are added to the model later are not in the trace, so their calls fail anyway.
        self._modules = tuple(self.model.named_modules())
        self._weights = weights
        self._outer_calls = tuple(
            calls[0] if calls[0].block is None else Call(Kind.BLOCK, name, name)
            for name, calls in self.trace.parts()
        )
        self._outside = frozenset(self.trace.called_at)
        self._block_names = frozenset(self.trace.blocks)
        # A forward ends with the head's input, because the loss computes the logits by chunks.
        self._ends = {} if self.trace.head is None else {self.trace.head: _end}
        self._needs_lengths = bool(interface.length_limits(self.model))
        self._most_tokens = interface.most_tokens(self.model)
        self._loss: HeadLoss | None = None
        """The loss computed from the head's input; None: the trace has no head."""
        if self.trace.head is not None:
            self._loss = self._layers.head_loss(
                holders.linear(self.trace.head),
                self.trace.vocab_size,
                chunk_tokens=loss_chunk_tokens,
                # None if the head's output is the logits: then the loss need not run the model's
                # code after the head again.
                after_head=self._after_head if self.trace.changes_logits else None,
                compile=compile,
            )

    @property
    def vocab_size(self) -> int:
        """The number of logits of a token, over all ranks."""
        return self.trace.vocab_size

    @property
    def learns(self) -> bool:
        """True if the first forward records which kept results a recompute reads, so that later
        forwards keep only those [Note: Watched]."""
        return self._blocks.learns

    # -- the interface for the runtime -------------------------------------------------------

    def of_stage(self, stage: Stage) -> StageModule:
        """Return a shallow copy of this module that runs one stage and has its parameters only."""
        other = copy.copy(self)
        other._stage = stage
        return other

    def __call__(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Run the forward: tokens and positions [B, S'] -> the input of the head [B, S', D].

        Without a head in the trace, returns this rank's logits [B, S', V']. Every pipeline stage
        but the last returns hidden states [B, S', D].

        x: token ids, or on a later stage the hidden states [B, S', D] of the stage before.
        positions: those of this rank's tokens, or of all tokens [B, S] if the lookup in the table
        distributes them over ranks. cu_seqlens: for a packed sequence (B = 1), the starts of the
        documents in the sequence of all ranks, [documents + 1], int32, in host memory; None
        otherwise.
        """
        stage, instead = self._stage, Instead(calls=self._ends)
        if stage is not None:
            # Each stage runs the model's own forward. Blocks of other stages return `received`, or
            # their input on the first stage; linears and tables of other stages return zeros.
            outside = self._outside - stage.parts
            instead = Instead(
                left_out=self._block_names - stage.parts,
                received=None if stage.is_first else x,
                last_block=None if stage.is_last else stage.blocks[-1],
                calls={**self.holders.zeros_of(outside), **self._ends},
            )
            # The code before the blocks still takes token ids, so give it any: the first block
            # returns `received` in place of its result.
            x = x if stage.is_first else torch.zeros_like(positions)
        return self._forward(x, positions, cu_seqlens, instead)

    def logits(self, output: Tensor) -> Tensor:
        """Return the logits [B, S', V'] of all tokens, from the `output` of a forward."""
        if self._loss is None:
            return output
        head = self._loss.head
        return self._after_head(multiply(output, head.weight, head.bias, head))

    def logits_of(
        self,
        x: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor | None,
        pick: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Run a forward and return the logits [B, n, V'] of the tokens that `pick` selects.

        `pick` [B, .., F] -> [B, n, F] takes the head's input, or the logits if the trace has no
        head; with a head, the logits of other tokens are not computed. If a region before the head
        gathers the tokens of all ranks, `pick` gets all of them. For x, positions and cu_seqlens
        see `__call__`.
        """
        if self._loss is None:
            return pick(self(x, positions, cu_seqlens))
        head = self._loss.head
        picked = {head.name: lambda h: multiply(pick(h), head.weight, head.bias, head)}
        return self._forward(x, positions, cu_seqlens, Instead(calls=picked))

    def loss(self, output: Tensor, labels: Tensor, expected: Tensor | None = None) -> Tensor:
        """Return the sum [] of the tokens' cross-entropies, from the `output` of a forward.

        labels [B, S'], or [B, S] if `splits_logits`. `expected` [], not 0: the gradient of the sum
        that the caller expects in backward; None: 1. With a head, the loss computes its gradients
        already in forward, for this value; if backward gets another, it scales them.
        """
        if self._loss is None:
            shard = self._layers.logit_shard(self.trace.vocab_size)
            return vocab_parallel_cross_entropy(
                output, labels, first=shard.first, channel=shard.channel
            ).sum()
        log = self._layers.tensor.log
        log.enter(log.phase, self._loss.head.name)
        return self._loss.total(output, labels, expected)

    def results(self, output: Tensor, beside: Tensor | RowLabels, rules: ResultRules) -> Tensor:
        """Return per-token results [B, n, K] with gradients, from the `output` of a forward.

        `beside` [B, n, ..]: what `rules` need for each token in addition to its logits, such as a
        label, or any number of labels (`RowLabels`). See `isp.core.layers.token_results`.
        """
        if self._loss is not None:
            return results_of_head(self._loss, output, beside, rules)
        shard = self._layers.logit_shard(self.trace.vocab_size)
        return results_of_logits(output, beside, rules, shard)

    def shards(self) -> Iterator[ShardedParameter]:
        """Yield the shard of each parameter once; for a stage, only of parameters that it reads."""
        own = self._stage and self._stage.parameters
        return (item for item in self.holders.named if own is None or item.name in own)

    def init_weights(self, seed: int | None) -> None:
        """Fill the parameters with their initial weights, which are the same in every layout.

        Does nothing if the model came with weights. seed None: fill only the buffers that
        checkpoints do not contain, because the parameters are loaded afterwards. A weight that two
        stages of a rank share is filled twice, with the same values.
        """
        if self._weights is not None:
            self._weights.fill(self.model, () if seed is None else [*self.shards()], seed or 0)

    def parts(self) -> dict[str, nn.Module]:
        """Return by name the blocks and the modules outside of blocks; see `WeightHolders.parts`.

        A module of one pipeline stage returns only the parts with parameters of that stage.
        """
        every = self.holders.parts()
        if self._stage is None:
            return every
        own = {item.parameter for item in self.shards()}
        return {name: part for name, part in every.items() if not own.isdisjoint(part.parameters())}

    def weight_blocks(self) -> tuple[DeclaredBlock, ...]:
        """Return the sharded weights that a forward of this stage, or of the whole model, reads.

        See `WeightHolders.weight_blocks`.
        """
        return self.holders.weight_blocks(self._stage, head_in_backward=self._gives_scores)

    # -- forward -----------------------------------------------------------------------------

    def _forward(
        self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None, instead: Instead
    ) -> Tensor:
        """Run one forward of the stage, in which `instead` replaces parts of the model."""
        masks = self._masks(positions, cu_seqlens)
        self._blocks.begin(instead.left_out)
        with _random_numbers(self.model.training, self._layers):
            return self._run_model(x, positions, masks, instead)

    def _run_model(self, x: Tensor, positions: Tensor, masks: Masks, instead: Instead) -> Tensor:
        """Run the model's own forward in a pass; return its result, or that of an early end.

        A forward ends early by `ForwardEnd`, with the head's input or a stage's hidden states.
        """
        forward_pass = ForwardPass("the model", self._outer_calls, masks, instead=instead)
        with self.position.passing(forward_pass):
            try:
                return self._interface.forward(self.model, x, positions)
            except ForwardEnd as end:
                # `ForwardEnd` was raised at the head, or after a stage's last block.
                forward_pass.end()
                return end.hidden

    def _masks(self, positions: Tensor, cu_seqlens: Tensor | None) -> Masks:
        """Return the masks of a micro-batch with positions [B, S'] or [B, S].

        Raises ValueError if the model cannot run these rows, or was compiled.
        """
        # Checked in each forward, because a user may compile the model after isp has built it.
        check_not_compiled(self._modules)
        parts = self._layers.tensor.size if self._layers.mode.slices_batch else 1
        check_row(self._most_tokens, positions.shape[1] * parts)
        if not self._needs_lengths:
            return Masks(cu_seqlens)
        return Masks(cu_seqlens, token_lengths(positions, cu_seqlens, self._layers))

    # -- after the head ----------------------------------------------------------------------

    def _after_head(self, y: Tensor) -> Tensor:
        """Return the logits that the model's code makes from the head's output y, [B, n, V'].

        That code (a soft cap, a scale) is in the model's forward after the head. To run it alone,
        the model runs once more on arbitrary tokens: blocks return their input, linears and tables
        outside of them return zeros, and the head returns y.
        """
        ids = torch.zeros(y.shape[:2], dtype=torch.int64, device=y.device)
        positions = torch.arange(y.shape[1], device=y.device).expand(y.shape[:2])
        assert self.trace.head is not None
        calls = {**self.holders.zeros_of(self._outside), self.trace.head: lambda _: y}
        instead = Instead(self._block_names, calls=calls)
        before = generator_states(self._layers.device) if self.model.training else None
        try:
            return self._run_model(ids, positions, Masks(None), instead)
        finally:
            if before is not None:
                # Dropout may have drawn random numbers in this extra run: restore the generators,
                # so that later draws are the same as without it.
                restore_generators(self._layers.device, before)


def _end(x: Tensor) -> Tensor:
    """End the forward at the head, with the head's input x as its result."""
    raise ForwardEnd(x)


@contextmanager
def _random_numbers(training: bool, layers: RankLayers) -> Iterator[None]:
    """Seed the generators for one forward, and restore them afterwards.

    Draws in the forward (dropout) depend on one number drawn from the CPU's generator, and on the
    rank. Ranks that have the same tokens (mtp) draw the same numbers, since dropout must be equal
    on them. If not `training`, does nothing.
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
