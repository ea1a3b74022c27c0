"""The divergence of each token's distribution from a teacher's: a `ResultRules`.

B batch, n tokens, V' the logits of a rank, K tokens that the teacher holds most likely
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from isp.comm import Channel
from isp.comm.tag import Purpose, Tag
from isp.layers.loss import places_of
from isp.layers.token_logits import PickedLogits
from isp.layers.token_scores import scaled_logits

__all__ = ["DivergenceRules"]

_MAX, _SUM = (Tag(Purpose.LOSS, tensor=f"divergence.{part}") for part in ("max", "sum"))


class DivergenceRules(NamedTuple):
    """Kullback-Leibler divergence sum q log(q / p), [B, n, 1], in float32 at least.

    p is the softmax of logits / `temperature`, q [B, n, K] the teacher's. Beside the logits are
    log q and the tokens that it is of, [B, n, 2 K].
    """

    channel: Channel
    """The ranks over which the logits of a token are split."""
    first: int
    """The vocabulary entry of this rank's first logit."""
    vocab_size: int
    temperature: float
    needs_logits: bool = True
    num_buffers: int = 1

    def find(self, logits: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        """The divergences, and the log-sum-exps of logits / temperature, [B, n, 1] each."""
        log_q, tokens = self._teacher(beside)
        z = scaled_logits(logits, self.temperature)
        picked, _ = PickedLogits(*self[:3]).find(z, tokens)
        top = self.channel.all_reduce(z.amax(-1, keepdim=True), op="max", tag=_MAX).wait()
        total = z.sub_(top).exp_().sum(-1, keepdim=True)
        lse = self.channel.all_reduce(total, tag=_SUM).wait().log() + top
        found = (log_q.exp() * (log_q - picked + lse)).sum(-1, keepdim=True)
        return found, lse

    def gradient(self, logits: Tensor, beside: Tensor, lse: Tensor, given: Tensor) -> Tensor:
        log_q, tokens = self._teacher(beside)
        q = log_q.exp()
        given = given / self.temperature
        z = scaled_logits(logits, self.temperature).sub_(lse).exp_()
        z = z.mul_(given * q.sum(-1, keepdim=True))
        local, held = places_of(tokens, self.first, z.shape[-1])
        if z.shape[-1]:
            z.scatter_add_(-1, local, (-given * q).masked_fill(~held, 0))
        return z if z.dtype == logits.dtype else logits.copy_(z)

    def _teacher(self, beside: Tensor) -> tuple[Tensor, Tensor]:
        log_q, tokens = beside.chunk(2, -1)
        return log_q, tokens.long()
