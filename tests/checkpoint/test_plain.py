"""Plain Python values and tensors are saved and loaded unchanged."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from isp.checkpoint.plain import Plain, from_json, from_tensor, to_json, to_tensor


def test_values_load_unchanged() -> None:
    """Catches a tuple that becomes a list, and changed floats, bytes or random states."""
    value = {
        "none": None,
        "numbers": [1, -2.5e-300, float("inf"), True],
        "bytes": b"\x00\xff",
        "random": random.getstate(),
        "nested": {"a": [{"b": ()}]},
        "numbered": {3: {"$bytes": "x"}, 0.5: None, None: "as the milestones of a scheduler"},
        "text": "learning rate: 3e-4 # ümlaut\n",
    }
    assert from_json(to_json(value)) == value
    assert from_tensor(to_tensor(value)) == value


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_tensors_load_unchanged(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Catches lost bits, dtypes or shapes, and scalars or empty tensors that cannot be saved."""
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = from_json(to_json([tensor]))[0]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)


WRAPPED: dict[str, Callable[[Plain], Plain]] = {
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "dict": lambda value: {"a": value},
    "dict by numbers": lambda value: {0: value},  # type: ignore[dict-item]
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_deeply_nested_values_are_refused(kind: str) -> None:
    """Catches a value that can be saved but not loaded, a lower limit for types that take several
    levels of JSON, and a traceback for a value far beyond the limit.
    """
    value: Plain = 1
    for _ in range(100):
        value = WRAPPED[kind](value)
    assert from_json(to_json(value)) == value
    endless: list[Any] = []
    endless += [endless, endless]
    for _ in range(3000):
        value = WRAPPED[kind](value)
    for deep in (value, endless):
        with pytest.raises(ValueError, match="nested in more than 100 levels"):
            to_json(deep)


@pytest.mark.parametrize("value", [{"a": [object()]}, {(1,): 2}, {1, 2}])
def test_values_that_cannot_be_restored_are_refused(value: object) -> None:
    """Catches an object saved as its repr, and a key that loads as another key."""
    with pytest.raises(TypeError, match="which a checkpoint cannot store"):
        to_json({"here": value})  # type: ignore[dict-item]
