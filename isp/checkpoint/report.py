"""Descriptions of checkpoints for `isp checkpoint`: what they contain, and what is damaged."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from isp.checkpoint.folder import checkpoints_at
from isp.checkpoint.manifest import Damaged, Manifest, fault_of
from isp.checkpoint.state import (
    MASTER,
    model_key,
    optimizer_key,
    saved_weights,
    state_kinds,
)
from isp.checkpoint.storage import read_metadata

__all__ = ["Verification", "inspect", "verify"]


class Verification(NamedTuple):
    """Result of `verify`, which reads every byte of checkpoints."""

    good: bool
    """True if all bytes of all checkpoints are as they were written."""
    text: str
    """A line for each checkpoint: its path, and `good` or its fault."""


def inspect(path: Path | str) -> str:
    """Return a description of a checkpoint, or one line for each in a folder of them.

    `path` is a checkpoint, a folder of checkpoints, or the folder of a run. Compares file sizes but
    reads no tensor. Raises ValueError if there is no checkpoint.
    """
    found = checkpoints_at(Path(path))
    return _details(found[0]) if found == [Path(path)] else "\n".join(_summary(p) for p in found)


def verify(path: Path | str) -> Verification:
    """Check that every byte of a checkpoint, or of all in a folder, is as it was written.

    `path` as for `inspect`. Raises ValueError if there is no checkpoint.
    """
    faults = {folder: fault_of(folder, contents=True) for folder in checkpoints_at(Path(path))}
    lines = [f"{folder}: {fault or 'good'}" for folder, fault in faults.items()]
    return Verification(not any(faults.values()), "\n".join(lines))


def _summary(folder: Path) -> str:
    """Return a line about one checkpoint: time, size and layout, or what is wrong with it."""
    if fault := fault_of(folder):
        return f"{folder.name}  {fault}"
    manifest = Manifest.read(folder)
    return f"{folder.name}  {_when(manifest)}  {_size(manifest)}  {_layout(manifest)}"


def _details(folder: Path) -> str:
    """Return several lines about one checkpoint, with its parameters, or what is wrong with it."""
    if fault := fault_of(folder):
        return f"{folder}\n{fault}"
    manifest = Manifest.read(folder)
    try:
        metadata = read_metadata(folder, manifest.files)
    except Damaged as fault:
        return f"{folder}\ndamaged: {fault}"
    updates = f", {manifest.num_updates:,} updates" if manifest.num_updates >= 0 else ""
    return "\n".join(
        [
            f"{folder}",
            f"step {manifest.step:,}, {manifest.tokens:,} tokens{updates}, {_when(manifest)}",
            f"{_size(manifest)}, written by {_layout(manifest)}",
            f"kept values: {', '.join(manifest.shared) or 'none'}",
            "",
            _table(metadata),
            "",
            "complete; only `verify` reads every byte",
        ]
    )


def _table(metadata: Metadata) -> str:
    """Return a table of parameters: shape, and dtypes of weight, master weight and states."""
    states, weights = state_kinds(metadata.state_dict_metadata), saved_weights(metadata)
    lines = [("parameter", "shape", "weights", "master weights", *states)]
    for name in sorted(weights):
        keys = [model_key(name), *(optimizer_key(name, kind) for kind in (MASTER, *states))]
        dtypes = (_dtype(metadata, key) for key in keys)
        lines.append((name, str(list(weights[name].size)), *dtypes))
    total = sum(math.prod(weight.size) for weight in weights.values())
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ((f"{cell:{width}}" for cell, width in zip(x, widths, strict=True)) for x in lines)
    table = "\n".join("  ".join(line).rstrip() for line in cells)
    return f"{table}\n{len(weights)} parameters, {total:,} elements"


def _dtype(metadata: Metadata, key: str) -> str:
    """Return the dtype of a saved tensor; "-" if there is none."""
    saved = metadata.state_dict_metadata.get(key)
    if not isinstance(saved, TensorStorageMetadata):
        return "-"
    return str(saved.properties.dtype).removeprefix("torch.")


def _when(manifest: Manifest) -> str:
    """Return when a checkpoint was saved, in local time, as text."""
    return time.strftime("saved %Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))


def _size(manifest: Manifest) -> str:
    """Return the size and the number of files of a checkpoint, as text."""
    return f"{manifest.num_bytes / 2**20:,.1f} MiB in {len(manifest.files)} files"


def _layout(manifest: Manifest) -> str:
    """Return mode and group sizes of the run that saved a checkpoint, as text."""
    saved = manifest.topology
    sizes = ("world_size", "pipeline", "tensor", "weight", "zero1")
    text = ", ".join(f"{name} {getattr(saved, name)}" for name in sizes)
    return f"{saved.mode}: {text}"
