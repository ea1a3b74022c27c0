"""Cross-entropy over a vocabulary that is split over a group.

B batch, S sequence, V vocabulary; logits are [B, S, V/p], targets [B, S].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isp.comm import Channel

__all__ = ["IGNORED", "vocab_parallel_cross_entropy"]

IGNORED = -100
"""The target of a token that has no loss."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """forward   loss = log(sum exp(logits)) - logits[target], 0 for ignored targets
    backward  dlogits = (softmax - onehot(target)) * dloss

    Three reductions: the largest logit, the sum of exponentials, the target's logit. The softmax is
    computed in float32 at least, in the one buffer that backward then turns into the gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, channel: Channel) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        top = channel.all_reduce(logits.amax(-1).to(wide), op="max", label="loss.max").wait()
        shifted = logits.to(wide, copy=True).sub_(top.unsqueeze(-1))
        valid = target != IGNORED
        local = (target - first).masked_fill(~valid, -1)
        held = (local >= 0) & (local < logits.shape[-1])
        local = local.masked_fill(~held, 0).unsqueeze(-1)
        own = shifted.gather(-1, local).squeeze(-1).masked_fill(~held, 0)
        target_logit = channel.all_reduce(own, label="loss.target").wait()
        exp = shifted.exp_()
        total = channel.all_reduce(exp.sum(-1), label="loss.sum").wait()
        loss = (total.log() - target_logit).masked_fill(~valid, 0)
        ctx.save_for_backward(exp.div_(total.unsqueeze(-1)), local, held, valid)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        softmax, local, held, valid = ctx.saved_tensors
        grad = softmax.scatter_add(-1, local, -held.unsqueeze(-1).to(softmax.dtype))
        grad *= (dloss * valid).unsqueeze(-1)
        return grad.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, *, first: int, channel: Channel
) -> Tensor:
    """The loss of each token, over logits split by vocabulary: [B, S, V/p], [B, S] -> [B, S].

    `first` is the vocabulary entry of this rank's first logit. Targets of `IGNORED` have loss and
    gradient 0. float32 at least.  Source: Megatron-LM, tensor_parallel/cross_entropy.
    """
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, target, first, channel)
    return loss
