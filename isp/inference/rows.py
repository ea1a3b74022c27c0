"""Rows of text to measure losses on: files, or what the run of a checkpoint held out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from isp.checkpoint.choice import Candidates, preview
from isp.checkpoint.folder import checkpoints_at
from isp.data.config import DataConfig
from isp.data.dataset import Dataset
from isp.data.sources import open_datasets
from isp.inference.source import Source

__all__ = ["TextStream", "open_rows"]


class TextStream(NamedTuple):
    """A plain stream of text, cut into rows."""

    dataset: Dataset
    name: str
    """What is read, in words."""


def open_rows(
    path: Path, source: Source, *, files: Sequence[str], tokenizer: str | None, length: int
) -> TextStream | None:
    """Rows of `length` tokens of `files`, or of what the run at `path` held out; None: nothing.

    `tokenizer`: another one than the model's. Raises ValueError, in a line, if there is not a row.
    """
    config = _data_config(path, source, files, tokenizer, length)
    if config is None:
        return None
    try:
        datasets = open_datasets(config, seed=0)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"no rows of {length:,} tokens: {error} (or name files with --data, shorter --lengths,"
            f" or leave text out with --rows 0)"
        ) from error
    if datasets.valid is None:
        return TextStream(datasets.train, ", ".join(files))
    return TextStream(datasets.valid, f"held out of {config.valid_source or config.source}")


def _data_config(
    path: Path, source: Source, files: Sequence[str], tokenizer: str | None, length: int
) -> DataConfig | None:
    kept: Mapping[str, Any] = {"tokenizer": str(path)}
    if source.checkpoint is not None:
        info = preview(Candidates(str(path), [str(p) for p in checkpoints_at(path)], "", []))
        assert info is not None
        kept = info.manifest.shared["config"]["data"]
    if tokenizer is not None:
        kept = {**kept, "tokenizer": tokenizer, "eos_token": None}
    if files:
        names = ("tokenizer", "eos_token")
        kept = {"source": list(files), **{name: kept.get(name) for name in names}}
    elif not (kept.get("valid_source") or kept.get("valid_fraction")):
        return None
    rows = {"pack": False, "micro_bsz": 1, "micro_num": 1, "seq_len": length}
    return TypeAdapter(DataConfig).validate_json(json.dumps({**kept, **rows}))
