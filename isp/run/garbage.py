"""Python's garbage collection, on all ranks after the same step."""

from __future__ import annotations

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
    """

    def after(step: int) -> None:
        if steps and step % steps == 0:
            gc.collect(1)

    by_itself = gc.isenabled()
    if steps:
        gc.collect()
        gc.disable()
    try:
        yield after
    finally:
        if by_itself:
            gc.enable()
