"""Per-token results computed from logits, with gradients, in loss chunks of tokens.

B batch, S' the tokens of a rank, D hidden size, V' the logits of a rank, K results of a token; p
ranks that share the logits of their tokens (1 if each computes its own), n = p S', c loss chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isp.core.autograd import Function, once_differentiable
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.head import HeadGradients, HeadLoss, deliver, num_loss_chunks, one_ahead
from isp.core.layers.linear import needs_grad
from isp.core.layers.token_results import ResultRules
from isp.core.mesh.phase import Phase
from isp.core.weights.wp_communicator import WholeWeights

__all__ = ["results_of_head", "results_of_logits"]


class _OfLogits(Function):
    """forward   the results of logits
    backward  dlogits, from logits that are scaled and shifted again
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, beside: Tensor, rules: ResultRules) -> Tensor:
        found, kept = rules.find(logits.clone(), beside)
        ctx.save_for_backward(logits, beside, kept)
        ctx.rules = rules
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        logits, beside, kept = ctx.saved_tensors
        return ctx.rules.gradient(logits.clone(), beside, kept, given), None, None


def results_of_logits(logits: Tensor, beside: Tensor, rules: ResultRules) -> Tensor:
    """Return the results [B, n, K] of a model's logits [B, n, V'] and `beside` [B, n, ..]."""
    found: Tensor = _OfLogits.apply(logits, beside, rules)
    return found


class _OfHead(Function):
    """forward   for each loss chunk: logits = move_y(move_x(x) W^T), their results
    backward  for each chunk: logits again, if the rules need them, dlogits from the gradient of the
              results, dx = move_dx(move_dy(dlogits) W) and dW += move_dy(dlogits)^T move_x(x)

    Forward cannot compute gradients as it does for a loss: those of the results are the caller's.
    So there are up to four products a token, and the weight is gathered in backward, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: Tensor,
        bias: Tensor | None,
        beside: Tensor,
        of: HeadLoss,
        rules: ResultRules,
    ) -> Tensor:
        head = of.head
        ctx.of, ctx.rules, ctx.beside = of, rules, beside
        found, kept = [], []
        with head.communicator.unshard(head, Phase.FORWARD, shard, bias) as full:
            for own_x, own_beside in _pieces(of, x, beside):
                logits, _ = of.logits(own_x, full, training=False)
                ctx.num_logits = logits.shape[-1]
                results, again = rules.find(logits, own_beside)
                del logits
                found.append(results.unflatten(1, (beside.shape[1] // x.shape[1], -1)))
                kept.append(again)
            # A copy: the gathered bias is freed here, and backward gathers the weight alone.
            whole_bias = None if full.bias is None else full.bias.clone()
        ctx.save_for_backward(x, shard, whole_bias, *kept)
        return torch.cat(found, dim=2).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        x, shard, bias, *kept = ctx.saved_tensors
        of: HeadLoss = ctx.of
        rules: ResultRules = ctx.rules
        head, count, needs = of.head, len(kept), needs_grad(ctx, 3)
        by_ranks = given.unflatten(1, (ctx.beside.shape[1] // x.shape[1], -1))  # [B, p, S', K]
        sums = HeadGradients(of, x, count, needs)
        with head.communicator.unshard(head, Phase.BACKWARD, shard) as gathered:
            full = WholeWeights(gathered.weight, bias)
            for (own_x, own_beside), part, again in zip(
                _pieces(of, x, ctx.beside), by_ranks.chunk(count, dim=2), kept, strict=True
            ):
                back, part = None, part.flatten(1, 2)
                # Rules that do not read the logits get their shape and dtype, and no product.
                logits = x.new_empty(1).expand(*part.shape[:2], ctx.num_logits)
                if rules.needs_logits or of.after_head is not None:
                    logits, back = of.logits(own_x, full, training=True)
                dy = rules.gradient(logits, own_beside, again, part)
                del logits
                dy = of.moves.dy(dy, tag=Tag(Purpose.OUTPUT_GRADIENT, head.name, "dy")).wait()
                sums.add(own_x, dy if back is None else back(dy), full.weight)
                del dy
            dx, dw, db = sums.sums()
            return dx, *deliver(head, dw, db, needs[1:]), None, None, None


def _pieces(of: HeadLoss, x: Tensor, beside: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the loss chunks of x [B, S'/c, D], after their collective, and of `beside`."""
    count = num_loss_chunks(x, len(x) * beside.shape[1], of.chunk_tokens)
    by_ranks = beside.unflatten(1, (-1, x.shape[1]))  # [B, p, S', ..]
    parts = (part.flatten(1, 2) for part in by_ranks.chunk(count, dim=2))  # [B, p S'/c, ..]
    return zip(one_ahead(of.moves, of.head.name, x.chunk(count, dim=1)), parts, strict=True)


def results_of_head(of: HeadLoss, x: Tensor, beside: Tensor, rules: ResultRules) -> Tensor:
    """Return the results [B, n, K] for the head's input x [B, S', D] and `beside` [B, n, ..].

    Computes `of.chunk_tokens` tokens at a time, fewer if the rules take more memory for a token.
    """
    head, size = of.head, of.chunk_tokens
    of = of._replace(chunk_tokens=size and max(1, size // rules.num_buffers))
    found: Tensor = _OfHead.apply(x, head.weight, head.bias, beside, of, rules)
    return found
