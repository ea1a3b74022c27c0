"""The tensors among the arguments of an operation, and the memory that they lie in."""

from __future__ import annotations

from torch import Tensor

from isp.core.torch_private import storage_key

__all__ = ["memory_of", "tensors_in"]


def tensors_in(*values: object) -> list[Tensor]:
    """The tensors in `values`, and in tuples, lists and dictionaries among them, in order.

    torch's `tree_leaves` takes many times as long, and is called for every operation here.
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
    """The same number for tensors of one storage, and as long as it lives for no other."""
    return storage_key(x.untyped_storage())
