"""The tensors among the arguments of an operation, and the identity of their memory."""

from __future__ import annotations

from torch import Tensor

from isp.core.torch_private import storage_key

__all__ = ["memory_of", "pad_rows", "tensors_in"]


def tensors_in(*values: object) -> list[Tensor]:
    """Return the tensors in `values`, and in nested tuples, lists and dictionaries, in order.

    It is called for every operation in a dispatch mode; torch's `tree_leaves` takes many times as
    long.
    """
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def memory_of(x: Tensor) -> int:
    """Return a number that identifies x's storage while it exists, equal for all its views."""
    return storage_key(x.untyped_storage())


def pad_rows(x: Tensor, num_rows: int) -> Tensor:
    """Return x [n, ..] followed by rows of zeros: [num_rows, ..]; x itself if n is num_rows."""
    if x.shape[0] == num_rows:
        return x.contiguous()
    padded = x.new_zeros(num_rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded
