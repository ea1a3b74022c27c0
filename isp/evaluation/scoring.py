"""How likely a model finds tokens behind others.

V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from isp.data.batch import MicroBatch
from isp.data.dataset import IGNORE_INDEX
from isp.evaluation.engine import Engine

__all__ = ["Continuation", "Score", "batches", "log_likelihoods", "scores"]

T = TypeVar("T")


class Continuation(NamedTuple):
    """Tokens that follow others; at least one of each."""

    context: Sequence[int]
    tokens: Sequence[int]

    @property
    def read(self) -> list[int]:
        """What a model reads: all but the last token."""
        return [*self.context, *self.tokens][:-1]


class Score(NamedTuple):
    """What a model makes of a continuation."""

    log_likelihood: float
    """Of all its tokens, in nats."""
    is_greedy: bool
    """Whether each of them is the likeliest."""


def scores(
    engine: Engine, continuations: Sequence[Continuation], *, batch_tokens: int
) -> Iterator[Score]:
    """The scores in order; a collective over the ranks of `engine`."""
    lengths = [len(continuation.read) for continuation in continuations]
    for batch in batches(continuations, lengths, batch_tokens):
        counts = [len(tokens) for _, tokens in batch]
        logits = engine.logits([continuation.read for continuation in batch], counts)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [sum of counts, V]
        targets = torch.tensor([token for _, tokens in batch for token in tokens]).to(logits.device)
        losses = F.cross_entropy(logits, targets, reduction="none").double().cpu()
        greedy = (logits.argmax(-1) == targets).cpu()
        for loss, same in zip(losses.split(counts), greedy.split(counts), strict=True):
            yield Score(-float(loss.sum()), bool(same.all()))


def log_likelihoods(
    engine: Engine, continuations: Sequence[Continuation], *, batch_tokens: int
) -> Iterator[float]:
    """As `scores`, for long continuations: the logits of all tokens never exist at once."""
    lengths = [len(continuation.read) for continuation in continuations]
    for batch in batches(continuations, lengths, batch_tokens):
        shape = len(batch), max(len(continuation.read) for continuation in batch)
        tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE_INDEX)
        for row, continuation in enumerate(batch):
            end, count = len(continuation.read), len(continuation.tokens)
            tokens[row, :end] = torch.tensor(continuation.read)
            labels[row, end - count : end] = torch.tensor(continuation.tokens)
        positions = torch.arange(shape[1]).repeat(len(batch), 1)
        losses = engine.losses(MicroBatch(tokens, labels, positions, None))
        yield from (-losses.double().sum(1)).tolist()


def batches(items: Sequence[T], lengths: Sequence[int], limit: int) -> Iterator[Sequence[T]]:
    """Neighbours whose lengths, each taken as that of the longest, sum up to at most `limit`.

    An item beyond it is alone.
    """
    begin = longest = 0
    for end, length in enumerate(lengths):
        longest = max(longest, length)
        if begin < end and (end + 1 - begin) * longest > limit:
            yield items[begin:end]
            begin, longest = end, length
    if items:
        yield items[begin:]
