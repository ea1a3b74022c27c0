"""An evaluation as text."""

from __future__ import annotations

from collections.abc import Iterator

from isp.metrics.evaluation import BUCKET_COLUMNS, Evaluation, Passkeys, TextLosses
from isp.profile.table import aligned

__all__ = ["describe"]

_BEYOND = "beyond the trained length"


def describe(evaluation: Evaluation) -> str:
    """For a terminal."""
    parts, trained = [], evaluation.trained_length
    if (text := evaluation.text) is not None:
        parts += [
            f"loss by position in {text.rows} sequences of {text.length:,} tokens, {text.source};"
            f" `loss so far`: cumulative mean",
            aligned(list(_text(text, trained))),
        ]
    if (passkeys := evaluation.passkeys) is not None:
        parts += [
            f"passkeys of {passkeys.digits} digits found, of {passkeys.keys} at each length"
            f" (tokens) and depth",
            aligned(list(_passkeys(passkeys, trained))),
        ]
    return "\n\n".join(parts)


def _text(text: TextLosses, trained: int | None) -> Iterator[tuple[str, ...]]:
    yield *BUCKET_COLUMNS, ""
    for bucket in text.buckets:
        yield (
            *text.shown(bucket),
            _BEYOND if trained is not None and bucket.begin >= trained else "",
        )


def _passkeys(passkeys: Passkeys, trained: int | None) -> Iterator[tuple[str, ...]]:
    yield "length", *(f"{depth:.0%}" for depth in passkeys.depths), "all", ""
    for length, row in zip(passkeys.lengths, passkeys.found, strict=True):
        yield (
            f"{length:,}",
            *map(str, row),
            f"{passkeys.rate(length):.0%}",
            _BEYOND if trained is not None and length > trained else "",
        )
