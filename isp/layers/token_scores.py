"""Log-probability, entropy and log-sum-exp of each token, with gradients, and never all logits.

B batch, S' the tokens of a rank, D hidden size, V' the logits of a rank; p ranks whose tokens a
rank scores together (1 where each has its own), c chunks. Scores are [3, ..], in this order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isp.autograd import Function, once_differentiable
from isp.comm import Channel
from isp.comm.tag import Purpose, Tag
from isp.layers.head import HeadLoss, num_chunks, one_ahead
from isp.layers.linear import NeedsGrad, needs_grad
from isp.layers.loss import IGNORED
from isp.layers.weight_gradients import weight_gradient
from isp.parallel.phase import Phase

__all__ = ["head_scores", "logit_scores"]

_MAX, _SUM = (Tag(Purpose.LOSS, tensor=f"scores.{part}") for part in ("max", "sum"))


class _Softmax(NamedTuple):
    """The softmax of logits / temperature, of which gradients are made."""

    log_probs: Tensor
    """[.., V'], in float32 at least."""
    entropy: Tensor
    local: Tensor
    """The place of the target, [.., 1]; 0 if another rank holds it."""
    held: Tensor
    """Whether this rank holds the target."""
    valid: Tensor
    """Whether the token has a label."""

    def gradient(self, given: Tensor) -> Tensor:
        """That of the logits / temperature, [.., V']; `given`: that of the scores, [3, ..]."""
        log_probs, entropy, local, held, valid = self
        of_log_prob, of_entropy, of_lse = (given * valid).unsqueeze(-1)
        factor = of_lse - of_log_prob - of_entropy * (log_probs + entropy.unsqueeze(-1))
        gradient: Tensor = log_probs.exp() * factor
        return gradient.scatter_add_(-1, local, of_log_prob * held.unsqueeze(-1))


def _scores(
    logits: Tensor, target: Tensor, temperature: float, channel: Channel, first: int
) -> tuple[Tensor, _Softmax]:
    """The scores [3, ..] of logits [.., V'] and targets [..]; 0 without a label."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    top = channel.all_reduce(logits.amax(-1).to(wide) / temperature, op="max", tag=_MAX).wait()
    shifted = logits.to(wide) / temperature - top.unsqueeze(-1)
    valid = target != IGNORED
    local = (target - first).masked_fill(~valid, -1)
    held = (local >= 0) & (local < logits.shape[-1])
    local = local.masked_fill(~held, 0).unsqueeze(-1)
    own = shifted.gather(-1, local).squeeze(-1).masked_fill(~held, 0)
    exp = shifted.exp()
    parts = torch.stack([own, exp.sum(-1), (exp * shifted).sum(-1)])
    own, total, mean = channel.all_reduce(parts, tag=_SUM).wait()
    log_total = total.log()
    entropy = log_total - mean / total
    scores = torch.stack([own - log_total, entropy, log_total + top]).masked_fill(~valid, 0)
    log_probs = shifted.sub_(log_total.unsqueeze(-1))
    return scores, _Softmax(log_probs, entropy, local, held, valid)


class _LogitScores(Function):
    """forward   the scores of logits
    backward  dlogits, of a softmax that is made again
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: float, channel: Channel, first: int
    ) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.how = temperature, channel, first
        return _scores(logits, target, *ctx.how)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        logits, target = ctx.saved_tensors
        gradient = _scores(logits, target, *ctx.how)[1].gradient(given) / ctx.how[0]
        return gradient.to(logits.dtype), None, None, None, None


def logit_scores(
    logits: Tensor, target: Tensor, *, temperature: float, channel: Channel, first: int
) -> Tensor:
    """Of logits split by vocabulary, [B, S, V/p], and targets [B, S] -> [3, B, S].

    `first` is the vocabulary entry of this rank's first logit. All are of logits / `temperature`,
    in float32 at least, and 0 without a gradient where the target is `IGNORED`.
    """
    scores: Tensor = _LogitScores.apply(logits, target, temperature, channel, first)
    return scores


class _HeadScores(Function):
    """forward   of each chunk of tokens: logits = move_y(move_x(x) W^T), their scores
    backward  of each chunk: logits again, their gradient from that of the scores, and of it
              dx = move_dx(move_dy(dlogits) W) and dW += move_dy(dlogits)^T move_x(x)

    Unlike that of a loss, the gradient of a score is not known with it: it is the caller's. So
    there are four products a token, and the weight is read in backward, too. Several chunks' dW are
    added up in float32 at least, and rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        of: HeadLoss,
        temperature: float,
    ) -> Tensor:
        head = of.head
        ctx.of, ctx.temperature, ctx.labels = of, temperature, labels
        found = []
        with head.communicator.unshard(head, Phase.FORWARD, shard, bias) as full:
            for own_x, target in _pieces(of, x, labels):
                logits, _ = of.logits(own_x, full, training=False)
                scores, _ = _scores(logits, target, temperature, of.channel, of.first)
                found.append(scores.unflatten(2, (labels.shape[1] // x.shape[1], -1)))
                del logits
            whole_bias = None if full.bias is None else full.bias.clone()
        ctx.save_for_backward(x, shard, whole_bias)
        return torch.cat(found, dim=3).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_w, needs_b = needs_grad(ctx, 3)
        x, shard, bias = ctx.saved_tensors
        of: HeadLoss = ctx.of
        head, communicator = of.head, of.head.communicator
        ranks = ctx.labels.shape[1] // x.shape[1]
        count = num_chunks(x, ctx.labels, of.chunk_tokens)
        by_ranks = given.unflatten(2, (ranks, -1)).chunk(count, dim=3)  # [3, B, p, S'/c]
        dx = torch.empty_like(x) if needs_x else None
        dx_parts = [None] * count if dx is None else dx.chunk(count, dim=1)
        dw: Tensor | None = None
        db: Tensor | None = None
        dw_dtype = communicator.gradient_dtype(x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32) if count > 1 else dw_dtype
        with communicator.unshard(head, Phase.BACKWARD, shard) as gathered:
            full = _Whole(gathered.weight, bias)
            for (own_x, target), part, dx_part in zip(
                _pieces(of, x, ctx.labels), by_ranks, dx_parts, strict=True
            ):
                logits, back = of.logits(own_x, full, training=True)
                _, softmax = _scores(logits, target, ctx.temperature, of.channel, of.first)
                dy = (softmax.gradient(part.flatten(2)) / ctx.temperature).to(logits.dtype)
                del logits, softmax
                dy = of.moves.dy(dy, tag=Tag(Purpose.OUTPUT_GRADIENT, head.name, "dy")).wait()
                dy = dy if back is None else back(dy)
                arriving = None
                if dx_part is not None:
                    tag = Tag(Purpose.INPUT_GRADIENT, head.name, "dx")
                    arriving = of.moves.dx(dy @ full.weight.to(dy.dtype), tag=tag)
                if needs_w:
                    flat_x = own_x.flatten(0, 1).to(dy.dtype)
                    dw = weight_gradient(dy.flatten(0, 1), flat_x, dtype=wide, into=dw, add=True)
                if needs_b:
                    summed = dy.flatten(0, 1).sum(0, dtype=wide)
                    db = summed if db is None else db + summed
                if dx_part is not None and arriving is not None:
                    dx_part.copy_(arriving.wait())

            def delivered(gradient: Tensor | None, needs: NeedsGrad, is_bias: bool) -> Any:
                if gradient is None:
                    return None
                gradient = gradient.to(x.dtype if is_bias else dw_dtype)
                returned = needs is NeedsGrad.VALUE
                return communicator.grad_hook(
                    gradient, module=head, is_bias=is_bias, returned=returned
                )

            dw, db = delivered(dw, needs_w, False), delivered(db, needs_b, True)
        return dx, dw, db, None, None, None


class _Whole(NamedTuple):
    weight: Tensor
    bias: Tensor | None


def _pieces(of: HeadLoss, x: Tensor, labels: Tensor) -> Any:
    """The chunks of x [B, S'/c, D] as they are multiplied, and their targets [B, p S'/c]."""
    count = num_chunks(x, labels, of.chunk_tokens)
    by_ranks = labels.unflatten(1, (-1, x.shape[1]))  # [B, p, S']
    targets = (target.flatten(1) for target in by_ranks.chunk(count, dim=2))
    return zip(one_ahead(of.moves, of.head.name, x.chunk(count, dim=1)), targets, strict=True)


def head_scores(of: HeadLoss, x: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The scores of what the head is given, x [B, S', D], and labels [B, p S'] -> [3, B, p S'].

    As `logit_scores`, `of.chunk_tokens` tokens at a time.
    """
    head = of.head
    scores: Tensor = _HeadScores.apply(x, head.weight, head.bias, labels, of, temperature)
    return scores
