"""What the loss of a step is: of tokens, or of pairs of answers.

B batch, n tokens whose losses a rank computes, d documents of a micro-batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.comm import Channel, host_memory
from isp.comm.tag import Tag
from isp.data.batch import MicroBatch
from isp.layers.loss import IGNORED
from isp.layers.token_divergence import DivergenceRules
from isp.layers.token_logits import AllLogits, TopLogits
from isp.layers.token_scores import TokenScoreRules
from isp.parallel import Axis
from isp.settings import DistillConfig, DPOConfig

if TYPE_CHECKING:
    from isp.train.step import TrainStep
    from isp.train.step_work import StepWork

__all__ = ["DistillLoss", "Documents", "PreferenceLoss", "RewardLoss", "TokenLoss"]


class TokenLoss:
    """The mean cross-entropy of the tokens that have a label: what a step's loss is by default."""

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Called before the passes of `batches`, of training or of an evaluation."""

    def count(self, batch: MicroBatch) -> Tensor:
        """What the loss of a micro-batch, all of its tokens, is the sum of; [], whole number."""
        return (batch.labels != IGNORED).sum()

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        """This rank's part of the sum, of what the last chunk gave; [].

        `expected` is the gradient that it is going to have.
        """
        return work.step.chunks[-1].loss(output, work.labels(micro_batch), expected)


class Documents(NamedTuple):
    """The documents of a micro-batch, in its order."""

    numbers: Tensor
    """That of each token, int64, of the shape of the tokens."""
    num_labels: Tensor
    """[d]; none of padding."""

    @classmethod
    def of(cls, batch: MicroBatch) -> Documents:
        rows, tokens = batch.labels.shape
        lengths = torch.tensor([tokens]).repeat(rows)
        if batch.cu_seqlens is not None:
            lengths = batch.cu_seqlens.diff().long()
        numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
        numbers = host_memory.send(numbers, batch.labels.device)
        labelled = (batch.labels != IGNORED).long().flatten()
        num_labels = labelled.new_zeros(len(lengths)).index_add(0, numbers, labelled)
        return cls(numbers.view_as(batch.labels), num_labels)

    def num_pairs(self) -> Tensor:
        """The number of pairs, []; each is two documents that follow each other."""
        return (self.num_labels > 0).sum() // 2

    def margins(self, gains: Tensor) -> Tensor:
        """What each pair's first document gains more than its second one, [d]; 0 of others."""
        labelled = self.num_labels > 0
        place = (labelled.cumsum(0) - 1).clamp(min=0)
        signed = gains * (1 - 2 * (place % 2)) * labelled
        return torch.zeros_like(gains).index_add(0, place // 2, signed)


class _DocumentScores(TokenLoss):
    """The log-probability of each document's labels, kept; no loss."""

    def __init__(self) -> None:
        self.of_batch: dict[int, Tensor] = {}

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        documents = Documents.of(work.batches[micro_batch])
        self.of_batch[micro_batch] = _log_probs(work, micro_batch, output, documents)
        return torch.zeros_like(expected)


class PreferenceLoss(TokenLoss):
    """The mean loss of pairs of documents: the preferred answer to a prompt, and another one.

    `reference` has the weights that training does not leave far behind. All ranks of a sequence
    compute the same loss, each with the gradient of its own tokens.
    Source: Rafailov et al. 2023, "Direct Preference Optimization"; losses as TRL defines them.
    """

    def __init__(self, config: DPOConfig, reference: TrainStep) -> None:
        self._config, self._reference = config, reference
        self._before = _DocumentScores()
        reference.objective = self._before

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Score `batches` by the reference."""
        self._before.of_batch.clear()
        self._reference.evaluate([batches])

    def count(self, batch: MicroBatch) -> Tensor:
        return Documents.of(batch).num_pairs()

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        documents = Documents.of(work.batches[micro_batch])
        found = _log_probs(work, micro_batch, output, documents)
        gains = found - self._before.of_batch[micro_batch]
        if self._config.loss_type != "sigmoid":
            gains = gains / documents.num_labels.clamp(min=1)
        margins, beta, smoothing = (
            documents.margins(gains),
            self._config.beta,
            self._config.label_smoothing,
        )
        if self._config.loss_type == "ipo":
            losses = (margins - 1 / (2 * beta)) ** 2
        else:
            right, wrong = F.logsigmoid(beta * margins), F.logsigmoid(-beta * margins)
            losses = -(1 - smoothing) * right - smoothing * wrong
        return _of_pairs(work, losses, documents)


class RewardLoss(TokenLoss):
    """The mean of -log sigmoid(difference) of the rewards of pairs: of Bradley and Terry.

    The reward of a document is the one logit of its last token. Source: TRL's reward trainer.
    """

    def count(self, batch: MicroBatch) -> Tensor:
        return Documents.of(batch).num_pairs()

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        documents = Documents.of(work.batches[micro_batch])
        last = documents.numbers.diff(append=documents.numbers[:, -1:] + 1) > 0
        rewards = work.step.chunks[-1].results(output, work.labels(micro_batch), AllLogits)[..., 0]
        rewards = rewards * work.as_labels(micro_batch, last)
        margins = documents.margins(_summed(work, micro_batch, rewards, documents))
        return _of_pairs(work, -F.logsigmoid(margins), documents)


def _of_pairs(work: StepWork, losses: Tensor, documents: Documents) -> Tensor:
    """This rank's part of the sum of the losses [d], of which the first ones are of pairs; []."""
    is_pair = torch.arange(len(losses), device=losses.device) < documents.num_pairs()
    loss = (losses * is_pair).sum().double()
    ranks = work.token_ranks
    return loss + (1 / ranks - 1) * loss.detach()  # all ranks count it, and it counts once


def _log_probs(work: StepWork, index: int, output: Tensor, documents: Documents) -> Tensor:
    """Of the labels of each document, summed, the same on all ranks of a sequence; [d]."""
    step, labels = work.step, work.labels(index)
    scores = step.chunks[-1].results(output, labels, TokenScoreRules.made)[..., 0]
    return _summed(work, index, scores, documents)


def _summed(work: StepWork, index: int, scores: Tensor, documents: Documents) -> Tensor:
    """What tokens [B, n] of each document have together, the same on all ranks; [d]."""
    step = work.step
    numbers = work.as_labels(index, documents.numbers).flatten()
    summed = scores.new_zeros(len(documents.num_labels))
    own = summed.index_add(0, numbers, scores.flatten())
    if work.token_ranks == 1:
        return own
    tag = Tag(tensor="log_probs")
    every = step.mesh[Axis.TENSOR].all_reduce(own.detach().clone(), tag=tag).wait()
    return own + (every - own.detach())


class _TeacherTokens(TokenLoss):
    """The most likely tokens of each token's distribution, kept; no loss."""

    def __init__(self, config: DistillConfig) -> None:
        self._config = config
        self.of_batch: dict[int, Tensor] = {}
        """log q and the tokens, [B, n, 2 top_k]."""

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        top_k = self._config.top_k

        def top(channel: Channel, first: int, _: int) -> TopLogits:
            return TopLogits(channel, first, top_k)

        labels = work.labels(micro_batch)
        logits, tokens = work.step.chunks[-1].results(output, labels, top).split(top_k, -1)
        log_q = (logits / self._config.temperature).log_softmax(-1)
        self.of_batch[micro_batch] = torch.cat([log_q, tokens], -1)
        return torch.zeros_like(expected)


class DistillLoss(TokenLoss):
    """The mean divergence from a teacher's distribution, of the tokens that have a label.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", without the factor
    of the squared temperature, as TRL has it.
    """

    def __init__(self, config: DistillConfig, teacher: TrainStep) -> None:
        self._config, self._teacher = config, teacher
        self._tokens = _TeacherTokens(config)
        teacher.objective = self._tokens

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Let the teacher see `batches`."""
        self._tokens.of_batch.clear()
        self._teacher.evaluate([batches])

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        temperature = self._config.temperature

        def divergence(channel: Channel, first: int, _: int) -> DivergenceRules:
            return DivergenceRules(temperature, channel, first)

        beside = self._tokens.of_batch[micro_batch]
        found = work.step.chunks[-1].results(output, beside, divergence)[..., 0]
        return (found * (work.labels(micro_batch) != IGNORED)).sum().double()
