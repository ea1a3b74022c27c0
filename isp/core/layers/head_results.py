"""Results of each token that are made of its logits, with gradients, and never all logits.

B batch, S' the tokens of a rank, D hidden size, V' the logits of a rank, K results of a token; p
ranks whose tokens a rank has together (1 where each has its own), n = p S', c chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isp.core.autograd import Function, once_differentiable
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.head import HeadGradients, HeadLoss, deliver, num_chunks, one_ahead
from isp.core.layers.linear import needs_grad
from isp.core.layers.token_results import ResultRules
from isp.core.mesh.phase import Phase
from isp.core.weights.wp import WholeWeights

__all__ = ["results_of_head", "results_of_logits"]


class _OfLogits(Function):
    """forward   the results of logits
    backward  dlogits, of what is made again
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
    """Of logits [B, n, V'], the model's own, and `beside` [B, n, ..] -> [B, n, K]."""
    found: Tensor = _OfLogits.apply(logits, beside, rules)
    return found


class _OfHead(Function):
    """forward   of each chunk of tokens: logits = move_y(move_x(x) W^T), their results
    backward  of each chunk: logits again, if the rules need them, their gradient from that of the
              results, and of it dx = move_dx(move_dy(dlogits) W) and
              dW += move_dy(dlogits)^T move_x(x)

    Unlike that of a loss, the gradient of a result is not known with it: it is the caller's. So
    there are up to four products a token, and the weight is read in backward, too.
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
                logits = x.new_empty(1).expand(*part.shape[:2], ctx.num_logits)
                if rules.needs_logits or of.behind is not None:
                    logits, back = of.logits(own_x, full, training=True)
                dy = rules.gradient(logits, own_beside, again, part)
                del logits
                dy = of.moves.dy(dy, tag=Tag(Purpose.OUTPUT_GRADIENT, head.name, "dy")).wait()
                sums.add(own_x, dy if back is None else back(dy), full.weight)
                del dy
            dx, dw, db = sums.sums()
            return dx, *deliver(head, dw, db, needs[1:]), None, None, None


def _pieces(of: HeadLoss, x: Tensor, beside: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The chunks of x [B, S'/c, D] as they are multiplied, and of `beside`, [B, p S'/c, ..]."""
    count = num_chunks(x, len(x) * beside.shape[1], of.chunk_tokens)
    by_ranks = beside.unflatten(1, (-1, x.shape[1]))  # [B, p, S', ..]
    parts = (part.flatten(1, 2) for part in by_ranks.chunk(count, dim=2))
    return zip(one_ahead(of.moves, of.head.name, x.chunk(count, dim=1)), parts, strict=True)


def results_of_head(of: HeadLoss, x: Tensor, beside: Tensor, rules: ResultRules) -> Tensor:
    """Of what the head is given, x [B, S', D], and `beside` [B, n, ..] -> [B, n, K].

    `of.chunk_tokens` tokens at a time, fewer where rules take more memory.
    """
    head, size = of.head, of.chunk_tokens
    of = of._replace(chunk_tokens=size and max(1, size // rules.num_buffers))
    found: Tensor = _OfHead.apply(x, head.weight, head.bias, beside, of, rules)
    return found
