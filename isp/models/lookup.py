"""The calls of torch that look up rows of a table, as `nn.Embedding` and classes made of it do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["looked_up"]

_NAMES = (
    "input",
    "weight",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)
"""The arguments of `F.embedding`."""


def looked_up(
    table: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Tensor | None:
    """The ids whose rows of an `nn.Embedding` a call of torch gives; None for any other call.

    That is `F.embedding` with the options of the table, of which `max_norm`, `scale_grad_by_freq`
    and `sparse` are not supported, or `weight[ids]` of a table whose rows all take a gradient.
    """
    if func is F.embedding:
        given = dict(zip(_NAMES, args, strict=False)) | dict(kwargs or {})
        alike = given.get("padding_idx") == table.padding_idx and given.get("max_norm") is None
        plain = not given.get("scale_grad_by_freq") and not given.get("sparse")
        ids = given["input"] if given["weight"] is table.weight and alike and plain else None
    elif func is Tensor.__getitem__ and args[0] is table.weight and table.padding_idx is None:
        ids = args[1]
    else:
        return None
    return ids if isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64) else None
