"""The micro-batches of a step on this rank, through the model and its loss, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel
from isp.core.mesh import Axis
from isp.core.micro_batch import MicroBatch
from isp.models.moe.router_losses import RouterLosses
from isp.step.objective import Documents

if TYPE_CHECKING:
    from isp.step.step import TrainStep

__all__ = ["StepOutcome", "StepWork", "arrange", "slice_sequence"]


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """A step's outcome; the same on every rank."""

    loss: float
    """Mean loss of the global batch's valid tokens, or pairs, before the update; 0 without."""
    grad_norm: float
    """Global gradient norm, without the loss scale and before clipping."""
    skipped: bool
    """Whether the update was left out: the gradients were not finite, or no token had a label."""
    valid_tokens: int
    """Tokens of the global batch that had a label; pairs, if the loss is of those."""
    expert_load: float | None = None
    """The most tokens of an expert, of any layer, as a multiple of the layer's mean."""
    unused_experts: int | None = None
    """Experts of all layers that no token went to; None without experts."""


class StepWork:
    """The micro-batches of a step on this rank, and the loss that has been found for them."""

    def __init__(self, step: TrainStep, batches: Sequence[MicroBatch], valid: Tensor) -> None:
        self.step = step
        self.batches = batches
        """As they were read: whole sequences, in their own order."""
        self._batches = [arrange(b, step.built.sequence) for b in batches]
        self._parts = list(self._batches)
        if step.mesh.topology.mode.slices_batch:
            self._parts = [slice_sequence(b, step.mesh[Axis.TENSOR]) for b in self._batches]
        self._documents: dict[int, Documents] = {}
        self.valid = valid
        """Tokens with a label in the global batch."""
        self.tokens = [part.tokens for part in self._parts]
        """Of each micro-batch, [B, S']."""
        self.total = torch.zeros((), dtype=torch.float64, device=valid.device)
        """This rank's part of the loss."""

    def between(self, micro_batch: int) -> Tensor:
        """A new tensor such as travels between stages, [B, S', D]."""
        step, (rows, tokens) = self.step, self.tokens[micro_batch].shape
        mode = step.mesh.topology.mode
        if mode.splits_sequence and not mode.slices_batch:
            tokens //= step.mesh[Axis.TENSOR].size  # split between the linears
        weight = step.built.parameters[0].parameter
        return weight.new_empty(rows, tokens, step.built.model.hidden_size)

    def forward(self, chunk: int, micro_batch: int, x: Tensor) -> Tensor:
        """Through the model, or the part of it that is this rank's chunk number `chunk`."""
        part, run = self._parts[micro_batch], self.step.chunks[chunk]
        if run.routers is not None:
            self._begin_routing(run.routers, micro_batch)
        counting: AbstractContextManager[None] = nullcontext()
        if run.expert_load is not None and torch.is_grad_enabled():
            counting = run.expert_load.counting(*self._documents_that_count(micro_batch))
        with counting:
            y: Tensor = run(x, part.positions, part.cu_seqlens)
        return y

    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """Counts the loss of a micro-batch; what is to be differentiated."""
        step = self.step
        step.hook.before_criterion()
        valid = self.valid.clamp(min=1)
        expected = step.optimizer.scale_loss(torch.ones_like(valid)) / valid
        loss = step.objective.loss(self, micro_batch, output, expected) / valid
        routers = step.chunks[-1].routers
        if routers is not None and torch.is_grad_enabled():
            self.total += routers.end() / self.token_ranks
        step.hook.after_criterion()
        self.total += loss.detach()
        return step.optimizer.scale_loss(loss)

    @property
    def token_ranks(self) -> int:
        """The ranks that each compute losses of tokens of their own, of the same sequence."""
        step = self.step
        return 1 if step.chunks[-1].splits_logits else step.mesh[Axis.TENSOR].size

    def _begin_routing(self, routers: RouterLosses, micro_batch: int) -> None:
        if not torch.is_grad_enabled():
            routers.leave_out()
            return
        step = self.step
        mask, own = self._documents_that_count(micro_batch)
        weight = 1 / (len(self.batches) * step.mesh[Axis.DATA].size)
        scale = step.optimizer.scale_loss(torch.ones_like(self.valid))
        routers.begin(mask, own, weight=weight, scale=scale)

    def _documents_that_count(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Which tokens are of a document with a label: of the sequence, [B, S], and of the rank."""
        step, documents = self.step, self.documents(micro_batch)
        mask = own = self._arranged(micro_batch, (documents.num_labels > 0)[documents.numbers])
        if step.mesh.topology.mode.splits_sequence:  # in msp and fsp between the linears
            own = _own(mask, step.mesh[Axis.TENSOR])
        return mask, own

    def documents(self, micro_batch: int) -> Documents:
        """Those of a micro-batch as it was read."""
        if micro_batch not in self._documents:
            self._documents[micro_batch] = Documents.of(self.batches[micro_batch])
        return self._documents[micro_batch]

    def labels(self, micro_batch: int) -> Tensor:
        """Those of the tokens whose losses this rank computes, [B, n]."""
        whole = self.step.chunks[-1].splits_logits
        return (self._batches if whole else self._parts)[micro_batch].labels

    def as_labels(self, micro_batch: int, x: Tensor) -> Tensor:
        """What belongs to the tokens of a micro-batch as it was read, where `labels` has them."""
        step, x = self.step, self._arranged(micro_batch, x)
        if not step.mesh.topology.mode.slices_batch or step.chunks[-1].splits_logits:
            return x
        return _own(x, step.mesh[Axis.TENSOR])

    def _arranged(self, micro_batch: int, x: Tensor) -> Tensor:
        """What belongs to the tokens of a micro-batch, [B, S, ..], as `arrange` brings them."""
        bounds = self.batches[micro_batch].cu_seqlens
        (x,) = self.step.built.sequence.arranged([x], bounds)
        return x


def arrange(batch: MicroBatch, ranks: SequenceRanks) -> MicroBatch:
    """Whole rows, of which each rank's tokens are together; `cu_seqlens` stays that of the rows."""
    rows = (batch.tokens, batch.labels, batch.positions)
    tokens, labels, positions = ranks.arranged(rows, batch.cu_seqlens)
    return MicroBatch(tokens, labels, positions, batch.cu_seqlens)


def slice_sequence(batch: MicroBatch, channel: Channel) -> MicroBatch:
    """This rank's S/p tokens of each row; `cu_seqlens` stays that of the full row."""

    rows = (batch.tokens, batch.labels, batch.positions)
    tokens, labels, positions = (_own(x, channel).contiguous() for x in rows)
    return MicroBatch(tokens, labels, positions, batch.cu_seqlens)


def _own(x: Tensor, channel: Channel) -> Tensor:
    """This rank's part of each row: [B, S, ..] -> [B, S/p, ..]."""
    return x.chunk(channel.size, dim=1)[channel.rank]
