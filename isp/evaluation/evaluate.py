"""What a model makes of long text: its loss by position, and keys that it finds again."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
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
from isp.metrics.evaluation import Passkeys, PositionBucket, TextLosses

__all__ = ["Rows", "count_found", "find_passkeys", "open_rows", "text_losses"]


class Rows(NamedTuple):
    """A plain stream of text, cut into sequences."""

    dataset: Dataset
    name: str
    """The source of the text, for the printed table."""


def open_rows(source: Source, *, files: Sequence[str], length: int) -> Rows | None:
    """Sequences of `length` tokens of `files`, or of what the run held out; None: nothing.

    Raises ValueError, in a line, if there is not a sequence.
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
        return Rows(datasets.train, ", ".join(files))
    parts = [part.path for part in config.valid_parts]
    return Rows(datasets.valid, f"held out of {parts if len(parts) > 1 else parts[0]}")


def text_losses(
    engine: Engine,
    dataset: Dataset,
    *,
    lengths: Sequence[int],
    rows: int,
    batch_tokens: int,
    source: str,
) -> TextLosses:
    """The losses of the first `rows` samples of `dataset`, of as many tokens as the last length.

    Buckets end at `lengths`, in increasing order. Attention is causal: up to a place, rows of
    that length would have the same losses. A collective over the ranks of `engine`.
    """
    longest = lengths[-1]
    sums, counts = torch.zeros(2, longest, dtype=torch.float64)
    rows = min(rows, dataset.samples_per_epoch)
    for batch in held_out_micro_batches(
        dataset,
        micro_bsz=min(rows, max(1, batch_tokens // longest)),
        data_rank=0,
        data_size=1,
        max_samples=rows,
    ):
        sums += engine.losses(batch).double().sum(0).cpu()
        counts += (batch.labels != IGNORE_INDEX).sum(0)
    buckets = tuple(_bucket(sums, counts, *ends) for ends in pairwise([0, *lengths]))
    return TextLosses(source=source, rows=rows, length=longest, buckets=buckets)


def _bucket(sums: Tensor, counts: Tensor, begin: int, end: int) -> PositionBucket:
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
) -> Passkeys:
    """Ask for `keys` keys at each length and depth; a collective over the ranks of `engine`.

    Those of a cell are drawn by `seed`, its length and its depth, whatever others there are.
    """

    def found(length: int, depth: float) -> int:
        rng, count = random.Random(f"{seed} {length} {depth}"), max(1, batch_tokens // length)
        cell = [prompts.draw(rng, length=length, depth=depth) for _ in range(keys)]
        batches = (cell[i : i + count] for i in range(0, keys, count))
        return sum(count_found(engine, source, batch) for batch in batches)

    return Passkeys(
        digits=prompts.digits,
        keys=keys,
        seed=seed,
        lengths=tuple(lengths),
        depths=tuple(depths),
        found=tuple(tuple(found(length, depth) for depth in depths) for length in lengths),
    )


def count_found(engine: Engine, source: Source, batch: Sequence[Passkey]) -> int:
    """Count the prompts after which every token of the key is the likeliest; a collective.

    By teacher forcing: greedy decoding writes the key after exactly these prompts.
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
    # Apart from the prompt, as in training examples and as a model that decodes sees them.
    tokens = source.tokenizer.encode(passkey.answer)
    ends = (n for n in range(1, len(tokens)) if passkey.key in source.tokenizer.decode(tokens[:n]))
    found: list[int] = tokens[: next(ends, len(tokens))].tolist()
    return found
