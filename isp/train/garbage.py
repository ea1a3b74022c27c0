"""Garbage collection and the release of freed host memory, on all ranks after the same step."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["collected_every"]


@contextmanager
def collected_every(steps: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that collects garbage when it is called with a multiple of `steps`.

    In this context Python does not collect on its own, unless `steps` is 0. Python looks through
    all objects whenever enough have been created: on each rank in another step, so that each time
    all ranks wait for one. A step leaves no tensor to be collected. Source: torchtitan's and
    Megatron-LM's manual garbage collection.

    [Note: Freed host memory] glibc gives free pages back to the system at the same time. Packed
    sequences have documents of other lengths in each step, so on CPU the tensors of a step fit
    badly into the holes of the previous one: memory in use stays the same, but the heap around it
    grows for hundreds of steps. Fixed thresholds for mmap would prevent that too, at the cost of a
    page fault for each page of each step.
    """
    release = _malloc_trim()

    def after(step: int) -> None:
        """Collect young objects and give free memory back, if it is time after `step`."""
        if steps and step % steps == 0:
            gc.collect(1)
            release(0)

    by_itself = gc.isenabled()
    if steps:
        gc.collect()  # what the setup has left, of all generations
        gc.disable()
    try:
        yield after
    finally:
        if by_itself:
            gc.enable()


def _malloc_trim() -> Callable[[int], object]:
    """Return glibc's function that gives free heap pages back; a no-op on other systems."""
    libc = ctypes.CDLL(None)
    return libc.malloc_trim if hasattr(libc, "malloc_trim") else lambda _: None
