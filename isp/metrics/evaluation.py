"""The contents of `evaluation.json`: what `isp evaluate` found out about a trained model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isp.utils.files import Result

__all__ = [
    "BUCKET_COLUMNS",
    "EVALUATION_FILE",
    "Evaluation",
    "Passkeys",
    "PositionBucket",
    "TextLosses",
]

EVALUATION_FILE = "evaluation.json"
BUCKET_COLUMNS = ("positions", "tokens", "loss", "perplexity", "loss so far")


@dataclass(frozen=True, kw_only=True)
class PositionBucket:
    """The tokens at some places of their sequences; a place is the number of tokens before."""

    begin: int
    end: int
    """The first place that is not in it."""
    tokens: int
    """Over all sequences."""
    loss: float | None
    """Their mean cross-entropy, in nats; None where there are none, or it is not finite."""

    @property
    def places(self) -> str:
        """The first and the last one."""
        return f"{self.begin:,}-{self.end - 1:,}"


@dataclass(frozen=True, kw_only=True)
class TextLosses:
    """The loss of text by the place of a token in its sequence."""

    source: str
    """What was read, in words."""
    rows: int
    length: int
    """Tokens of a sequence."""
    buckets: tuple[PositionBucket, ...]
    """In the order of places, all of a sequence together."""

    def loss_within(self, length: int) -> float | None:
        """The mean over the first `length` places, which a bucket ends with."""
        inside = [bucket for bucket in self.buckets if bucket.end <= length]
        tokens = sum(bucket.tokens for bucket in inside)
        if not tokens or any(bucket.tokens and bucket.loss is None for bucket in inside):
            return None
        return sum((bucket.loss or 0.0) * bucket.tokens for bucket in inside) / tokens

    def shown(self, bucket: PositionBucket) -> tuple[str, ...]:
        """A bucket as `BUCKET_COLUMNS`; the last is the mean from the beginning to its end."""
        loss, so_far = bucket.loss, self.loss_within(bucket.end)
        perplexity = None if loss is None else math.exp(min(loss, 700.0))
        numbers = map(_number, (loss, perplexity, so_far))
        return bucket.places, f"{bucket.tokens:,}", *numbers


@dataclass(frozen=True, kw_only=True)
class Passkeys:
    """Keys found in prompts of some lengths, with the key at some depths."""

    digits: int
    keys: int
    """In each cell: prompts of one length and depth."""
    seed: int
    lengths: tuple[int, ...]
    """Tokens of prompt and answer, at most."""
    depths: tuple[float, ...]
    """Parts of the filler before the key: 0 at the beginning, 1 at the end."""
    found: tuple[tuple[int, ...], ...]
    """The keys that were found, for each length at each depth."""

    def rate(self, length: int) -> float:
        """The part of the keys found at all depths."""
        row = self.found[self.lengths.index(length)]
        return sum(row) / (self.keys * len(row))


@dataclass(frozen=True, kw_only=True)
class Evaluation(Result):
    """Result of `isp evaluate`."""

    newest = 1
    name, again = "an evaluation", "evaluate the model again"

    version: int = newest
    model: str
    """Where the weights are from, in words."""
    dtype: str
    layout: str
    """The ranks, in words."""
    trained_length: int | None
    """Length of the sequences that the model was trained on; None: not known."""
    command: str
    text: TextLosses | None
    passkeys: Passkeys | None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1000 else f"{value:.3e}"
