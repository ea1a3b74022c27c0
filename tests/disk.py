"""A simulated full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_file_larger_than"]


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Make writes beyond `size` bytes of a file fail, after the part that fits is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
