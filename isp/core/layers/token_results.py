"""Per-token results of logits, such as log-probabilities, with gradients.

A kind of result is a rule: its arithmetic and that of its gradient (`ResultRules` and below).
`results_of_head` applies a rule to the logits of a head, one loss chunk of tokens at a time, so
that the logits never exist all at once; `results_of_logits` to logits that exist as a whole.

B batch, S' the tokens of a rank, D hidden size, V logits of a token, V' those of a rank, K results
of a token; p ranks that share the logits of their tokens (1 if each computes its own), n = p S';
m labels, c loss chunks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.autograd import Function, once_differentiable
from isp.core.comm import Channel, pinned_memory
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.compiled import widened
from isp.core.layers.head import HeadGradients, HeadLoss, deliver, num_loss_chunks, one_ahead
from isp.core.layers.linear import needs_grad
from isp.core.layers.vocab_loss import IGNORED, LogitShard, losses_and_gradient, places_of
from isp.core.mesh.phase import Phase
from isp.core.weights.wp_communicator import WholeWeights

__all__ = [
    "AllLogits",
    "DivergenceRules",
    "PickedLogits",
    "ResultRules",
    "RowLabels",
    "TokenLossRules",
    "TokenScoreRules",
    "TopLogits",
    "results_of_head",
    "results_of_logits",
]

_LOGITS, _MAX, _SUM = (Tag(Purpose.LOSS, tensor=f"results.{x}") for x in ("logits", "max", "sum"))


class RowLabels(NamedTuple):
    """Labels of hidden rows, any number for each row, in any order.

    Example: the hidden row of a prompt's last token predicts the first token of every answer.
    """

    tokens: Tensor
    """The labels, `IGNORED` for none; int64, [m]."""
    rows: Tensor
    """Index of each label's hidden row in the flattened rows [B, n]; int64, [m], in host memory."""


# -- the rules -------------------------------------------------------------------------------------


class ResultRules(ABC):
    """A kind of per-token result of logits and its gradient, computed in float32 or wider."""

    needs_logits = False
    """True if `gradient` reads the logits, False if only their shape and dtype."""

    @property
    def num_buffers(self) -> int:
        """Number of tensors of the logits' size that exist at a time, the logits included."""
        return 1

    @abstractmethod
    def find(self, logits: Tensor, beside: Any, shard: LogitShard) -> tuple[Tensor, Tensor | None]:
        """Return the results [B, n, K], and a tensor to save for `gradient` (or None).

        `logits` [B, n, V'] may be overwritten if they are float32 or wider; `beside` [B, n, ..]
        holds further inputs of each token, such as its target.
        """

    @abstractmethod
    def gradient(
        self, logits: Tensor, beside: Any, kept: Any, given: Tensor, shard: LogitShard
    ) -> Tensor:
        """Return the gradient of the logits, in their dtype, perhaps overwriting them.

        `kept` is the tensor that `find` saved; `given` is the gradient of the results.
        """


class AllLogits(ResultRules):
    """All V logits of a token."""

    def find(self, logits: Tensor, beside: Tensor, shard: LogitShard) -> tuple[Tensor, None]:
        each = math.ceil(shard.vocab_size / shard.channel.size)
        own = F.pad(widened(logits), (0, each - logits.shape[-1]))
        return _joined(own, shard.channel)[..., : shard.vocab_size], None

    def gradient(
        self, logits: Tensor, beside: Tensor, kept: None, given: Tensor, shard: LogitShard
    ) -> Tensor:
        return given[..., shard.first : shard.first + logits.shape[-1]].to(logits.dtype)


class PickedLogits(ResultRules):
    """The logits of the vocabulary entries `beside` [.., K]."""

    def find(self, logits: Tensor, beside: Tensor, shard: LogitShard) -> tuple[Tensor, None]:
        return _picked(logits, beside, shard), None

    def gradient(
        self, logits: Tensor, beside: Tensor, kept: None, given: Tensor, shard: LogitShard
    ) -> Tensor:
        zeros = given.new_zeros(logits.shape)
        return _add_to_picked(zeros, beside, given, shard).to(logits.dtype)


@dataclass(frozen=True)
class TopLogits(ResultRules):
    """The `top` = K/2 largest logits, followed by their vocabulary entries, without a gradient.

    The entries are numbers of the results' dtype, float32 or wider: exact up to 2^24.
    """

    top: int

    def find(self, logits: Tensor, beside: Tensor, shard: LogitShard) -> tuple[Tensor, Tensor]:
        values, tokens = logits.topk(min(self.top, logits.shape[-1]), -1)
        missing = (0, self.top - values.shape[-1])
        values = _joined(F.pad(widened(values), missing, value=-math.inf), shard.channel)
        tokens = _joined(F.pad(tokens + shard.first, missing), shard.channel)
        values, order = values.topk(self.top, -1)
        tokens = tokens.gather(-1, order)
        return torch.cat([values, tokens.to(values.dtype)], -1), tokens

    def gradient(
        self, logits: Tensor, beside: Tensor, kept: Tensor, given: Tensor, shard: LogitShard
    ) -> Tensor:
        zeros = given.new_zeros(logits.shape)
        return _add_to_picked(zeros, kept, given[..., : self.top], shard).to(logits.dtype)


class TokenLossRules(ResultRules):
    """The cross-entropy of targets [B, n], with the bits of the loss; 0 at `IGNORED`; [B, n, 1]."""

    needs_logits = True

    def find(self, logits: Tensor, target: Tensor, shard: LogitShard) -> tuple[Tensor, None]:
        losses, _ = losses_and_gradient(logits, target, None, shard)
        return losses.unsqueeze(-1), None

    def gradient(
        self, logits: Tensor, target: Tensor, kept: None, given: Tensor, shard: LogitShard
    ) -> Tensor:
        dloss = given.squeeze(-1)
        _, found = losses_and_gradient(logits, target, dloss, shard)
        assert found is not None
        return found


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
    """Scores of labels: log-probability, log-sum-exp and, with `entropy`, the entropy.

    Labels are one for each token, [B, n] -> [B, n, K], or `RowLabels`, [m] -> [m, K]. All scores
    are 0, without a gradient, where the label is `IGNORED`.
    """

    entropy: bool = False

    @property
    def num_buffers(self) -> int:
        return 2 if self.entropy else 1

    def find(
        self, logits: Tensor, labels: Tensor | RowLabels, shard: LogitShard
    ) -> tuple[Tensor, Tensor]:
        """Return the scores; save the log-sum-exp and the entropy of each row for `gradient`."""
        z, channel = self._scaled(logits), shard.channel
        tokens, rows = _tokens_and_rows(labels)
        top = channel.all_reduce(z.amax(-1), op="max", tag=_MAX).wait()
        z = z.sub_(top.unsqueeze(-1))
        local, held = places_of(tokens, shard.first, z.shape[-1])
        if rows is None:
            own = z.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        else:
            own = z[(*_places(rows, z), local)]
        parts = [own.masked_fill(~held, 0)]
        if self.entropy:
            exp = z.exp()
            parts.append(torch.linalg.vecdot(exp, z))
        else:
            exp = z.exp_()
        # One all-reduce for the labels' logits [B, n] or [m] and the sums of the rows [B, n].
        parts.append(exp.sum(-1))
        summed = channel.all_reduce(torch.cat([x.flatten() for x in parts]), tag=_SUM).wait()
        split = summed.split([x.numel() for x in parts])
        own, *mean, total = (x.view(part.shape) for x, part in zip(split, parts, strict=True))
        log_total = total.log()
        of_rows = [log_total + top, *(log_total - part / total for part in mean)]
        found = [own - _of_labels(log_total, rows), *(_of_labels(x, rows) for x in of_rows)]
        scores = torch.stack(found, -1).masked_fill_((tokens == IGNORED).unsqueeze(-1), 0)
        return scores, torch.stack(of_rows, -1)

    def gradient(
        self,
        logits: Tensor,
        labels: Tensor | RowLabels,
        known: Tensor,
        given: Tensor,
        shard: LogitShard,
    ) -> Tensor:
        """Return the gradient of the logits, in place; `known` is the tensor that `find` saved."""
        tokens, rows = _tokens_and_rows(labels)
        z = self._scaled(logits).sub_(known[..., :1])  # log-probabilities
        given = given.masked_fill((tokens == IGNORED).unsqueeze(-1), 0) / self.temperature
        # A row's softmax is multiplied once, by the sum of the gradients of all its labels.
        of_rows = given
        if rows is not None:
            of_rows = given.new_zeros(*z.shape[:2], given.shape[-1])
            of_rows.view(-1, given.shape[-1]).index_add_(0, rows, given)
        of_log_prob, of_lse = of_rows[..., :1], of_rows[..., 1:2]
        if self.entropy:
            entropy, of_entropy = known[..., 1:], of_rows[..., 2:]
            exp = z.exp()
            z = z.add_(entropy).mul_(-of_entropy).add_(of_lse - of_log_prob).mul_(exp)
        else:
            z = z.exp_().mul_(of_lse - of_log_prob)
        z = _add_to_picked(z, tokens.unsqueeze(-1), given[..., :1], shard, rows)
        return z if z.dtype == logits.dtype else logits.copy_(z)


class DivergenceRules(_Scaled):
    """The Kullback-Leibler divergence sum q log(q / p) from a teacher's distribution, [B, n, 1].

    p is the softmax of logits / `temperature`; q [B, n, K] are the teacher's probabilities of its
    K most likely tokens. `beside` [B, n, 2 K] holds log q, then these tokens.
    """

    def find(self, logits: Tensor, beside: Tensor, shard: LogitShard) -> tuple[Tensor, Tensor]:
        """Return the divergences and the log-sum-exps of logits / temperature, [B, n, 1] each."""
        log_q, tokens = beside.chunk(2, -1)
        z, channel = self._scaled(logits), shard.channel
        picked = _picked(z, tokens.long(), shard)
        top = channel.all_reduce(z.amax(-1, keepdim=True), op="max", tag=_MAX).wait()
        total = z.sub_(top).exp_().sum(-1, keepdim=True)
        lse = channel.all_reduce(total, tag=_SUM).wait().log() + top
        found = (log_q.exp() * (log_q - picked + lse)).sum(-1, keepdim=True)
        return found, lse

    def gradient(
        self, logits: Tensor, beside: Tensor, lse: Tensor, given: Tensor, shard: LogitShard
    ) -> Tensor:
        log_q, tokens = beside.chunk(2, -1)
        q = log_q.exp()
        given = given / self.temperature
        z = self._scaled(logits).sub_(lse).exp_()
        z = z.mul_(given * q.sum(-1, keepdim=True))
        z = _add_to_picked(z, tokens.long(), -given * q, shard)
        return z if z.dtype == logits.dtype else logits.copy_(z)


def _joined(x: Tensor, channel: Channel) -> Tensor:
    """Return x of all ranks, concatenated along the last dim."""
    return channel.all_gather(x, -1, tag=_LOGITS).wait()


def _picked(logits: Tensor, tokens: Tensor, shard: LogitShard) -> Tensor:
    """Return the logits of `tokens` [.., K], whichever rank holds them."""
    local, held = places_of(tokens, shard.first, logits.shape[-1])
    own = logits.gather(-1, local) if logits.shape[-1] else logits.new_zeros(tokens.shape)
    return shard.channel.all_reduce(widened(own).masked_fill(~held, 0), tag=_LOGITS).wait()


def _add_to_picked(
    gradient: Tensor,
    tokens: Tensor,
    given: Tensor,
    shard: LogitShard,
    rows: Tensor | None = None,
) -> Tensor:
    """Add the gradients `given` [.., K] of picked logits to `gradient` [.., V'], in place.

    With `rows` [m], `tokens` and `given` are [m, K], and entry i belongs to row `rows[i]`.
    """
    local, held = places_of(tokens, shard.first, gradient.shape[-1])
    given = given.masked_fill(~held, 0)
    if not gradient.shape[-1]:
        return gradient
    if rows is None:
        return gradient.scatter_add_(-1, local, given)
    places = (x.unsqueeze(-1) for x in _places(rows, gradient))
    return gradient.index_put_((*places, local), given, accumulate=True)


def _tokens_and_rows(labels: Tensor | RowLabels) -> tuple[Tensor, Tensor | None]:
    """Return labels, and the index of each one's row; None if each row has one label."""
    return labels if isinstance(labels, RowLabels) else (labels, None)


def _of_labels(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return the value of each label's row: [B, n] -> [B, n], or [m] with `rows`."""
    return x if rows is None else x.flatten()[rows]


def _places(rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return batch row and position of flattened rows [m] of `logits` [B, n, V']; [m] each."""
    # Two indices instead of a flattened view, which logits with other strides do not have.
    return rows // logits.shape[1], rows % logits.shape[1]


# -- results of logits, and of a head --------------------------------------------------------------


class _OfLogits(Function):
    """forward   the results of logits
    backward  dlogits, from logits that are scaled and shifted again
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, beside: Tensor | RowLabels, rules: ResultRules, shard: LogitShard
    ) -> Tensor:
        # Rules leave narrower logits as they are, so evaluation in bfloat16 copies none.
        is_wide = logits.dtype == torch.promote_types(logits.dtype, torch.float32)
        found, kept = rules.find(logits.clone() if is_wide else logits, beside, shard)
        # Saved, so that torch raises in backward if labels have been written in place since.
        ctx.of_rows = isinstance(beside, RowLabels)
        ctx.save_for_backward(logits, kept, *(beside if ctx.of_rows else (beside,)))
        ctx.rules, ctx.shard = rules, shard
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        logits, kept, *saved = ctx.saved_tensors
        beside = RowLabels(*saved) if ctx.of_rows else saved[0]
        dlogits = ctx.rules.gradient(logits.clone(), beside, kept, given, ctx.shard)
        return dlogits, None, None, None


def results_of_logits(
    logits: Tensor, beside: Tensor | RowLabels, rules: ResultRules, shard: LogitShard
) -> Tensor:
    """Return the results of a model's logits [B, n, V']; see `results_of_head`."""
    assert isinstance(beside, Tensor) or isinstance(rules, TokenScoreRules)
    if isinstance(beside, RowLabels):
        beside = beside._replace(rows=pinned_memory.send(beside.rows, logits.device))
    found: Tensor = _OfLogits.apply(logits, beside, rules, shard)
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
        beside: Tensor | RowLabels,
        of: HeadLoss,
        rules: ResultRules,
    ) -> Tensor:
        head, chunks = of.head, _Chunks(of, x, beside)
        ctx.of, ctx.rules, ctx.chunks = of, rules, chunks
        found, kept = [], []
        with head.communicator.unshard(head, Phase.FORWARD, shard, bias) as full:
            for own_x, own_beside in zip(chunks.cut(x), chunks.beside(), strict=True):
                logits, _ = of.logits(own_x, full, training=False)
                ctx.num_logits = logits.shape[-1]
                results, again = rules.find(logits, own_beside, of.logit_shard)
                del logits
                found.append(results)
                kept.append(again)
            # A copy: the gathered bias is freed here, and backward gathers the weight alone.
            whole_bias = None if full.bias is None else full.bias.clone()
        ctx.save_for_backward(x, shard, whole_bias, *kept)
        return chunks.joined(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        x, shard, bias, *kept = ctx.saved_tensors
        of: HeadLoss = ctx.of
        rules: ResultRules = ctx.rules
        chunks: _Chunks = ctx.chunks
        head, needs = of.head, needs_grad(ctx, 3)
        sums = HeadGradients(of, x, chunks.count, needs)
        with head.communicator.unshard(head, Phase.BACKWARD, shard) as gathered:
            full = WholeWeights(gathered.weight, bias)
            parts = chunks.cut(x), chunks.beside(), chunks.split(given), kept, chunks.lengths
            for own_x, own_beside, part, again, length in zip(*parts, strict=True):
                back = None
                # Rules that do not read the logits get their shape and dtype, and no product.
                logits = x.new_empty(1).expand(len(x), of.num_slices * length, ctx.num_logits)
                if rules.needs_logits or of.after_head is not None:
                    logits, back = of.logits(own_x, full, training=True)
                dy = rules.gradient(logits, own_beside, again, part, of.logit_shard)
                del logits
                dy = of.moves.dy(dy, tag=Tag(Purpose.OUTPUT_GRADIENT, head.name, "dy")).wait()
                sums.add(own_x, dy if back is None else back(dy), full.weight)
                del dy
            dx, dw, db = sums.sums()
            return dx, *deliver(head, dw, db, needs[1:]), None, None, None


class _Chunks:
    """The loss chunks of hidden rows x [B, S', D], each with its further inputs of the rules.

    A chunk has S'/c positions of all p ranks, so n/c tokens of each batch row. Of `RowLabels` it
    has those whose row is in it, with the index of the row in the chunk.
    """

    def __init__(self, of: HeadLoss, x: Tensor, beside: Tensor | RowLabels) -> None:
        self._moves, self._layer, self._ranks = of.moves, of.head.name, of.num_slices
        self.count = num_loss_chunks(x, x[..., 0].numel() * of.num_slices, of.chunk_tokens)
        """c; the number of chunks that each use of x is cut into."""
        self.lengths = [part.shape[1] for part in x.chunk(self.count, dim=1)]
        """Positions of each chunk."""
        self._beside = beside
        self._order: Tensor | None = None
        """With `RowLabels`: indices of the labels, chunk after chunk, [m]."""
        if isinstance(beside, RowLabels):
            order, self._sizes, rows = self._rows_of_chunks(beside.rows, x.shape[1])
            self._order = pinned_memory.send(order, x.device)
            rows = pinned_memory.send(rows, x.device)
            self._beside = RowLabels(beside.tokens[self._order], rows)

    def cut(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the chunks of x after their collective."""
        return one_ahead(self._moves, self._layer, x.chunk(self.count, dim=1))

    def beside(self) -> Iterator[Tensor | RowLabels]:
        """Yield the inputs of the rules for each chunk: [B, n/c, ..], or the labels of its rows."""
        if isinstance(self._beside, Tensor):
            return self._by_position(self._beside)
        parts = (x.split(self._sizes) for x in self._beside)
        return (RowLabels(*each) for each in zip(*parts, strict=True))

    def joined(self, found: list[Tensor]) -> Tensor:
        """Return the results of all chunks, in the order of tokens [B, n, K] or labels [m, K]."""
        if self._order is None:
            by_ranks = [each.unflatten(1, (self._ranks, -1)) for each in found]  # [B, p, S'/c, K]
            return torch.cat(by_ranks, dim=2).flatten(1, 2)
        every = torch.cat(found)
        return torch.empty_like(every).index_copy_(0, self._order, every)

    def split(self, given: Tensor) -> Iterator[Tensor]:
        """Yield the gradients of each chunk's results, from those of `joined`."""
        if self._order is None:
            return self._by_position(given)
        return iter(given[self._order].split(self._sizes))

    def _by_position(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the chunks [B, n/c, ..] of x [B, n, ..]; one copy exists at a time."""
        by_ranks = x.unflatten(1, (self._ranks, -1))  # [B, p, S', ..]
        return (part.flatten(1, 2) for part in by_ranks.split(self.lengths, dim=2))

    def _rows_of_chunks(self, rows: Tensor, length: int) -> tuple[Tensor, list[int], Tensor]:
        """Return the order of labels by chunk [m], the labels of each, and rows in the chunk [m].

        On the host: the sizes of tensors would make it wait for the device. `length` is S'.
        """
        slices, places = rows // length, rows % length  # of B p slices, and position in it
        chunks = places // self.lengths[0]  # all chunks but the last one are that long
        own = slices * torch.tensor(self.lengths)[chunks] + places - chunks * self.lengths[0]
        sizes: list[int] = chunks.bincount(minlength=len(self.lengths)).tolist()
        order = chunks.argsort(stable=True)
        return order, sizes, own[order]


def results_of_head(
    of: HeadLoss, x: Tensor, beside: Tensor | RowLabels, rules: ResultRules
) -> Tensor:
    """Return per-token results for the head's input x [B, S', D], with gradients.

    `beside` [B, n, ..] has the rules' further input of each token, such as its label; the results
    are [B, n, K]. Only `TokenScoreRules` take `RowLabels` [m], and give results [m, K]: log-sum-exp
    and entropy are then computed once a row, whatever the number of its labels. Computes
    `of.chunk_tokens` tokens at a time, fewer if the rules take more memory for a token.
    """
    assert isinstance(beside, Tensor) or isinstance(rules, TokenScoreRules)
    head, size = of.head, of.chunk_tokens
    of = of._replace(chunk_tokens=size and max(1, size // rules.num_buffers))
    found: Tensor = _OfHead.apply(x, head.weight, head.bias, beside, of, rules)
    return found
