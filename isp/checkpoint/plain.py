"""Plain values as JSON text. Unlike a pickle, JSON runs no code when it is read."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Plain", "from_json", "from_tensor", "to_json", "to_tensor"]

Plain: TypeAlias = (
    "bool | int | float | str | bytes | Tensor | Sequence[Plain] | Mapping[str, Plain] | None"
)
"""Type of values that a checkpoint keeps in addition to tensors; keys of dicts may be numbers."""

_MOST_LEVELS = 100
"""Limit of nesting: code that copies or compares values recurses, and could overflow the stack."""


def to_json(value: Plain) -> str:
    """Return a plain value as JSON text, from which `from_json` makes an equal value.

    Raises TypeError, with the place in `value`, for anything that is not plain, and ValueError for
    lists and dicts that are nested too deeply.
    """
    _check_levels(value)
    return json.dumps(_encode(value, "the value"), sort_keys=True, separators=(",", ":"))


def from_json(text: str) -> Any:
    """Return the value that `to_json` wrote, tensors on CPU; raise ValueError for other text."""
    value = json.loads(text, object_hook=_decode)
    _check_levels(value)
    return value


def to_tensor(value: Plain) -> Tensor:
    """Return the JSON text of `value` as a uint8 tensor, for places that take only tensors."""
    return torch.frombuffer(bytearray(to_json(value).encode()), dtype=torch.uint8)


def from_tensor(data: Tensor) -> Any:
    """Return the value that `to_tensor` wrote; raise ValueError for other bytes."""
    return from_json(data.numpy().tobytes().decode())


def _check_levels(value: Any) -> None:
    """Raise ValueError for lists and dicts that are nested too deeply, or contain themselves."""
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        # Keep each object once, by its id: a list that contains itself twice would otherwise double
        # on each level, to 2^100 entries.
        nested = {id(x): x for x in level if isinstance(x, dict | list | tuple)}.values()
        if not nested:
            return
        level = [x for y in nested for x in (y.values() if isinstance(y, dict) else y)]
    raise ValueError(f"lists and dicts are nested in more than {_MOST_LEVELS} levels")


def _encode(value: Plain, place: str) -> Any:
    """Return `value` in types of JSON, with objects `{"$kind": ..}` for other types.

    `place` is the expression for `value`, such as `the value['a'][0]`, for the TypeError that is
    raised if it is not plain.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$tensor": [dtype, list(value.shape), base64.b64encode(data).decode()]}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(v, f"{place}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(v, f"{place}[{i}]") for i, v in enumerate(value)]
    # Dicts with keys that are not strings, or begin with $ (`_decode` would take that for a kind),
    # are written as lists of [key, value].
    if isinstance(value, dict) and all(isinstance(k, str) and k[:1] != "$" for k in value):
        return {k: _encode(v, f"{place}[{k!r}]") for k, v in value.items()}
    if isinstance(value, dict) and all(isinstance(k, str | int | float | None) for k in value):
        return {"$items": [[k, _encode(v, f"{place}[{k!r}]")] for k, v in value.items()]}
    raise TypeError(f"{place} is a {type(value).__name__}, which a checkpoint cannot store")


def _decode(encoded: dict[str, Any]) -> Any:
    """Return the value of a JSON object that `_encode` wrote; raise ValueError for another."""
    match encoded:
        case {"$bytes": str(data), **rest} if not rest:
            return base64.b64decode(data)
        case {"$items": list(pairs), **rest} if not rest:
            return _dict(pairs)
        case {"$tuple": list(content), **rest} if not rest:
            return tuple(content)
        case {"$tensor": [str(dtype), list(shape), str(data)], **rest} if not rest:
            return _tensor(dtype, shape, base64.b64decode(data))
    if odd := [key for key in encoded if key.startswith("$")]:
        raise ValueError(f"{', '.join(odd)} is not a kind of value that checkpoints have")
    return encoded


def _dict(pairs: list[Any]) -> dict[Any, Any]:
    """Return the dict with these [key, value] lists; raise ValueError for any other content."""
    try:
        return dict(pairs)
    except TypeError:  # an element is no [key, value], or a key cannot be hashed
        raise ValueError("$items has no pairs from which a dict can be made") from None


def _tensor(name: str, shape: list[Any], data: bytes) -> Tensor:
    """Return the tensor of dtype `name` and of `shape` that consists of the bytes `data`.

    Raises ValueError if the dtype does not exist, or `data` has too many or too few bytes.
    """
    dtype: Any = vars(torch).get(name)
    try:
        return torch.tensor(list(data), dtype=torch.uint8).view(dtype).view(shape)
    except (TypeError, RuntimeError):  # the dtype is unknown, or the shape needs other bytes
        raise ValueError(f"{name} {shape} is not a tensor of {len(data)} bytes") from None
