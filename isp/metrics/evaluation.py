"""`Evaluation`: the result of `isp evaluate`, as written to `evaluation.json`."""

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
    """Loss of the tokens at a range of positions in their sequences, which are counted from 0."""

    begin: int
    """First position of the range."""
    end: int
    """First position after the range."""
    tokens: int
    """Number of tokens with a label at these positions, over all sequences."""
    loss: float | None
    """Mean cross-entropy in nats; None if there are no tokens or it is not finite."""

    @property
    def places(self) -> str:
        """First and last position, as text for tables."""
        return f"{self.begin:,}-{self.end - 1:,}"


@dataclass(frozen=True, kw_only=True)
class TextLosses:
    """Losses on text, by the position of a token in its sequence."""

    source: str
    """Where the text comes from, in words."""
    rows: int
    """Number of sequences that the text was cut into."""
    length: int
    """Number of tokens in a sequence."""
    buckets: tuple[PositionBucket, ...]
    """Buckets in order of positions; together they cover a sequence."""

    def loss_within(self, length: int) -> float | None:
        """Return the mean loss of the first `length` positions; a bucket has to end there.

        Returns None if one of these buckets has a loss that is not finite, or all have no tokens.
        """
        inside = [bucket for bucket in self.buckets if bucket.end <= length]
        tokens = sum(bucket.tokens for bucket in inside)
        if not tokens or any(bucket.tokens and bucket.loss is None for bucket in inside):
            return None
        return sum((bucket.loss or 0.0) * bucket.tokens for bucket in inside) / tokens

    def shown(self, bucket: PositionBucket) -> tuple[str, ...]:
        """Return the cells of a bucket in a table with `BUCKET_COLUMNS`.

        The last one, `loss so far`, is the mean loss of all positions up to the bucket's end.
        """
        loss, so_far = bucket.loss, self.loss_within(bucket.end)
        perplexity = None if loss is None else math.exp(min(loss, 700.0))  # exp overflows at 710
        numbers = map(_number, (loss, perplexity, so_far))
        return bucket.places, f"{bucket.tokens:,}", *numbers


@dataclass(frozen=True, kw_only=True)
class Passkeys:
    """Numbers of passkeys that a model found, by length of the prompt and depth of the key."""

    digits: int
    """Number of digits of a key."""
    keys: int
    """Number of prompts for each length and depth."""
    seed: int
    lengths: tuple[int, ...]
    """Lengths of prompts: the most tokens that a prompt may have together with its answer."""
    depths: tuple[float, ...]
    """Share of the filler before the key: 0 at the beginning, 1 at the end."""
    found: tuple[tuple[int, ...], ...]
    """Number of keys that the model found, as a tuple for each of `lengths` with a number for each
    of `depths`."""

    def rate(self, length: int) -> float:
        """Return the share of keys found at one length, over all depths."""
        row = self.found[self.lengths.index(length)]
        return sum(row) / (self.keys * len(row))


@dataclass(frozen=True, kw_only=True)
class Evaluation(Result):
    """Result of `isp evaluate` for one trained model."""

    newest = 1
    name, again = "an evaluation", "evaluate the model again"

    version: int = newest
    model: str
    """Where the weights come from, in words."""
    dtype: str
    layout: str
    """Number of ranks and mode, in words."""
    trained_length: int | None
    """Length of the training sequences; None if not known."""
    command: str
    text: TextLosses | None
    passkeys: Passkeys | None


def _number(value: float | None) -> str:
    """Return a number as text for a table: four decimals, or scientific notation from 1000 on."""
    return "-" if value is None else f"{value:.4f}" if value < 1000 else f"{value:.3e}"
