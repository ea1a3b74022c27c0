"""`StepWork`: the micro-batches of a step on this rank, and how its model chunks compute them.

B batch, S sequence, S' tokens of a sequence that a rank computes (S or S/p), D hidden size,
n tokens whose losses this rank computes, d documents of a micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel, Mesh, pinned_memory
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis
from isp.core.micro_batch import MicroBatch
from isp.core.optim.zero1 import Zero1Optimizer
from isp.core.pipeline.stage import ISPCommunicatorSchedulerHook
from isp.models.build import BuiltModel
from isp.models.moe.router_losses import RouterLosses

__all__ = ["Documents", "StepParts", "StepWork", "arrange", "slice_sequence"]


class Documents(NamedTuple):
    """The documents of a micro-batch, in the order of its tokens."""

    numbers: Tensor
    """For each token, the index of its document in the micro-batch; int64, [B, S]."""
    num_labels: Tensor
    """Number of labels in each of the d documents, [d]; 0 for padding."""

    @classmethod
    def of(cls, batch: MicroBatch) -> Documents:
        """Return the documents of `batch`: those of `cu_seqlens` if it is packed, else its rows."""
        rows, tokens = batch.labels.shape
        lengths = torch.tensor([tokens]).repeat(rows)  # [d], on the host
        if batch.cu_seqlens is not None:
            lengths = batch.cu_seqlens.diff().long()
        numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
        # `send` copies without making the host wait.
        numbers = pinned_memory.send(numbers, batch.labels.device)
        labelled = (batch.labels != IGNORED).long().flatten()
        num_labels = labelled.new_zeros(len(lengths)).index_add(0, numbers, labelled)
        return cls(numbers.view_as(batch.labels), num_labels)

    def num_pairs(self) -> Tensor:
        """Return the number of pairs of answers, []: two consecutive documents with labels each."""
        return (self.num_labels > 0).sum() // 2

    def margins(self, gains: Tensor) -> Tensor:
        """Return the gain of each pair's first document minus that of its second document, [d].

        `gains` [d] has a number for each document. Entry i of the result is for pair i. If the last
        document has no partner, its gain follows after the pairs; all further entries are 0.
        """
        labelled = self.num_labels > 0
        # Only documents with labels are in pairs, so only these are counted. The clamp makes an
        # index of leading documents without labels valid; their gain is multiplied by 0.
        place = (labelled.cumsum(0) - 1).clamp(min=0)
        signed = gains * (1 - 2 * (place % 2)) * labelled
        return torch.zeros_like(gains).index_add(0, place // 2, signed)


class StepParts(NamedTuple):
    """Objects that the micro-batches of a step need on this rank: model, ranks, optimizer, hook."""

    built: BuiltModel
    mesh: Mesh
    optimizer: Zero1Optimizer
    """The optimizer, which has the loss scale."""
    hook: ISPCommunicatorSchedulerHook
    """Reports the progress of the step to the communicator and to the log of transfers."""


class StepWork(ABC):
    """The micro-batches of a step on this rank, for a `Pipeline` or a loop without stages.

    A subclass defines the loss of a micro-batch.
    """

    def __init__(self, parts: StepParts, batches: Sequence[MicroBatch]) -> None:
        self.built, self.mesh, self.optimizer, self.hook = parts
        self.chunks = self.built.chunks
        """The model chunks of this rank; the last chunk of the last stage computes logits."""
        self.batches = batches
        """The micro-batches as read: whole sequences, in their original order."""
        self._batches = [arrange(b, self.built.sequence) for b in batches]
        self._parts = list(self._batches)
        # In isp mode, a rank passes only its own tokens to the model. In the other modes it passes
        # all tokens; in msp and fsp the embedding then splits its output over the ranks.
        if self.mesh.topology.mode.slices_batch:
            self._parts = [slice_sequence(b, self.mesh[Axis.TENSOR]) for b in self._batches]
        self._documents: dict[int, Documents] = {}
        self.tokens = [part.tokens for part in self._parts]
        """For each micro-batch, the tokens [B, S'] that this rank passes to the model."""

    def between(self, micro_batch: int) -> Tensor:
        """Return a new tensor [B, S', D], to receive hidden states of another stage in."""
        rows, tokens = self.tokens[micro_batch].shape
        mode = self.mesh.topology.mode
        if mode.splits_sequence and not mode.slices_batch:
            # In msp and fsp, the ranks have all tokens as inputs, but between stages each rank has
            # the hidden states of 1/p of the tokens.
            tokens //= self.mesh[Axis.TENSOR].size
        weight = self.built.parameters[0].parameter
        return weight.new_empty(rows, tokens, self.built.model.hidden_size)

    def forward(self, chunk: int, micro_batch: int, x: Tensor) -> Tensor:
        """Return the output of this rank's model chunk number `chunk`; the first takes tokens x."""
        part, run = self._parts[micro_batch], self.chunks[chunk]
        if run.routers is not None:
            self._begin_routing(run.routers, micro_batch)
        counting: AbstractContextManager[None] = nullcontext()
        if run.expert_load is not None and torch.is_grad_enabled():
            counting = run.expert_load.counting(*self._documents_that_count(micro_batch))
        with counting:
            y: Tensor = run(x, part.positions, part.cu_seqlens)
        return y

    @abstractmethod
    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """Return the scalar to call backward of, from the last chunk's output; [], float64.

        It is multiplied by the loss scale. Only the last stage calls this.
        """

    @property
    def num_loss_parts(self) -> int:
        """Number of ranks that split a sequence's losses by tokens; 1: each rank has all losses."""
        return 1 if self.chunks[-1].splits_logits else self.mesh[Axis.TENSOR].size

    def _begin_routing(self, routers: RouterLosses, micro_batch: int) -> None:
        """Begin the router losses of a micro-batch; without gradients, leave them out."""
        if not torch.is_grad_enabled():
            routers.leave_out()
            return
        mask, own = self._documents_that_count(micro_batch)
        # A router loss is a mean over one micro-batch, and the step's is the mean of these.
        weight = 1 / (len(self.batches) * self.mesh[Axis.DATA].size)
        one = torch.ones((), dtype=torch.float64, device=mask.device)
        scale = self.optimizer.scale_loss(one)
        routers.begin(mask, own, weight=weight, scale=scale)

    def _documents_that_count(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return two masks of the tokens in documents with a label, as padding has none.

        The first is of the sequence [B, S], the second of this rank's tokens, [B, S/p] if the
        sequence is split.
        """
        documents = self.documents(micro_batch)
        mask = own = self.arranged(micro_batch, (documents.num_labels > 0)[documents.numbers])
        # If the mode splits the sequence, experts are called with this rank's tokens. This includes
        # msp and fsp, where only the embedding reads the whole sequence.
        if self.mesh.topology.mode.splits_sequence:
            own = _own(mask, self.mesh[Axis.TENSOR])
        return mask, own

    def documents(self, micro_batch: int) -> Documents:
        """Return the documents of a micro-batch, in its original order; from a cache."""
        if micro_batch not in self._documents:
            self._documents[micro_batch] = Documents.of(self.batches[micro_batch])
        return self._documents[micro_batch]

    def labels(self, micro_batch: int) -> Tensor:
        """Return the labels of the tokens whose losses this rank computes, [B, n]."""
        whole = self.chunks[-1].splits_logits
        return (self._batches if whole else self._parts)[micro_batch].labels

    def as_labels(self, micro_batch: int, x: Tensor) -> Tensor:
        """Return the entries of x for the tokens of `labels`, in the same order: [B, S] -> [B, n].

        x has a value for each token of a micro-batch in its original order.
        """
        x = self.arranged(micro_batch, x)
        if not self.mesh.topology.mode.slices_batch or self.chunks[-1].splits_logits:
            return x
        return _own(x, self.mesh[Axis.TENSOR])

    def arranged(self, micro_batch: int, x: Tensor) -> Tensor:
        """Return x [B, S, ..], which has a value for each token as read, in the order of `arrange`.

        For the shape of the result, see `SequenceRanks.arranged`.
        """
        bounds = self.batches[micro_batch].cu_seqlens
        (x,) = self.built.sequence.arranged([x], bounds)
        return x


def arrange(batch: MicroBatch, ranks: SequenceRanks) -> MicroBatch:
    """Return whole rows, reordered so that each rank's tokens are contiguous.

    If there are context ranks, packed rows are joined to one row. `cu_seqlens` is unchanged: it has
    the bounds of documents in the original order.
    """
    rows = (batch.tokens, batch.labels, batch.positions)
    tokens, labels, positions = ranks.arranged(rows, batch.cu_seqlens)
    return MicroBatch(tokens, labels, positions, batch.cu_seqlens)


def slice_sequence(batch: MicroBatch, channel: Channel) -> MicroBatch:
    """Return this rank's S/p tokens of each row.

    `cu_seqlens` is unchanged: it has the bounds of documents in whole rows.
    """
    rows = (batch.tokens, batch.labels, batch.positions)
    tokens, labels, positions = (_own(x, channel).contiguous() for x in rows)
    return MicroBatch(tokens, labels, positions, batch.cu_seqlens)


def _own(x: Tensor, channel: Channel) -> Tensor:
    """Return this rank's part of each row: [B, S, ..] -> [B, S/p, ..]."""
    return x.chunk(channel.size, dim=1)[channel.rank]
