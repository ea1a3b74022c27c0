"""Measurements on long text: the loss by position, and passkeys that a model finds.

`describe` makes the tables that `isp evaluate` prints.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from isp.config.data import DataConfig
from isp.data.batch import held_out_micro_batches
from isp.data.dataset import IGNORE_INDEX, Dataset
from isp.data.sources import open_datasets
from isp.evaluation.engine import Engine
from isp.evaluation.passkey import Passkey, PasskeyPrompts
from isp.evaluation.source import Source
from isp.metrics.evaluation import BUCKET_COLUMNS, Evaluation, Passkeys, PositionBucket, TextLosses
from isp.profile.table import aligned

__all__ = [
    "TextRows",
    "Track",
    "count_found",
    "describe",
    "find_passkeys",
    "open_rows",
    "text_losses",
    "untracked",
]


Track = Callable[[Sequence[int], str], Iterable[int]]
"""A progress display: yields the numbers it is given, and shows under a name how many of them the
caller has taken."""


def untracked(numbers: Sequence[int], _: str) -> Iterable[int]:
    """Return `numbers`, showing nothing."""
    return numbers


class TextRows(NamedTuple):
    """Text to evaluate on, cut into sequences of equal length."""

    dataset: Dataset
    name: str
    """Where the text comes from, in words, for the printed table."""


def open_rows(source: Source, *, files: Sequence[str], length: int) -> TextRows | None:
    """Return sequences of `length` tokens from `files`, or without them from held-out text.

    Held-out text is that of the run that trained the model of `source`. Returns None if there is
    neither. Raises ValueError, in one line, if the text is too short for a single sequence.
    """
    kept = source.data
    if files:
        names = ("tokenizer", "eos_token", "add_bos")
        kept = {"source": list(files), **{name: kept.get(name) for name in names}}
    elif not (kept.get("valid_source") or kept.get("valid_fraction")):
        return None
    plain = {"pack": False, "micro_bsz": 1, "micro_num": 1, "seq_len": length}
    config = TypeAdapter(DataConfig).validate_json(json.dumps({**kept, **plain}))
    try:
        datasets = open_datasets(config, seed=0)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"no sequences of {length:,} tokens: {error} (or name files with --data,"
            f" shorter --lengths, or leave text out with --rows 0)"
        ) from error
    if datasets.valid is None:
        return TextRows(datasets.train, ", ".join(files))
    parts = [part.path for part in config.valid_parts]
    return TextRows(datasets.valid, f"held out of {parts if len(parts) > 1 else parts[0]}")


def text_losses(
    engine: Engine,
    dataset: Dataset,
    *,
    lengths: Sequence[int],
    rows: int,
    batch_tokens: int,
    source: str,
    track: Track = untracked,
) -> TextLosses:
    """Return losses by position of the first `rows` samples, each `lengths[-1]` tokens long.

    `lengths` increase; each is the end of a bucket of positions. One pass over the longest
    sequences measures all lengths: attention is causal, so tokens before a position have the same
    losses as in sequences of that length. `source`: where the text comes from, in words. A
    collective over the ranks of `engine`.
    """
    longest = lengths[-1]
    sums, counts = torch.zeros(2, longest, dtype=torch.float64)
    rows = min(rows, dataset.samples_per_epoch)
    micro_bsz = min(rows, max(1, batch_tokens // longest))
    batches = held_out_micro_batches(
        dataset, micro_bsz=micro_bsz, data_rank=0, data_size=1, max_samples=rows
    )
    numbers = track(range(-(-rows // micro_bsz)), "batches of text")
    for _, batch in zip(numbers, batches, strict=True):
        sums += engine.losses(batch).double().sum(0).cpu()
        counts += (batch.labels != IGNORE_INDEX).sum(0)
    buckets = tuple(_bucket(sums, counts, *ends) for ends in pairwise([0, *lengths]))
    return TextLosses(source=source, rows=rows, length=longest, buckets=buckets)


def _bucket(sums: Tensor, counts: Tensor, begin: int, end: int) -> PositionBucket:
    """Return the bucket of positions `begin` to `end - 1`, given sums and counts by position."""
    total, count = float(sums[begin:end].sum()), int(counts[begin:end].sum())
    finite = count > 0 and math.isfinite(total)
    return PositionBucket(
        begin=begin, end=end, tokens=count, loss=total / count if finite else None
    )


def find_passkeys(
    engine: Engine,
    source: Source,
    prompts: PasskeyPrompts,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    keys: int,
    seed: int,
    batch_tokens: int,
    track: Track = untracked,
) -> Passkeys:
    """Return, for each prompt length and depth, for how many of `keys` prompts the model finds the
    key.

    The prompts of a length and depth depend on these and `seed` only, so they stay the same if
    other lengths are added. A collective over the ranks of `engine`.
    """

    def found(length: int, depth: float) -> int:
        rng, count = random.Random(f"{seed} {length} {depth}"), max(1, batch_tokens // length)
        cell = [prompts.draw(rng, length=length, depth=depth) for _ in range(keys)]
        batches = (cell[i : i + count] for i in range(0, keys, count))
        return sum(count_found(engine, source, batch) for batch in batches)

    # All depths of a length, then the next length: short prompts come first.
    numbers = track(range(len(lengths) * len(depths)), "passkeys of a length and depth")
    counts = [found(lengths[i // len(depths)], depths[i % len(depths)]) for i in numbers]
    return Passkeys(
        digits=prompts.digits,
        keys=keys,
        seed=seed,
        lengths=tuple(lengths),
        depths=tuple(depths),
        found=tuple(tuple(counts[i : i + len(depths)]) for i in range(0, len(counts), len(depths))),
    )


def count_found(engine: Engine, source: Source, batch: Sequence[Passkey]) -> int:
    """Return the number of prompts after which the model would write the key; a collective.

    One forward with teacher forcing shows it: each token of the key has to be the most likely one,
    which is the case exactly if greedy decoding writes the key.
    """
    answers = [_tokens_of_key(source, passkey) for passkey in batch]
    read = [
        [*source.encode(passkey.prompt), *answer[:-1]]
        for passkey, answer in zip(batch, answers, strict=True)
    ]
    counts = [len(answer) for answer in answers]
    likeliest = engine.logits(read, counts).argmax(-1).split(counts)
    return sum(own.tolist() == answer for own, answer in zip(likeliest, answers, strict=True))


def _tokens_of_key(source: Source, passkey: Passkey) -> list[int]:
    """Return the tokens of the answer up to the end of its key."""
    # Encode the answer apart from the prompt, as in training examples: tokens do not span the two.
    tokens = source.tokenizer.encode(passkey.answer)
    ends = (n for n in range(1, len(tokens)) if passkey.key in source.tokenizer.decode(tokens[:n]))
    found: list[int] = tokens[: next(ends, len(tokens))].tolist()
    return found


# -- the printed tables ---------------------------------------------------------------------


_BEYOND = "beyond the trained length"


def describe(evaluation: Evaluation) -> str:
    """Return the tables of an evaluation, each below a line about it, for a terminal."""
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
    """Yield the rows of the table of losses."""
    yield *BUCKET_COLUMNS, ""
    for bucket in text.buckets:
        yield (
            *text.shown(bucket),
            _BEYOND if trained is not None and bucket.begin >= trained else "",
        )


def _passkeys(passkeys: Passkeys, trained: int | None) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of passkeys."""
    yield "length", *(f"{depth:.0%}" for depth in passkeys.depths), "all", ""
    for length, row in zip(passkeys.lengths, passkeys.found, strict=True):
        yield (
            f"{length:,}",
            *map(str, row),
            f"{passkeys.rate(length):.0%}",
            _BEYOND if trained is not None and length > trained else "",
        )
