"""Garbage collection and the release of freed host memory, on all ranks after the same step."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["collected_every"]


@contextmanager
def collected_every(steps: int) -> Iterator[Callable[[int], None]]:
    """Collect garbage only when what this gives is called with a multiple of `steps`.

    Left alone (`steps` 0), Python looks through all objects whenever enough have been made: on each
    rank in another step, and all wait for it. A step leaves no tensor for it to find. Source:
    torchtitan's and Megatron-LM's collection by hand.

    [Note: Freed host memory] glibc gives free pages back to the system at the same time. Packed
    sequences have documents of other lengths in every step, so the tensors of a step on CPU fit the
    holes that the last one left badly: memory in use stays the same, but the heap around it grows
    for hundreds of steps. Fixed thresholds for mmap would end that too, at the cost of a page fault
    for each page of each step.
    """
    release = _malloc_trim()

    def after(step: int) -> None:
        if steps and step % steps == 0:
            gc.collect(1)
            release(0)

    by_itself = gc.isenabled()
    if steps:
        gc.collect()
        gc.disable()
    try:
        yield after
    finally:
        if by_itself:
            gc.enable()


def _malloc_trim() -> Callable[[int], object]:
    """glibc's function that gives free pages of the heap back; a no-op on other systems."""
    libc = ctypes.CDLL(None)
    return libc.malloc_trim if hasattr(libc, "malloc_trim") else lambda _: None
