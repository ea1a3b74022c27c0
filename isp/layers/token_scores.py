"""Log-probability, log-sum-exp and entropy of each token, with gradients, and never all logits.

B batch, S' the tokens of a rank, D hidden size, V' the logits of a rank; p ranks whose tokens a
rank scores together (1 where each has its own), c chunks. Scores are [K, ..]: log-probabilities,
log-sum-exps and, if asked for, entropies.
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


class _Rules(NamedTuple):
    """How logits are scored."""

    temperature: float
    entropy: bool
    channel: Channel
    """The ranks over which the logits of a token are split."""
    first: int
    """The vocabulary entry of this rank's first logit."""

    def scaled(self, logits: Tensor) -> Tensor:
        """logits / temperature in float32 at least, in their place if they are that wide."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide if self.temperature == 1 else wide.div_(self.temperature)

    def local(self, target: Tensor, num_logits: int) -> tuple[Tensor, Tensor]:
        """The place of each target, [.., 1], and whether this rank holds it; 0 if it does not."""
        local = (target - self.first).masked_fill(target == IGNORED, -1)
        held = (local >= 0) & (local < num_logits)
        return local.masked_fill(~held, 0).unsqueeze(-1), held


def _scores(logits: Tensor, target: Tensor, rules: _Rules) -> tuple[Tensor, Tensor]:
    """The scores [K, ..] of logits [.., V'] and targets [..], and those of tokens without a label.

    The former are 0 there; of the latter all but the log-probability are kept for `_gradient`.
    Overwrites the logits.
    """
    z, channel = rules.scaled(logits), rules.channel
    top = channel.all_reduce(z.amax(-1), op="max", tag=_MAX).wait()
    z = z.sub_(top.unsqueeze(-1))
    local, held = rules.local(target, z.shape[-1])
    parts = [z.gather(-1, local).squeeze(-1).masked_fill(~held, 0)]
    if rules.entropy:
        exp = z.exp()
        parts.append(torch.linalg.vecdot(exp, z))
    else:
        exp = z.exp_()
    own, *mean, total = channel.all_reduce(torch.stack([*parts, exp.sum(-1)]), tag=_SUM).wait()
    log_total = total.log()
    found = [own - log_total, log_total + top, *(log_total - part / total for part in mean)]
    every = torch.stack(found)
    return every.masked_fill(target == IGNORED, 0), every[1:]


def _gradient(
    logits: Tensor, target: Tensor, known: Tensor, given: Tensor, rules: _Rules
) -> Tensor:
    """That of the logits, [.., V'], in their place, from that of the scores, `given` [K, ..].

    `known` is what `_scores` has found beside.
    """
    z = rules.scaled(logits).sub_(known[0].unsqueeze(-1))  # log-probabilities
    given = given.masked_fill(target == IGNORED, 0) / rules.temperature
    of_log_prob, of_lse = (part.unsqueeze(-1) for part in given[:2])
    if rules.entropy:
        entropy, of_entropy = (part[-1].unsqueeze(-1) for part in (known, given))
        exp = z.exp()
        z = z.add_(entropy).mul_(-of_entropy).add_(of_lse - of_log_prob).mul_(exp)
    else:
        z = z.exp_().mul_(of_lse - of_log_prob)
    local, held = rules.local(target, z.shape[-1])
    z.scatter_add_(-1, local, of_log_prob * held.unsqueeze(-1))
    return z if z.dtype == logits.dtype else logits.copy_(z)


class _LogitScores(Function):
    """forward   the scores of logits
    backward  dlogits, of a softmax that is made again
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, rules: _Rules) -> Tensor:
        scores, known = _scores(logits.clone(), target, rules)
        ctx.save_for_backward(logits, target, known)
        ctx.rules = rules
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, known = ctx.saved_tensors
        return _gradient(logits.clone(), target, known, given, ctx.rules), None, None


def logit_scores(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float,
    entropy: bool,
    channel: Channel,
    first: int,
) -> Tensor:
    """Of logits split by vocabulary, [B, S, V/p], and targets [B, S] -> [K, B, S].

    `first` is the vocabulary entry of this rank's first logit. All are of logits / `temperature`,
    in float32 at least, and 0 without a gradient where the target is `IGNORED`.
    """
    rules = _Rules(temperature, entropy, channel, first)
    scores: Tensor = _LogitScores.apply(logits, target, rules)
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
        rules: _Rules,
    ) -> Tensor:
        head = of.head
        ctx.of, ctx.rules, ctx.labels = of, rules, labels
        found, known = [], []
        with head.communicator.unshard(head, Phase.FORWARD, shard, bias) as full:
            for own_x, target in _pieces(of, x, labels):
                logits, _ = of.logits(own_x, full, training=False)
                scores, beside = _scores(logits, target, rules)
                del logits
                found.append(scores.unflatten(2, (labels.shape[1] // x.shape[1], -1)))
                known.append(beside)
            whole_bias = None if full.bias is None else full.bias.clone()
        ctx.save_for_backward(x, shard, whole_bias, *known)
        return torch.cat(found, dim=3).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_w, needs_b = needs_grad(ctx, 3)
        x, shard, bias, *known = ctx.saved_tensors
        of: HeadLoss = ctx.of
        head, communicator = of.head, of.head.communicator
        ranks = ctx.labels.shape[1] // x.shape[1]
        count = num_chunks(x, ctx.labels, of.chunk_tokens)
        by_ranks = given.unflatten(2, (ranks, -1)).chunk(count, dim=3)  # [K, B, p, S'/c]
        dx = torch.empty_like(x) if needs_x else None
        dx_parts = [None] * count if dx is None else dx.chunk(count, dim=1)
        dw: Tensor | None = None
        db: Tensor | None = None
        dw_dtype = communicator.gradient_dtype(x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32) if count > 1 else dw_dtype
        with communicator.unshard(head, Phase.BACKWARD, shard) as gathered:
            full = _Whole(gathered.weight, bias)
            for (own_x, target), part, beside, dx_part in zip(
                _pieces(of, x, ctx.labels), by_ranks, known, dx_parts, strict=True
            ):
                logits, back = of.logits(own_x, full, training=True)
                dy = _gradient(logits, target, beside, part.flatten(2), ctx.rules)
                del logits
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
                del dy
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


def head_scores(
    of: HeadLoss, x: Tensor, labels: Tensor, *, temperature: float, entropy: bool
) -> Tensor:
    """The scores of what the head is given, x [B, S', D], and labels [B, p S'] -> [K, B, p S'].

    As `logit_scores`, `of.chunk_tokens` tokens at a time.
    """
    head, rules = of.head, _Rules(temperature, entropy, of.channel, of.first)
    scores: Tensor = _HeadScores.apply(x, head.weight, head.bias, labels, of, rules)
    return scores
