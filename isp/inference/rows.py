"""Sequences of text to measure losses on: files, or what the run of a checkpoint held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import TypeAdapter

from isp.data.config import DataConfig
from isp.data.dataset import Dataset
from isp.data.sources import open_datasets
from isp.inference.source import Source

__all__ = ["Rows", "open_rows"]


class Rows(NamedTuple):
    """A plain stream of text, cut into sequences."""

    dataset: Dataset
    name: str
    """What is read, in words."""


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
