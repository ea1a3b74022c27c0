"""Cross-entropy of logits that are split by vocabulary over a group of p ranks.

B batch, S sequence, V vocabulary; logits are [B, S, V/p], targets [B, S].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isp.core.autograd import Function, once_differentiable
from isp.core.comm import Channel
from isp.core.comm.channel import check_channel
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.compiled import CompileWhen, compiles, lazily_compiled, widened

__all__ = [
    "IGNORED",
    "LogitShard",
    "losses_and_gradient",
    "places_of",
    "vocab_parallel_cross_entropy",
]

IGNORED = -100
"""The target (label) of a token that has no loss, as in torch's cross-entropy."""


class LogitShard(NamedTuple):
    """Which part of the vocabulary this rank has the logits of, for each token."""

    channel: Channel
    """The ranks over which the logits of a token are split."""
    first: int
    """The vocabulary entry of this rank's first logit."""
    vocab_size: int
    """Number of logits of a token on all ranks together."""
    compile: CompileWhen = False
    """When to compute cross-entropies of these logits by compiled kernels."""


_MAX, _TARGET, _SUM = (
    Tag(Purpose.LOSS, tensor=f"loss.{part}") for part in ("max", "target", "sum")
)


def places_of(tokens: Tensor, first: int, num_logits: int) -> tuple[Tensor, Tensor]:
    """Return each token's index in a rank's logits, and a mask of the tokens whose logit it holds.

    The index is 0 where the rank does not hold the logit, so that it is valid. `first` is the
    vocabulary entry of the rank's first logit. No rank holds `IGNORED`.
    """
    local = tokens - first
    held = (local >= 0) & (local < num_logits)
    return local.masked_fill(~held, 0), held


class _Softmax(NamedTuple):
    """The softmax and the indices of the targets, from which backward computes dlogits."""

    values: Tensor
    """The softmax [.., V/p], in float32 or wider."""
    local: Tensor
    """Index [.., 1] of the target in this rank's logits; 0 if another rank holds it."""
    held: Tensor
    """Mask [..] of the targets that this rank holds."""
    valid: Tensor
    """Mask [..] of the tokens that have a loss."""
    vocab_size: Tensor
    """V, as a scalar tensor; 0 if there is no label smoothing, which is all that reads it."""


def _losses(
    logits: Tensor,
    target: Tensor,
    *,
    smoothing: float,
    first: int,
    channel: Channel,
    reuse_logits: bool,
) -> tuple[Tensor, _Softmax]:
    """Return each token's loss, and the softmax, from which `_gradient` computes dlogits.

    With `reuse_logits`, the softmax overwrites logits in float32 or wider.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    # The largest logit of all ranks is subtracted first, because exp would overflow.
    top = channel.all_reduce(logits.amax(-1).to(wide), op="max", tag=_MAX).wait()
    shifted = logits.detach() if reuse_logits else logits
    shifted = shifted.to(wide, copy=not reuse_logits).sub_(top.unsqueeze(-1))
    valid = target != IGNORED
    local, held = places_of(target, first, logits.shape[-1])
    local = local.unsqueeze(-1)
    # One rank holds the target and the others give 0, so the sum over ranks is its logit.
    own = shifted.gather(-1, local).squeeze(-1).masked_fill(~held, 0)
    vocab_size = torch.zeros((), device=logits.device)
    if smoothing == 0:
        minuend = channel.all_reduce(own, tag=_TARGET).wait()
    else:
        # Smoothing needs the mean of a token's V logits. The same all-reduce sums these logits, and
        # also the number of logits on each rank, which gives V.
        size = own.new_full((1,), logits.shape[-1])
        parts = torch.cat([own.flatten(), shifted.sum(-1).flatten(), size])
        parts = channel.all_reduce(parts, tag=_TARGET).wait()
        vocab_size = parts[-1]
        own, summed = parts[:-1].view(2, *target.shape)
        minuend = own.lerp(summed / vocab_size, smoothing)
    # loss = log(sum exp) - minuend. The minuend is the target's logit or, with smoothing, a
    # weighted mean of the target's logit and the mean logit.
    exp = shifted.exp_()  # from here on `shifted` holds exponentials
    total = channel.all_reduce(exp.sum(-1), tag=_SUM).wait()
    loss = (total.log() - minuend).masked_fill(~valid, 0)
    return loss, _Softmax(exp.div_(total.unsqueeze(-1)), local, held, valid, vocab_size)


def _gradient(softmax: _Softmax, dloss: Tensor, smoothing: float) -> Tensor:
    """Turn the softmax into the gradient of the logits, in place."""
    values, local, held, valid, vocab_size = softmax
    at_target = held.unsqueeze(-1).to(values.dtype) * (smoothing - 1)
    values.scatter_add_(-1, local, at_target)
    if smoothing:
        values -= smoothing / vocab_size
    values *= (dloss * valid).unsqueeze(-1)
    return values


class _VocabParallelCrossEntropy(Function):
    """The autograd function of a cross-entropy with logits split by vocabulary.

    forward   loss = log(sum exp(logits)) - (1 - e) logits[target] - e mean(logits)
    backward  dlogits = (softmax - (1 - e) onehot(target) - e / V) * dloss

    e is the label smoothing; loss and gradient are 0 for ignored targets. There are three
    all-reduces: of the largest logit, of the target's logit (together with the sum of logits and V,
    for the mean), and of the sum of exponentials. The softmax is in float32 or wider, in one
    buffer; backward turns a copy of it into the gradient, or itself with `reuse_logits`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        smoothing: float,
        first: int,
        channel: Channel,
        reuse_logits: bool,
    ) -> Tensor:
        loss, softmax = _losses(
            logits,
            target,
            smoothing=smoothing,
            first=first,
            channel=channel,
            reuse_logits=reuse_logits,
        )
        ctx.save_for_backward(*softmax)
        ctx.dtype, ctx.smoothing, ctx.reuse_logits = logits.dtype, smoothing, reuse_logits
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        softmax = _Softmax(*ctx.saved_tensors)
        if not ctx.reuse_logits:
            softmax = softmax._replace(values=softmax.values.clone())
        grad = _gradient(softmax, dloss, ctx.smoothing)
        return grad.to(ctx.dtype), None, None, None, None, None


def losses_and_gradient(
    logits: Tensor,
    target: Tensor,
    dloss: Tensor | None,
    shard: LogitShard,
) -> tuple[Tensor, Tensor | None]:
    """Return each token's loss without smoothing, and dlogits for `dloss` (None: no gradient).

    `logits` may be overwritten: if they are narrower than float32, only when a gradient is
    returned, by this gradient. If `shard.compile` allows it, compiled kernels go over the logits in
    memory three times instead of eight: twice to read them, once to turn them into their gradient.
    """
    channel, first = shard.channel, shard.first
    if compiles(shard.compile, logits.device):
        return _in_three_passes(logits, target, dloss, channel=channel, first=first)
    losses, softmax = _losses(
        logits, target, smoothing=0.0, first=first, channel=channel, reuse_logits=True
    )
    if dloss is None:
        return losses, None
    gradient = _gradient(softmax, dloss.to(softmax.values.dtype), 0.0)
    return losses, gradient if gradient.dtype == logits.dtype else logits.copy_(gradient)


def _in_three_passes(
    logits: Tensor, target: Tensor, dloss: Tensor | None, *, channel: Channel, first: int
) -> tuple[Tensor, Tensor | None]:
    """Return losses and dlogits by compiled kernels; dlogits overwrites `logits`.

    No other tensor of their size is allocated.
    """
    # The passes over the logits: their maximum, the sum of exponentials, the gradient.
    top = channel.all_reduce(widened(logits.amax(-1)), op="max", tag=_MAX).wait()
    valid = target != IGNORED
    local, held = places_of(target, first, logits.shape[-1])
    # One rank holds the target and the others give 0, so the sum over ranks is its logit.
    own = widened(logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)) - top
    minuend = channel.all_reduce(own.masked_fill(~held, 0), tag=_TARGET).wait()
    total = channel.all_reduce(_sum_of_exponentials(logits, top), tag=_SUM).wait()
    losses = (total.log() - minuend).masked_fill(~valid, 0)
    if dloss is None:
        return losses, None
    _turn_into_gradient(logits, top, total, local.where(held, -1), dloss.to(top.dtype) * valid)
    return losses, logits


@lazily_compiled
def _sum_of_exponentials(logits: Tensor, top: Tensor) -> Tensor:
    """Return sum(exp(logits - top)) over this rank's logits, in float32 or wider: [..]."""
    return (widened(logits) - top.unsqueeze(-1)).exp().sum(-1)


@lazily_compiled
def _turn_into_gradient(
    logits: Tensor, top: Tensor, total: Tensor, local: Tensor, dloss: Tensor
) -> None:
    """Overwrite `logits` with (softmax - onehot(target)) * dloss.

    `local` is the target's index in this rank's logits; -1: another rank holds it.
    """
    values = (widened(logits) - top.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    at_target = torch.arange(logits.shape[-1], device=logits.device) == local.unsqueeze(-1)
    logits.copy_((values - at_target.to(values.dtype)) * dloss.unsqueeze(-1))


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    channel: Channel,
    first: int | None = None,
    reuse_logits: bool = False,
) -> Tensor:
    """Return each token's loss, from logits split by vocabulary: [B, S, V/p], [B, S] -> [B, S].

    `first` is the vocabulary entry of this rank's first logit; None: all ranks have equally many
    logits. A target of -100 has loss and gradient 0. `label_smoothing` spreads that share of the
    target over the whole vocabulary, as `torch.nn.functional.cross_entropy` does. The loss is
    float32 or wider. `reuse_logits` overwrites float32 or float64 logits, and turns the saved
    softmax into the gradient in place: this saves twice the memory of the logits, and backward can
    run only once. Raises ValueError for a smoothing outside [0, 1).  Source: Megatron-LM,
    tensor_parallel/cross_entropy (whose smoothing averages over a rank's part of the vocabulary).
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be at least 0 and below 1")
    check_channel("channel", channel)
    first = channel.rank * logits.shape[-1] if first is None else first
    loss: Tensor = _VocabParallelCrossEntropy.apply(
        logits, target, label_smoothing, first, channel, reuse_logits
    )
    return loss
