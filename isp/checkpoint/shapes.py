"""Whether a checkpoint is of a model, known from shapes alone, before any rank starts."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from isp.checkpoint.choice import CheckpointInfo
from isp.checkpoint.manifest import Damaged
from isp.checkpoint.state import MODEL
from isp.checkpoint.storage import read_metadata

__all__ = ["check_shapes"]

_SHOWN = 5


def check_shapes(info: CheckpointInfo, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if a checkpoint is not of the model whose parameters have these `shapes`."""
    try:
        saved = read_metadata(info.path, info.manifest.files).state_dict_metadata
    except (Damaged, pickle.UnpicklingError) as fault:
        raise ValueError(f"{info.path} is damaged: {fault}") from None
    there = {
        key.removeprefix(MODEL): tuple(value.size)
        for key, value in saved.items()
        if key.startswith(MODEL) and isinstance(value, TensorStorageMetadata)
    }
    odd = [name for name in sorted({*there, *shapes}) if there.get(name) != shapes.get(name)]
    if odd:
        lines = [f"\n  {n}: {there.get(n, 'none')} there, {shapes.get(n, 'none')} now" for n in odd]
        more = f"\n  and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        raise ValueError(
            f"{info.path} is of another model, by the shapes of its parameters:"
            f"{''.join(lines[:_SHOWN])}{more}"
        )
