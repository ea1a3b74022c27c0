"""What the loss of a step is: of tokens, or of pairs of answers.

B batch, n tokens whose losses a rank computes, d documents of a micro-batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.config.sections import DistillConfig, DPOConfig
from isp.core.comm.tag import Tag
from isp.core.layers.token_results import AllLogits, DivergenceRules, TokenScoreRules, TopLogits
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis
from isp.core.micro_batch import MicroBatch
from isp.step.train_step import Documents, StepWork, TokenLoss, TrainStep

__all__ = ["DistillLoss", "PreferenceLoss", "RewardLoss"]


class _SecondModel(TokenLoss):
    """What a frozen model finds of each micro-batch, kept; no loss."""

    def __init__(self, step: TrainStep, find: Callable[[StepWork, int, Tensor], Tensor]) -> None:
        """`find`: of the work, the number of a micro-batch, and what the last chunk gave."""
        self._step, self._find = step, find
        self.of_batch: dict[int, Tensor] = {}
        step.objective = self

    def see(self, batches: Sequence[MicroBatch]) -> None:
        """Find it of these, and forget that of others."""
        self.of_batch.clear()
        self._step.see(batches)

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        self.of_batch[micro_batch] = self._find(work, micro_batch, output)
        return torch.zeros_like(expected)


class _PairLoss(TokenLoss):
    """The mean loss of pairs of documents: the preferred answer to a prompt, and another one.

    All ranks of a sequence compute the same loss, each with the gradient of its own tokens.
    """

    def gains(self, work: StepWork, micro_batch: int, output: Tensor) -> Tensor:
        """What is compared of each document, [d]."""
        raise NotImplementedError

    def losses(self, margins: Tensor) -> Tensor:
        """Of what the preferred answers gain more, [d]."""
        raise NotImplementedError

    def count(self, batch: MicroBatch) -> Tensor:
        return Documents.of(batch).num_pairs()

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        documents = work.documents(micro_batch)
        losses = self.losses(documents.margins(self.gains(work, micro_batch, output)))
        is_pair = torch.arange(len(losses), device=losses.device) < documents.num_pairs()
        loss = (losses * is_pair).sum().double()
        # All ranks of the sequence count it, and it counts once.
        return loss + (1 / work.token_ranks - 1) * loss.detach()


class PreferenceLoss(_PairLoss):
    """Direct preference optimization, beside a `reference` that training does not leave far behind.

    Source: Rafailov et al. 2023, "Direct Preference Optimization"; losses as TRL defines them.
    """

    def __init__(self, config: DPOConfig, reference: TrainStep) -> None:
        self._config, self._reference = config, _SecondModel(reference, self._log_probs)

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Score `batches` by the reference."""
        self._reference.see(batches)

    def gains(self, work: StepWork, micro_batch: int, output: Tensor) -> Tensor:
        before = self._reference.of_batch[micro_batch]
        return self._log_probs(work, micro_batch, output) - before

    def losses(self, margins: Tensor) -> Tensor:
        beta, smoothing = self._config.beta, self._config.label_smoothing
        if self._config.loss_type == "ipo":
            return (margins - 1 / (2 * beta)) ** 2
        right, wrong = F.logsigmoid(beta * margins), F.logsigmoid(-beta * margins)
        return -(1 - smoothing) * right - smoothing * wrong

    def _log_probs(self, work: StepWork, micro_batch: int, output: Tensor) -> Tensor:
        """Of the labels of each document, their sum or, as the loss has it, their mean; [d]."""
        labels = work.labels(micro_batch)
        scores = work.step.chunks[-1].results(output, labels, TokenScoreRules)[..., 0]
        found = _summed(work, micro_batch, scores)
        if self._config.loss_type == "sigmoid":
            return found
        return found / work.documents(micro_batch).num_labels.clamp(min=1)


class RewardLoss(_PairLoss):
    """-log sigmoid(difference) of the rewards of pairs: of Bradley and Terry.

    The reward of a document is the one logit of its last token. Source: TRL's reward trainer.
    """

    def gains(self, work: StepWork, micro_batch: int, output: Tensor) -> Tensor:
        numbers = work.documents(micro_batch).numbers
        last = numbers.diff(append=numbers[:, -1:] + 1) > 0
        rewards = work.step.chunks[-1].results(output, work.labels(micro_batch), AllLogits)[..., 0]
        return _summed(work, micro_batch, rewards * work.as_labels(micro_batch, last))

    def losses(self, margins: Tensor) -> Tensor:
        return -F.logsigmoid(margins)


def _summed(work: StepWork, index: int, scores: Tensor) -> Tensor:
    """What tokens [B, n] of each document have together, the same on all ranks; [d]."""
    documents = work.documents(index)
    numbers = work.as_labels(index, documents.numbers).flatten()
    own = scores.new_zeros(len(documents.num_labels)).index_add(0, numbers, scores.flatten())
    if work.token_ranks == 1:
        return own
    tensor, tag = work.step.mesh[Axis.TENSOR], Tag(tensor="documents")
    every = tensor.all_reduce(own.detach().clone(), tag=tag).wait()
    return own + (every - own.detach())


class DistillLoss(TokenLoss):
    """The mean divergence from a teacher's distribution, of the tokens that have a label.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", without the factor
    of the squared temperature, as TRL has it.
    """

    def __init__(self, config: DistillConfig, teacher: TrainStep) -> None:
        self._config, self._teacher = config, _SecondModel(teacher, self._top)

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Let the teacher see `batches`."""
        self._teacher.see(batches)

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        divergence = partial(DivergenceRules, temperature=self._config.temperature)
        beside = self._teacher.of_batch[micro_batch]
        found = work.step.chunks[-1].results(output, beside, divergence)[..., 0]
        return (found * (work.labels(micro_batch) != IGNORED)).sum().double()

    def _top(self, work: StepWork, micro_batch: int, output: Tensor) -> Tensor:
        """log q of the teacher's most likely tokens, and these behind it, [B, n, 2 top_k]."""
        top_k, labels = self._config.top_k, work.labels(micro_batch)
        top = partial(TopLogits, top=top_k)
        logits, tokens = work.step.chunks[-1].results(output, labels, top).split(top_k, -1)
        log_q = (logits / self._config.temperature).log_softmax(-1)
        return torch.cat([log_q, tokens], -1)
