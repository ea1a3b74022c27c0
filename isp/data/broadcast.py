"""Tensors of a batch from the first rank of a group to the others, shapes included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isp.comm import Channel, host_memory
from isp.comm.tag import Purpose, Tag

__all__ = ["broadcast_data"]

_TAG = Tag(Purpose.DATA, tensor="broadcast_data")

_MAX_DIMS = 8
_CPU = torch.device("cpu")
_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
"""Dtypes that headers can name."""
_MISSING = -1
_NOT_A_TENSOR = -2
_ANOTHER_DTYPE = -3


class _Header(NamedTuple):
    """The first rank's entry under one key."""

    kind: int
    """Index of the dtype in `_DTYPES`, or why there is none."""
    num_dims: int
    dims: tuple[int, ...]


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    *,
    channel: Channel,
    device: torch.device = _CPU,
) -> dict[str, Tensor]:
    """The tensors under `keys` that the channel's first rank has in `data`, on `device` of each.

    All are of `dtype`; they may differ in shape, and the other ranks need to know none: `data` is
    read on the first rank only. Two transfers, one of shapes and one of all the values; on a
    channel of one rank none, and the tensors themselves.

    Raises ValueError, naming the key, if it is missing or not of `dtype`: on all ranks alike, once
    the shapes have been told and before any value travels.
    Source: Megatron-LM, core/tensor_parallel/data.
    """
    if len(set(keys)) < len(keys):
        raise ValueError(f"a key is named twice: {list(keys)}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype} is not one of {', '.join(map(str, _DTYPES))}")
    headers: list[_Header] = []
    if channel.rank == 0:
        headers = [_header((data or {}).get(key)) for key in keys]
    headers = _shared(headers, len(keys), channel, device)
    for key, header in zip(keys, headers, strict=True):
        _check(key, header, dtype)
    shapes = [header.dims[: header.num_dims] for header in headers]
    if channel.size == 1:
        assert data is not None
        return {key: host_memory.send(data[key], device) for key in keys}
    sizes = [math.prod(shape) for shape in shapes]
    if channel.rank == 0 and data is not None and keys:
        payload = host_memory.send(torch.cat([data[key].reshape(-1) for key in keys]), device)
    else:
        payload = torch.empty(sum(sizes), dtype=dtype, device=device)
    if payload.numel():  # as bytes, which every backend can send
        channel.broadcast_(payload.view(torch.uint8), tag=_TAG).wait()
    parts = zip(keys, payload.split(sizes), shapes, strict=True)
    return {key: part.view(shape) for key, part, shape in parts}


def _header(value: object) -> _Header:
    padding = (0,) * _MAX_DIMS
    if value is None:
        return _Header(_MISSING, 0, padding)
    if not isinstance(value, Tensor):
        return _Header(_NOT_A_TENSOR, 0, padding)
    kind = _DTYPES.index(value.dtype) if value.dtype in _DTYPES else _ANOTHER_DTYPE
    return _Header(kind, value.dim(), (*value.shape, *padding)[:_MAX_DIMS])


def _shared(
    headers: list[_Header], count: int, channel: Channel, device: torch.device
) -> list[_Header]:
    """The first rank's headers on all ranks."""
    if channel.size == 1 or count == 0:
        return headers
    table = torch.zeros(count, 2 + _MAX_DIMS, dtype=torch.int64)
    if channel.rank == 0:
        table = torch.tensor([(h.kind, h.num_dims, *h.dims) for h in headers])
    table = channel.broadcast_(table.to(device), tag=_TAG).wait()
    return [_Header(kind, num_dims, tuple(dims)) for kind, num_dims, *dims in table.tolist()]


def _check(key: str, header: _Header, dtype: torch.dtype) -> None:
    if header.kind == _MISSING:
        raise ValueError(f"data has no {key!r}")
    if header.kind == _NOT_A_TENSOR:
        raise ValueError(f"data[{key!r}] is not a tensor")
    if header.kind == _ANOTHER_DTYPE or _DTYPES[header.kind] != dtype:
        found = "of another dtype" if header.kind < 0 else str(_DTYPES[header.kind])
        raise ValueError(f"data[{key!r}] is {found}, not {dtype}")
    if header.num_dims > _MAX_DIMS:
        raise ValueError(f"data[{key!r}] has {header.num_dims} dims, more than {_MAX_DIMS}")
