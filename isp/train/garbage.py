"""Garbage collection and release of freed host memory, after the same step on all ranks."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["collected_every"]


@contextmanager
def collected_every(steps: int) -> Iterator[Callable[[int], None]]:
    """Turn Python's collector off, and yield a function that collects every `steps` steps.

    Call the function with the number of each step after it. With `steps` 0, Python collects as
    usual and the function does nothing.

    Python starts a collection when enough objects have been created. That happens after different
    steps on different ranks, and each time all other ranks wait for the one that collects. A step
    leaves no tensor to be collected. Source: manual garbage collection of torchtitan and
    Megatron-LM. Each collection also gives free heap pages back to the system. See
    [Note: Freed host memory] in docs/design/notes/train.md.
    """
    release = _malloc_trim()

    def after(step: int) -> None:
        """Collect young objects and give free memory back if `step` is a multiple of `steps`."""
        if steps and step % steps == 0:
            gc.collect(1)  # a collection of the oldest generation would look through all objects
            release(0)  # gives free heap pages to the system [Note: Freed host memory]

    was_enabled = gc.isenabled()
    if steps:
        # Collect all generations once, for what the setup left: `after` skips the oldest one.
        gc.collect()
        gc.disable()
    try:
        yield after
    finally:
        if was_enabled:
            gc.enable()


def _malloc_trim() -> Callable[[int], object]:
    """Return glibc's function that gives free heap pages back; a no-op on other systems."""
    libc = ctypes.CDLL(None)
    return libc.malloc_trim if hasattr(libc, "malloc_trim") else lambda _: None
