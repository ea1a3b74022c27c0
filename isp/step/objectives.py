"""Objectives of a step other than the cross-entropy of tokens: pairs of answers, distillation.

B batch, n tokens whose losses this rank computes, d documents of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.config.sections import DistillConfig, DPOConfig
from isp.core.comm.tag import Tag
from isp.core.layers.token_results import AllLogits, DivergenceRules, TokenScoreRules, TopLogits
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis
from isp.core.micro_batch import MicroBatch
from isp.step.step_work import Documents, StepWork
from isp.step.train_step import TokenLoss, TrainStep

__all__ = ["DistillLoss", "PreferenceLoss", "RewardLoss"]


class _SecondModel(TokenLoss):
    """The results of a frozen second model, such as a teacher, for each micro-batch of a step.

    It is the objective of the second model's `TrainStep`, so that each forward of that step calls
    `loss` here, which keeps the result.
    """

    def __init__(self, step: TrainStep, find: Callable[[StepWork, int, Tensor], Tensor]) -> None:
        """Compute results by `find(work, micro_batch, output)`, from the last chunk's output."""
        self._step, self._find = step, find
        self.of_batch: dict[int, Tensor] = {}
        """Results by number of micro-batch; filled on the last pipeline stage only."""
        step.objective = self

    def see(self, batches: Sequence[MicroBatch]) -> None:
        """Run the model on `batches` and keep their results instead of the previous ones."""
        self.of_batch.clear()
        self._step.see(batches)

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        """Keep the result of a micro-batch; return a loss of 0."""
        self.of_batch[micro_batch] = self._find(work, micro_batch, output)
        return torch.zeros_like(expected)


class _PairLoss(TokenLoss):
    """The mean loss over pairs of documents: the preferred answer to a prompt, then another answer.

    All ranks of a sequence compute the same loss, each with the gradient of its own tokens.
    """

    def gains(self, work: StepWork, micro_batch: int, output: Tensor) -> Tensor:
        """Return a number for each of the d documents, such as its reward: [d].

        The loss of a pair compares the numbers of its two documents.
        """
        raise NotImplementedError

    def losses(self, margins: Tensor) -> Tensor:
        """Return the loss of each pair of documents, [d]; d is the number of documents.

        `margins` [d]: for each pair, the gain of its preferred answer minus that of the other
        answer. There are fewer pairs than documents: elements after the last pair are not used.
        """
        raise NotImplementedError

    def count(self, batch: MicroBatch) -> Tensor:
        """Return the number of pairs of answers in a micro-batch, []."""
        return Documents.of(batch).num_pairs()

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        """Return this rank's part of the sum of the pairs' losses; [], float64."""
        documents = work.documents(micro_batch)
        losses = self.losses(documents.margins(self.gains(work, micro_batch, output)))
        is_pair = torch.arange(len(losses), device=losses.device) < documents.num_pairs()
        loss = (losses * is_pair).sum().double()
        # All p ranks of a sequence have the same value, and values are summed over ranks: each
        # reports 1/p of it. The gradient stays whole, as a rank's is that of its own tokens.
        return loss + (1 / work.num_loss_parts - 1) * loss.detach()


class PreferenceLoss(_PairLoss):
    """Direct preference optimization (DPO) against a frozen `reference` model.

    Source: Rafailov et al. 2023, "Direct Preference Optimization"; losses as TRL defines them.
    """

    def __init__(self, config: DPOConfig, reference: TrainStep) -> None:
        self._config, self._reference = config, _SecondModel(reference, self._log_probs)

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Compute the reference's log-probabilities of `batches`."""
        self._reference.see(batches)

    def gains(self, work: StepWork, micro_batch: int, output: Tensor) -> Tensor:
        """Return the model's log-probability of each document minus the reference's, [d]."""
        before = self._reference.of_batch[micro_batch]
        return self._log_probs(work, micro_batch, output) - before

    def losses(self, margins: Tensor) -> Tensor:
        """Return the losses [d]: for `loss_type="ipo"` IPO's square, else DPO's with smoothing."""
        beta, smoothing = self._config.beta, self._config.label_smoothing
        if self._config.loss_type == "ipo":
            return (margins - 1 / (2 * beta)) ** 2
        right, wrong = F.logsigmoid(beta * margins), F.logsigmoid(-beta * margins)
        return -(1 - smoothing) * right - smoothing * wrong

    def _log_probs(self, work: StepWork, micro_batch: int, output: Tensor) -> Tensor:
        """Return the log-probability of each document's labels, [d].

        It is summed over the labels for `loss_type="sigmoid"`, and averaged for other types.
        """
        labels = work.labels(micro_batch)
        scores = work.chunks[-1].results(output, labels, TokenScoreRules())[..., 0]
        found = _summed(work, micro_batch, scores)
        if self._config.loss_type == "sigmoid":
            return found
        return found / work.documents(micro_batch).num_labels.clamp(min=1)


class RewardLoss(_PairLoss):
    """The Bradley-Terry loss, -log sigmoid(difference of a pair's rewards).

    The reward of a document is the one logit of its last token. Source: TRL's reward trainer.
    """

    def gains(self, work: StepWork, micro_batch: int, output: Tensor) -> Tensor:
        """Return the reward of each document, [d]."""
        numbers = work.documents(micro_batch).numbers
        # [B, S]: True at the last token of a document, where the next token is of another one.
        last = numbers.diff(append=numbers[:, -1:] + 1) > 0
        rewards = work.chunks[-1].results(output, work.labels(micro_batch), AllLogits())[..., 0]
        return _summed(work, micro_batch, rewards * work.as_labels(micro_batch, last))

    def losses(self, margins: Tensor) -> Tensor:
        """Return -log sigmoid of the differences of rewards, [d]."""
        return -F.logsigmoid(margins)


def _summed(work: StepWork, index: int, scores: Tensor) -> Tensor:
    """Return the sum of `scores` [B, n] over the tokens of each document, [d].

    The sums are the same on all ranks of the sequence; backward gives each rank the gradient of its
    own tokens.
    """
    documents = work.documents(index)
    numbers = work.as_labels(index, documents.numbers).flatten()
    own = scores.new_zeros(len(documents.num_labels)).index_add(0, numbers, scores.flatten())
    if work.num_loss_parts == 1:
        return own
    tensor, tag = work.mesh[Axis.TENSOR], Tag(tensor="documents")
    every = tensor.all_reduce(own.detach().clone(), tag=tag).wait()
    # The value of the sum over ranks with the gradient of this rank's part: all ranks compute the
    # same loss, so an all-reduce in backward would count each gradient p times.
    return own + (every - own.detach())


class DistillLoss(TokenLoss):
    """The mean divergence from a teacher's distribution, over tokens with a label.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", without the factor
    of the squared temperature, as TRL has it.
    """

    def __init__(self, config: DistillConfig, teacher: TrainStep) -> None:
        self._config, self._teacher = config, _SecondModel(teacher, self._top)

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Compute the teacher's most likely tokens of `batches`."""
        self._teacher.see(batches)

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        """Return the sum of the divergences of this rank's tokens with a label; [], float64."""
        divergence = DivergenceRules(self._config.temperature)
        inputs = self._teacher.of_batch[micro_batch]
        found = work.chunks[-1].results(output, inputs, divergence)[..., 0]
        return (found * (work.labels(micro_batch) != IGNORED)).sum().double()

    def _top(self, work: StepWork, micro_batch: int, output: Tensor) -> Tensor:
        """Return log q of the teacher's `top_k` most likely tokens, then the tokens.

        [B, n, 2 top_k]; q is normalized over these tokens.
        """
        top_k, labels = self._config.top_k, work.labels(micro_batch)
        found = work.chunks[-1].results(output, labels, TopLogits(top_k))
        logits, tokens = found.split(top_k, -1)
        log_q = (logits / self._config.temperature).log_softmax(-1)
        return torch.cat([log_q, tokens], -1)
