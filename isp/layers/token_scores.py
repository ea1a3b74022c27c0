"""Log-probability, log-sum-exp and entropy of each token: a `ResultRules`.

B batch, n tokens, V' the logits of a rank. Scores are [.., K]: the log-probability, the log-sum-exp
and, if asked for, the entropy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isp.comm import Channel
from isp.comm.tag import Purpose, Tag
from isp.layers.loss import IGNORED, places_of

__all__ = ["TokenScoreRules", "scaled_logits"]

_MAX, _SUM = (Tag(Purpose.LOSS, tensor=f"scores.{part}") for part in ("max", "sum"))


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature in float32 at least, in their place if they are that wide."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1 else wide.div_(temperature)


class TokenScoreRules(NamedTuple):
    """How logits [B, n, V'] and targets [B, n] are scored: [B, n, K].

    All are of logits / `temperature`, in float32 at least, and 0 without a gradient where the
    target is `IGNORED`.
    """

    channel: Channel
    """The ranks over which the logits of a token are split."""
    first: int
    """The vocabulary entry of this rank's first logit."""
    vocab_size: int
    temperature: float = 1.0
    entropy: bool = False
    needs_logits: bool = True

    @property
    def num_buffers(self) -> int:
        return 2 if self.entropy else 1

    def find(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The scores, and of all but the log-probability those of tokens without a label, too."""
        z, channel = scaled_logits(logits, self.temperature), self.channel
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
        """That of the logits, in their place; `known` is what `find` has found beside."""
        z = scaled_logits(logits, self.temperature).sub_(known[..., :1])  # log-probabilities
        given = given.masked_fill((target == IGNORED).unsqueeze(-1), 0) / self.temperature
        of_log_prob, of_lse = given[..., :1], given[..., 1:2]
        if self.entropy:
            entropy, of_entropy = known[..., 1:], given[..., 2:]
            exp = z.exp()
            z = z.add_(entropy).mul_(-of_entropy).add_(of_lse - of_log_prob).mul_(exp)
        else:
            z = z.exp_().mul_(of_lse - of_log_prob)
        local, held = places_of(target, self.first, z.shape[-1])
        z.scatter_add_(-1, local.unsqueeze(-1), of_log_prob * held.unsqueeze(-1))
        return z if z.dtype == logits.dtype else logits.copy_(z)
