"""Rules for per-token results of logits, such as log-probabilities, and for their gradients.

B batch, n tokens, V logits of a token, V' those of a rank, K results of a token
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.comm import Channel
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.compiled import widened
from isp.core.layers.vocab_loss import IGNORED, places_of

__all__ = [
    "AllLogits",
    "DivergenceRules",
    "PickedLogits",
    "ResultRules",
    "TokenScoreRules",
    "TopLogits",
]

_LOGITS, _MAX, _SUM = (Tag(Purpose.LOSS, tensor=f"results.{x}") for x in ("logits", "max", "sum"))


@dataclass(frozen=True)
class ResultRules(ABC):
    """A per-token result of logits and its gradient, computed in float32 or wider."""

    channel: Channel
    """The ranks over which the logits of a token are split."""
    first: int
    """The vocabulary entry of this rank's first logit."""
    vocab_size: int

    needs_logits = False
    """True if `gradient` reads the logits, False if only their shape and dtype."""

    @property
    def num_buffers(self) -> int:
        """Number of tensors of the logits' size that exist at a time, the logits included."""
        return 1

    @abstractmethod
    def find(self, logits: Tensor, beside: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """Return the results [B, n, K], and a tensor to save for `gradient` (or None).

        `logits` [B, n, V'] may be overwritten; `beside` [B, n, ..] holds further inputs of each
        token, such as its target.
        """

    @abstractmethod
    def gradient(self, logits: Tensor, beside: Tensor, kept: Any, given: Tensor, /) -> Tensor:
        """Return the gradient of the logits, in their dtype, perhaps overwriting them.

        `kept` is the tensor that `find` saved; `given` is the gradient of the results.
        """

    def _picked(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits of `tokens` [.., K], whichever rank holds them."""
        local, held = places_of(tokens, self.first, logits.shape[-1])
        own = logits.gather(-1, local) if logits.shape[-1] else logits.new_zeros(tokens.shape)
        return self.channel.all_reduce(widened(own).masked_fill(~held, 0), tag=_LOGITS).wait()

    def _add_to_picked(self, gradient: Tensor, tokens: Tensor, given: Tensor) -> Tensor:
        """Add the gradients `given` [.., K] of picked logits to `gradient` [.., V'], in place."""
        local, held = places_of(tokens, self.first, gradient.shape[-1])
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, local, given.masked_fill(~held, 0))
        return gradient


class AllLogits(ResultRules):
    """All V logits of a token."""

    def find(self, logits: Tensor, beside: Tensor) -> tuple[Tensor, None]:
        each = math.ceil(self.vocab_size / self.channel.size)
        own = F.pad(widened(logits), (0, each - logits.shape[-1]))
        return self.channel.all_gather(own, -1, tag=_LOGITS).wait()[..., : self.vocab_size], None

    def gradient(self, logits: Tensor, beside: Tensor, kept: None, given: Tensor) -> Tensor:
        return given[..., self.first : self.first + logits.shape[-1]].to(logits.dtype)


class PickedLogits(ResultRules):
    """The logits of the vocabulary entries `beside` [.., K]."""

    def find(self, logits: Tensor, beside: Tensor) -> tuple[Tensor, None]:
        return self._picked(logits, beside), None

    def gradient(self, logits: Tensor, beside: Tensor, kept: None, given: Tensor) -> Tensor:
        zeros = given.new_zeros(logits.shape)
        return self._add_to_picked(zeros, beside, given).to(logits.dtype)


@dataclass(frozen=True)
class TopLogits(ResultRules):
    """The `top` = K/2 largest logits, followed by their vocabulary entries, without a gradient.

    The entries are numbers of the results' dtype, float32 or wider: exact up to 2^24.
    """

    top: int

    def find(self, logits: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = logits.topk(min(self.top, logits.shape[-1]), -1)
        missing = (0, self.top - values.shape[-1])
        values = self._joined(F.pad(widened(values), missing, value=-math.inf))
        tokens = self._joined(F.pad(tokens + self.first, missing))
        values, order = values.topk(self.top, -1)
        tokens = tokens.gather(-1, order)
        return torch.cat([values, tokens.to(values.dtype)], -1), tokens

    def gradient(self, logits: Tensor, beside: Tensor, kept: Tensor, given: Tensor) -> Tensor:
        zeros = given.new_zeros(logits.shape)
        return self._add_to_picked(zeros, kept, given[..., : self.top]).to(logits.dtype)

    def _joined(self, x: Tensor) -> Tensor:
        """Return x of all ranks, concatenated along the last dim."""
        return self.channel.all_gather(x, -1, tag=_LOGITS).wait()


@dataclass(frozen=True)
class _Scaled(ResultRules):
    """Results of logits / `temperature`."""

    temperature: float = 1.0

    needs_logits = True

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return logits / temperature, in place if they are float32 or wider."""
        wide = widened(logits)
        return wide if self.temperature == 1 else wide.div_(self.temperature)


@dataclass(frozen=True)
class TokenScoreRules(_Scaled):
    """Scores of targets [B, n]: log-probability, log-sum-exp and, with `entropy`, the entropy.

    All are 0, without a gradient, where the target is `IGNORED`.
    """

    entropy: bool = False

    @property
    def num_buffers(self) -> int:
        return 2 if self.entropy else 1

    def find(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores; save all but the log-probability, unmasked, for `gradient`."""
        z, channel = self._scaled(logits), self.channel
        top = channel.all_reduce(z.amax(-1), op="max", tag=_MAX).wait()
        z = z.sub_(top.unsqueeze(-1))
        local, held = places_of(target, self.first, z.shape[-1])
        parts = [z.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~held, 0)]
        if self.entropy:
            exp = z.exp()
            parts.append(torch.linalg.vecdot(exp, z))
        else:
            exp = z.exp_()
        own, *mean, total = channel.all_reduce(torch.stack([*parts, exp.sum(-1)]), tag=_SUM).wait()
        log_total = total.log()
        found = [own - log_total, log_total + top, *(log_total - part / total for part in mean)]
        every = torch.stack(found, -1)
        return every.masked_fill((target == IGNORED).unsqueeze(-1), 0), every[..., 1:]

    def gradient(self, logits: Tensor, target: Tensor, known: Tensor, given: Tensor) -> Tensor:
        """Return the gradient of the logits, in place; `known` is the tensor that `find` saved."""
        z = self._scaled(logits).sub_(known[..., :1])  # log-probabilities
        given = given.masked_fill((target == IGNORED).unsqueeze(-1), 0) / self.temperature
        of_log_prob, of_lse = given[..., :1], given[..., 1:2]
        if self.entropy:
            entropy, of_entropy = known[..., 1:], given[..., 2:]
            exp = z.exp()
            z = z.add_(entropy).mul_(-of_entropy).add_(of_lse - of_log_prob).mul_(exp)
        else:
            z = z.exp_().mul_(of_lse - of_log_prob)
        z = self._add_to_picked(z, target.unsqueeze(-1), of_log_prob)
        return z if z.dtype == logits.dtype else logits.copy_(z)


class DivergenceRules(_Scaled):
    """The Kullback-Leibler divergence sum q log(q / p) from a teacher's distribution, [B, n, 1].

    p is the softmax of logits / `temperature`; q [B, n, K] are the teacher's probabilities of its
    K most likely tokens. `beside` [B, n, 2 K] holds log q, then these tokens.
    """

    def find(self, logits: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergences and the log-sum-exps of logits / temperature, [B, n, 1] each."""
        log_q, tokens = self._teacher(beside)
        z = self._scaled(logits)
        picked = self._picked(z, tokens)
        top = self.channel.all_reduce(z.amax(-1, keepdim=True), op="max", tag=_MAX).wait()
        total = z.sub_(top).exp_().sum(-1, keepdim=True)
        lse = self.channel.all_reduce(total, tag=_SUM).wait().log() + top
        found = (log_q.exp() * (log_q - picked + lse)).sum(-1, keepdim=True)
        return found, lse

    def gradient(self, logits: Tensor, beside: Tensor, lse: Tensor, given: Tensor) -> Tensor:
        log_q, tokens = self._teacher(beside)
        q = log_q.exp()
        given = given / self.temperature
        z = self._scaled(logits).sub_(lse).exp_()
        z = z.mul_(given * q.sum(-1, keepdim=True))
        z = self._add_to_picked(z, tokens, -given * q)
        return z if z.dtype == logits.dtype else logits.copy_(z)

    def _teacher(self, beside: Tensor) -> tuple[Tensor, Tensor]:
        log_q, tokens = beside.chunk(2, -1)
        return log_q, tokens.long()
