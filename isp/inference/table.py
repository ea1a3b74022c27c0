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
    if evaluation.text is not None:
        parts += [_text_head(evaluation.text), aligned(list(_text(evaluation.text, trained)))]
    if evaluation.passkeys is not None:
        keys = list(_passkeys(evaluation.passkeys, trained))
        parts += [_passkey_head(evaluation.passkeys), aligned(keys)]
    return "\n\n".join(parts)


def _text_head(text: TextLosses) -> str:
    return (
        f"loss by position in {text.rows} sequences of {text.length:,} tokens, {text.source};"
        f" `loss so far`: cumulative mean"
    )


def _text(text: TextLosses, trained: int | None) -> Iterator[tuple[str, ...]]:
    yield *BUCKET_COLUMNS, ""
    for bucket in text.buckets:
        yield (
            *text.shown(bucket),
            _BEYOND if trained is not None and bucket.begin >= trained else "",
        )


def _passkey_head(passkeys: Passkeys) -> str:
    return (
        f"passkeys of {passkeys.digits} digits found, of {passkeys.keys} at each length (tokens)"
        f" and depth"
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
