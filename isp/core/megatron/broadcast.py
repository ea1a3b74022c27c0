"""`broadcast_data`, which sends a batch and its shapes from the first rank of a group to all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isp.core.comm import Channel, pinned_memory
from isp.core.comm.channel import check_channel
from isp.core.comm.tag import Purpose, Tag

__all__ = ["broadcast_data"]

_TAG = Tag(Purpose.DATA, tensor="broadcast_data")

_MAX_DIMS = 8
_CPU = torch.device("cpu")
_FAULTS = {
    -1: "data has no {key!r}",
    -2: "data[{key!r}] is not a tensor of {dtype}",
    -3: "data[{key!r}] has more than 8 dims",
}
"""Error texts, by the code that a header has instead of the number of dims."""


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    *,
    channel: Channel,
    device: torch.device = _CPU,
) -> dict[str, Tensor]:
    """Broadcast the tensors under `keys` in `data` from the channel's first rank to all its ranks.

    All must have `dtype`; their shapes may differ. `data` is read on the first rank only. There are
    two broadcasts, one of all shapes and one of all values. The results are on each rank's
    `device`. On a channel of one rank nothing is sent, and tensors that are already on `device` are
    returned as they are.

    Raises ValueError on all ranks, before values are sent, if a tensor is missing, has another
    dtype, or has more than 8 dims; the text names the key.
    Source: Megatron-LM, core/tensor_parallel/data.
    """
    check_channel("channel", channel)
    if len(set(keys)) < len(keys):
        raise ValueError(f"a key is named twice: {list(keys)}")
    own = dict(data or {}) if channel.rank == 0 else {}
    # A fault is sent in the header: if only the first rank raised, the others would hang.
    table = torch.tensor([_header(own.get(key), dtype) for key in keys], dtype=torch.int64)
    if keys:
        table = channel.broadcast_(table.to(device), tag=_TAG).wait()
    headers = table.tolist()
    for key, (num_dims, *_) in zip(keys, headers, strict=True):
        if num_dims < 0:
            raise ValueError(_FAULTS[num_dims].format(key=key, dtype=dtype))
    if channel.size == 1:
        return {key: pinned_memory.send(own[key], device) for key in keys}
    # Send all values in one message, which each rank cuts by the shapes.
    shapes = [dims[:num_dims] for num_dims, *dims in headers]
    sizes = [math.prod(shape) for shape in shapes]
    payload = torch.empty(sum(sizes), dtype=dtype, device=device)
    if channel.rank == 0 and keys:
        payload = pinned_memory.send(torch.cat([own[key].reshape(-1) for key in keys]), device)
    if payload.numel():  # sent as bytes: some backends lack some dtypes
        channel.broadcast_(payload.view(torch.uint8), tag=_TAG).wait()
    parts = zip(keys, payload.split(sizes), shapes, strict=True)
    return {key: part.view(shape) for key, part, shape in parts}


def _header(value: object, dtype: torch.dtype) -> tuple[int, ...]:
    """Return 1 + `_MAX_DIMS` numbers: number of dims, or a code of `_FAULTS`; shape; zeros."""
    if not isinstance(value, Tensor) or value.dtype != dtype:
        return -1 if value is None else -2, *(0,) * _MAX_DIMS
    if value.dim() > _MAX_DIMS:
        return -3, *(0,) * _MAX_DIMS
    return value.dim(), *value.shape, *(0,) * (_MAX_DIMS - value.dim())
