"""Per-token results of logits, such as log-probabilities, with gradients.

Each kind of result is a subclass of `ResultRules`, which computes the results and their gradient.
`results_of_head` applies it to the logits of a head, one loss chunk of tokens at a time, so that
the logits never exist all at once; `results_of_logits` applies it to logits that exist as a whole.

B batch, D hidden size, V vocabulary, K results of a token; S' positions of the sequence on a rank;
V' logits of a token on a rank; p ranks that split the logits of all their tokens (1 if each rank
has all logits of its own tokens), n = p S'; m labels, c loss chunks.
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
    """Labels of hidden states: any number of labels for each hidden state, in any order.

    Here a row is a hidden state, the D numbers of one token. Example: the hidden state of a
    prompt's last token predicts the first token of every answer.
    """

    tokens: Tensor
    """The labels [m], int64; `IGNORED`: a label without a score."""
    rows: Tensor
    """For each label, the index of its hidden state in the flattened hidden states [B n]; [m],
    int64, on the host: labels are divided into loss chunks by it, and reading it from the device
    would make the host wait."""


# -- the rules -------------------------------------------------------------------------------------


class ResultRules(ABC):
    """A kind of per-token result of logits and its gradient, computed in float32 or wider."""

    needs_logits = False
    """True if `gradient` reads the logits; False if it reads only their shape and dtype."""

    @property
    def num_buffers(self) -> int:
        """Number of tensors of the logits' size that `find` or `gradient` has at a time.

        The logits are one of them. `results_of_head` computes that many times fewer tokens at once.
        """
        return 1

    @abstractmethod
    def find(self, logits: Tensor, inputs: Any, shard: LogitShard) -> tuple[Tensor, Tensor | None]:
        """Return the results [B, n, K], and a tensor to save for `gradient` (or None).

        `logits` [B, n, V'] may be overwritten if they are float32 or wider. `inputs` [B, n, ..] are
        numbers given for each token, such as its target.
        """

    @abstractmethod
    def gradient(
        self, logits: Tensor, inputs: Any, kept: Any, given: Tensor, shard: LogitShard
    ) -> Tensor:
        """Return the gradient of the logits, in their dtype; the logits may be overwritten.

        `kept` is the tensor that `find` returned to save; `given` [B, n, K] is the gradient of the
        results.
        """


class AllLogits(ResultRules):
    """Rules whose results for a token are all its V logits."""

    def find(self, logits: Tensor, inputs: Tensor, shard: LogitShard) -> tuple[Tensor, None]:
        # The last ranks may have fewer logits than the others. An all-gather needs equal sizes, so
        # each rank pads its logits to the largest number.
        each = math.ceil(shard.vocab_size / shard.channel.size)
        own = F.pad(widened(logits), (0, each - logits.shape[-1]))
        return _joined(own, shard.channel)[..., : shard.vocab_size], None

    def gradient(
        self, logits: Tensor, inputs: Tensor, kept: None, given: Tensor, shard: LogitShard
    ) -> Tensor:
        return given[..., shard.first : shard.first + logits.shape[-1]].to(logits.dtype)


class PickedLogits(ResultRules):
    """Rules whose results for a token are the logits of K token ids; `inputs` [.., K] are the
    ids."""

    def find(self, logits: Tensor, inputs: Tensor, shard: LogitShard) -> tuple[Tensor, None]:
        return _picked(logits, inputs, shard), None

    def gradient(
        self, logits: Tensor, inputs: Tensor, kept: None, given: Tensor, shard: LogitShard
    ) -> Tensor:
        zeros = given.new_zeros(logits.shape)
        return _add_to_picked(zeros, inputs, given, shard).to(logits.dtype)


@dataclass(frozen=True)
class TopLogits(ResultRules):
    """Rules whose results for a token are its largest logits, followed by their token ids.

    Token ids have no gradient. They have the dtype of the results, float32 or wider, which is
    exact up to 2^24.
    """

    top: int
    """Number of logits to return for each token. A token has K = 2 `top` results: these logits and
    their token ids."""

    def find(self, logits: Tensor, inputs: Tensor, shard: LogitShard) -> tuple[Tensor, Tensor]:
        # The largest of all ranks are among the largest of each rank. A rank with fewer logits
        # than `top` pads with -inf, since ranks gather equal sizes.
        values, tokens = logits.topk(min(self.top, logits.shape[-1]), -1)
        missing = (0, self.top - values.shape[-1])
        values = _joined(F.pad(widened(values), missing, value=-math.inf), shard.channel)
        tokens = _joined(F.pad(tokens + shard.first, missing), shard.channel)
        values, order = values.topk(self.top, -1)
        tokens = tokens.gather(-1, order)
        return torch.cat([values, tokens.to(values.dtype)], -1), tokens

    def gradient(
        self, logits: Tensor, inputs: Tensor, kept: Tensor, given: Tensor, shard: LogitShard
    ) -> Tensor:
        zeros = given.new_zeros(logits.shape)
        return _add_to_picked(zeros, kept, given[..., : self.top], shard).to(logits.dtype)


class TokenLossRules(ResultRules):
    """The cross-entropy [B, n, 1] of targets [B, n], with the same bits as the training loss.

    It is 0 where the target is `IGNORED`.
    """

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
    """Base of rules for logits that are divided by a temperature first."""

    temperature: float = 1.0

    needs_logits = True

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return logits / temperature, in place if they are float32 or wider."""
        wide = widened(logits)
        return wide if self.temperature == 1 else wide.div_(self.temperature)


@dataclass(frozen=True)
class TokenScoreRules(_Scaled):
    """Scores of labels: log-probability, log-sum-exp and, with `entropy`, the entropy.

    `inputs` are one label for each token, [B, n] -> [B, n, K], or `RowLabels`, [m] -> [m, K]. All
    scores are 0, without a gradient, where the label is `IGNORED`.
    """

    entropy: bool = False

    @property
    def num_buffers(self) -> int:
        return 2 if self.entropy else 1

    def find(
        self, logits: Tensor, labels: Tensor | RowLabels, shard: LogitShard
    ) -> tuple[Tensor, Tensor]:
        """Return the scores, and the log-sum-exp and entropy of each row to save."""
        # With z = logits / temperature - max: log-probability = z[label] - log sum exp(z), and
        # entropy = log sum exp(z) - sum(exp(z) z) / sum exp(z).
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
        # One all-reduce for both: the labels' logits, [B, n] or [m], and the sums over each
        # token's logits, [B, n].
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
        """Return the gradient of the logits, in their memory.

        `known` [B, n, 1 or 2] are the log-sum-exp and the entropy that `find` returned to save.
        """
        # With p = softmax(logits / temperature): dlog_prob = onehot(label) - p, dlse = p and
        # dentropy = -p (log p + entropy), each divided by the temperature.
        tokens, rows = _tokens_and_rows(labels)
        z = self._scaled(logits).sub_(known[..., :1])  # log-probabilities
        given = given.masked_fill((tokens == IGNORED).unsqueeze(-1), 0) / self.temperature
        # A hidden state may have several labels. Their gradients are summed first, so that its
        # softmax [V'] is multiplied only once.
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
    """The Kullback-Leibler divergence [B, n, 1] from a teacher's distribution: sum q log(q / p).

    p is the softmax of logits / `temperature`; q [B, n, K] are the teacher's probabilities of the
    teacher's K most likely tokens. `inputs` [B, n, 2 K] are log q, followed by these tokens.
    """

    def find(self, logits: Tensor, inputs: Tensor, shard: LogitShard) -> tuple[Tensor, Tensor]:
        """Return the divergences, and the log-sum-exps of logits / temperature to save.

        Both are [B, n, 1].
        """
        log_q, tokens = inputs.chunk(2, -1)
        z, channel = self._scaled(logits), shard.channel
        picked = _picked(z, tokens.long(), shard)
        top = channel.all_reduce(z.amax(-1, keepdim=True), op="max", tag=_MAX).wait()
        total = z.sub_(top).exp_().sum(-1, keepdim=True)
        lse = channel.all_reduce(total, tag=_SUM).wait().log() + top
        found = (log_q.exp() * (log_q - picked + lse)).sum(-1, keepdim=True)
        return found, lse

    def gradient(
        self, logits: Tensor, inputs: Tensor, lse: Tensor, given: Tensor, shard: LogitShard
    ) -> Tensor:
        log_q, tokens = inputs.chunk(2, -1)
        # dlogits = (p sum(q) - q) / temperature. sum(q) is below 1 if the teacher's K tokens are
        # not the whole vocabulary.
        q = log_q.exp()
        given = given / self.temperature
        z = self._scaled(logits).sub_(lse).exp_()
        z = z.mul_(given * q.sum(-1, keepdim=True))
        z = _add_to_picked(z, tokens.long(), -given * q, shard)
        return z if z.dtype == logits.dtype else logits.copy_(z)


def _joined(x: Tensor, channel: Channel) -> Tensor:
    """Return x of all ranks of the channel, concatenated along the last dim."""
    return channel.all_gather(x, -1, tag=_LOGITS).wait()


def _picked(logits: Tensor, tokens: Tensor, shard: LogitShard) -> Tensor:
    """Return the logits of the vocabulary entries `tokens` [.., K], of all ranks."""
    local, held = places_of(tokens, shard.first, logits.shape[-1])
    # One rank holds each logit and the others add 0. A rank without logits takes part, too.
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

    With `rows` [m], `tokens` and `given` are [m, K], and tokens[i] are entries of the logits of
    hidden state `rows[i]`; see `RowLabels`.
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
    """Return the labels, and for each the index of its hidden state (`RowLabels.rows`).

    The indices are None if there is one label for each hidden state, in the same order.
    """
    return labels if isinstance(labels, RowLabels) else (labels, None)


def _of_labels(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return for each label the value that x [B, n] has for the hidden state of the label.

    Without `rows`, each hidden state has one label: returns x. With `rows` [m], label i belongs to
    the flattened hidden state rows[i]: returns [m].
    """
    return x if rows is None else x.flatten()[rows]


def _places(rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices into dim 0 and dim 1 of `logits` [B, n, V'] of flattened rows [m]."""
    # Two indices, because logits that are not contiguous cannot be viewed as [B n, V'].
    return rows // logits.shape[1], rows % logits.shape[1]


# -- results of logits, and of a head --------------------------------------------------------------


class _OfLogits(Function):
    """The autograd function of the results of a model's logits.

    forward   the results of a copy of the logits, as rules overwrite it
    backward  dlogits, from another copy
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, inputs: Tensor | RowLabels, rules: ResultRules, shard: LogitShard
    ) -> Tensor:
        # Rules overwrite only logits in float32 or wider: bfloat16 needs no copy.
        is_wide = logits.dtype == torch.promote_types(logits.dtype, torch.float32)
        found, kept = rules.find(logits.clone() if is_wide else logits, inputs, shard)
        # The labels are passed to `save_for_backward` instead of stored as attributes of ctx: so
        # torch raises in backward if they were written in place after the forward.
        ctx.of_rows = isinstance(inputs, RowLabels)
        ctx.save_for_backward(logits, kept, *(inputs if ctx.of_rows else (inputs,)))
        ctx.rules, ctx.shard = rules, shard
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        logits, kept, *saved = ctx.saved_tensors
        inputs = RowLabels(*saved) if ctx.of_rows else saved[0]
        dlogits = ctx.rules.gradient(logits.clone(), inputs, kept, given, ctx.shard)
        return dlogits, None, None, None


def results_of_logits(
    logits: Tensor, inputs: Tensor | RowLabels, rules: ResultRules, shard: LogitShard
) -> Tensor:
    """Return the results [B, n, K] of a model's logits [B, n, V'], with gradients.

    `inputs` are as in `results_of_head`.
    """
    assert isinstance(inputs, Tensor) or isinstance(rules, TokenScoreRules)
    if isinstance(inputs, RowLabels):
        inputs = inputs._replace(rows=pinned_memory.send(inputs.rows, logits.device))
    found: Tensor = _OfLogits.apply(logits, inputs, rules, shard)
    return found


class _OfHead(Function):
    """The autograd function of the results of a head's logits, one loss chunk at a time.

    forward   for each loss chunk: logits = move_y(move_x(x) W^T), their results
    backward  for each chunk: logits again, if the rules need them, dlogits from the gradient of the
              results, dx = move_dx(move_dy(dlogits) W) and dW += move_dy(dlogits)^T move_x(x)

    Forward cannot compute the gradients, as it does for a loss, because it does not know the
    gradient of the results. So each token costs up to four products, and the weight is gathered in
    backward, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: Tensor,
        bias: Tensor | None,
        inputs: Tensor | RowLabels,
        of: HeadLoss,
        rules: ResultRules,
    ) -> Tensor:
        head, chunks = of.head, _Chunks(of, x, inputs)
        ctx.of, ctx.rules, ctx.chunks = of, rules, chunks
        found, kept = [], []
        with head.communicator.unshard(head, Phase.FORWARD, shard, bias) as full:
            for own_x, own_inputs in zip(chunks.cut(x), chunks.inputs(), strict=True):
                logits, _ = of.logits(own_x, full, training=False)
                ctx.num_logits = logits.shape[-1]
                results, again = rules.find(logits, own_inputs, of.logit_shard)
                del logits
                found.append(results)
                kept.append(again)
            # A copy, because the gathered bias is freed here and backward gathers only the weight.
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
            parts = chunks.cut(x), chunks.inputs(), chunks.split(given), kept, chunks.lengths
            for own_x, own_inputs, part, again, length in zip(*parts, strict=True):
                back = None
                # Rules that read only the shape and dtype of the logits get a tensor of one
                # element, expanded to this shape, so no logits are computed.
                logits = x.new_empty(1).expand(len(x), of.num_slices * length, ctx.num_logits)
                if rules.needs_logits or of.after_head is not None:
                    logits, back = of.logits(own_x, full, training=True)
                dy = rules.gradient(logits, own_inputs, again, part, of.logit_shard)
                del logits
                dy = of.moves.dy(dy, tag=Tag(Purpose.OUTPUT_GRADIENT, head.name, "dy")).wait()
                sums.add(own_x, dy if back is None else back(dy), full.weight)
                del dy
            dx, dw, db = sums.sums()
            return dx, *deliver(head, dw, db, needs[1:]), None, None, None


class _Chunks:
    """Cuts hidden states x [B, S', D] and the rules' inputs into loss chunks, and joins results.

    A chunk has S'/c positions of each of the p ranks, so n/c tokens of each sequence of the batch.
    With `RowLabels`, a chunk has the labels of its own hidden states, and `RowLabels.rows` of a
    chunk are indices into the hidden states of this chunk.
    """

    def __init__(self, of: HeadLoss, x: Tensor, inputs: Tensor | RowLabels) -> None:
        self._moves, self._layer, self._ranks = of.moves, of.head.name, of.num_slices
        self.count = num_loss_chunks(x, x[..., 0].numel() * of.num_slices, of.chunk_tokens)
        """The number of chunks to cut x into; x may have fewer, c."""
        self.lengths = [part.shape[1] for part in x.chunk(self.count, dim=1)]
        """Number of positions of a rank in each chunk; the length of the list is c."""
        self._inputs = inputs
        self._order: Tensor | None = None
        """With `RowLabels`: the indices [m] that sort labels by chunk; None: without."""
        if isinstance(inputs, RowLabels):
            order, self._sizes, rows = self._rows_of_chunks(inputs.rows, x.shape[1])
            self._order = pinned_memory.send(order, x.device)
            rows = pinned_memory.send(rows, x.device)
            self._inputs = RowLabels(inputs.tokens[self._order], rows)

    def cut(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the chunks of x [B, S', D] after their collective: [B, n/c, D] each."""
        return one_ahead(self._moves, self._layer, x.chunk(self.count, dim=1))

    def inputs(self) -> Iterator[Tensor | RowLabels]:
        """Yield the rules' inputs of each chunk: [B, n/c, ..], or the labels of its rows."""
        if isinstance(self._inputs, Tensor):
            return self._by_position(self._inputs)
        parts = (x.split(self._sizes) for x in self._inputs)
        return (RowLabels(*each) for each in zip(*parts, strict=True))

    def joined(self, found: list[Tensor]) -> Tensor:
        """Return the results of all chunks, in the order of the tokens: [B, n, K].

        B sequences have n tokens each, and each token has K results. With `RowLabels` there are
        results for each of the m labels instead, in the order of the labels: [m, K].
        """
        if self._order is None:
            by_ranks = [each.unflatten(1, (self._ranks, -1)) for each in found]  # [B, p, S'/c, K]
            return torch.cat(by_ranks, dim=2).flatten(1, 2)
        every = torch.cat(found)
        return torch.empty_like(every).index_copy_(0, self._order, every)

    def split(self, given: Tensor) -> Iterator[Tensor]:
        """Yield the gradient of each chunk's results.

        `given` is the gradient of the results of all chunks, as `joined` returns them.
        """
        if self._order is None:
            return self._by_position(given)
        return iter(given[self._order].split(self._sizes))

    def _by_position(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the c chunks [B, n/c, ..] of x [B, n, ..], each a copy made when it is needed."""
        # A chunk has some consecutive tokens of each rank's part of x.
        by_ranks = x.unflatten(1, (self._ranks, -1))  # [B, p, S', ..]
        return (part.flatten(1, 2) for part in by_ranks.split(self.lengths, dim=2))

    def _rows_of_chunks(self, rows: Tensor, length: int) -> tuple[Tensor, list[int], Tensor]:
        """Return how `RowLabels` are divided into chunks: (order, sizes, rows).

        `order` [m] are the indices that sort labels by chunk; `sizes` is the number of labels of
        each chunk; `rows` [m], in this order, are the indices of hidden states in their chunks.
        Computed on the host, which would otherwise wait for `sizes`. `length` is S'.
        """
        # For each label: which of the B p slices (S' tokens each), and the position in the slice.
        slices, places = rows // length, rows % length
        chunks = places // self.lengths[0]  # only the last chunk may be shorter than lengths[0]
        own = slices * torch.tensor(self.lengths)[chunks] + places - chunks * self.lengths[0]
        sizes: list[int] = chunks.bincount(minlength=len(self.lengths)).tolist()
        order = chunks.argsort(stable=True)
        return order, sizes, own[order]


def results_of_head(
    of: HeadLoss, x: Tensor, inputs: Tensor | RowLabels, rules: ResultRules
) -> Tensor:
    """Return per-token results for the head's input x [B, S', D], with gradients.

    `inputs` [B, n, ..] are the numbers that the rules need for each token, such as its label; the
    results are [B, n, K]. With `TokenScoreRules` they may be `RowLabels` [m], with results [m, K]:
    log-sum-exp and entropy are then computed once for each row, however many labels it has.
    Computes `of.chunk_tokens` tokens at a time, or fewer if the rules need several buffers.
    """
    assert isinstance(inputs, Tensor) or isinstance(rules, TokenScoreRules)
    head, size = of.head, of.chunk_tokens
    of = of._replace(chunk_tokens=size and max(1, size // rules.num_buffers))
    found: Tensor = _OfHead.apply(x, head.weight, head.bias, inputs, of, rules)
    return found
