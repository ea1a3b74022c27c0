"""Contents of `evaluation.json`: the results of `isp evaluate` for a trained model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isp.utils.result_file import Result

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
    """Tokens in a range of positions; a position is the number of tokens before."""

    begin: int
    end: int
    """First position after the range."""
    tokens: int
    """Number of tokens over all sequences."""
    loss: float | None
    """Mean cross-entropy in nats; None if there are no tokens or it is not finite."""

    @property
    def places(self) -> str:
        """First and last position, for reports."""
        return f"{self.begin:,}-{self.end - 1:,}"


@dataclass(frozen=True, kw_only=True)
class TextLosses:
    """Loss of text by the position of a token in its sequence."""

    source: str
    """Source of the text, in words."""
    rows: int
    length: int
    """Tokens of a sequence."""
    buckets: tuple[PositionBucket, ...]
    """Buckets in order of positions; together they cover a sequence."""

    def loss_within(self, length: int) -> float | None:
        """Return the mean loss of the first `length` positions, where a bucket must end.

        Returns None if a bucket within has no finite loss, or no tokens exist.
        """
        inside = [bucket for bucket in self.buckets if bucket.end <= length]
        tokens = sum(bucket.tokens for bucket in inside)
        if not tokens or any(bucket.tokens and bucket.loss is None for bucket in inside):
            return None
        return sum((bucket.loss or 0.0) * bucket.tokens for bucket in inside) / tokens

    def shown(self, bucket: PositionBucket) -> tuple[str, ...]:
        """Return a bucket as `BUCKET_COLUMNS`; the last column is the mean up to its end."""
        loss, so_far = bucket.loss, self.loss_within(bucket.end)
        perplexity = None if loss is None else math.exp(min(loss, 700.0))
        numbers = map(_number, (loss, perplexity, so_far))
        return bucket.places, f"{bucket.tokens:,}", *numbers


@dataclass(frozen=True, kw_only=True)
class Passkeys:
    """Passkeys found in prompts of several lengths, with the key at several depths."""

    digits: int
    keys: int
    """Prompts per length and depth."""
    seed: int
    lengths: tuple[int, ...]
    """Tokens of prompt and answer, at most."""
    depths: tuple[float, ...]
    """Share of the filler before the key: 0 at the beginning, 1 at the end."""
    found: tuple[tuple[int, ...], ...]
    """Number of keys found, by length and depth."""

    def rate(self, length: int) -> float:
        """Return the share of keys found at one length, over all depths."""
        row = self.found[self.lengths.index(length)]
        return sum(row) / (self.keys * len(row))


@dataclass(frozen=True, kw_only=True)
class Evaluation(Result):
    """Result of `isp evaluate`."""

    newest = 1
    name, again = "an evaluation", "evaluate the model again"

    version: int = newest
    model: str
    """Origin of the weights, in words."""
    dtype: str
    layout: str
    """Description of the ranks."""
    trained_length: int | None
    """Length of the training sequences; None if not known."""
    command: str
    text: TextLosses | None
    passkeys: Passkeys | None


def _number(value: float | None) -> str:
    """Return a number for a table, with four decimals or, if large, in scientific notation."""
    return "-" if value is None else f"{value:.4f}" if value < 1000 else f"{value:.3e}"
