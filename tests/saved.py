"""Measures what a forward saves for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["saved_bytes", "saving"]


@contextmanager
def saving() -> Iterator[list[Tensor]]:
    """Yield a list of the tensors that are saved in this context."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield kept


def saved_bytes(forward: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of `forward`, and the bytes of all saved storages; shared ones count once.

    They are counted at the end of the forward, so memory freed in between does not count.
    """
    with saving() as kept:
        out = forward()
    memories = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in kept}
    return out, sum(memories.values())
