"""Activations computed again in backward instead of kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

__all__ = ["Announce", "recomputed"]

R = TypeVar("R")

Announce = Callable[[], AbstractContextManager[None]]
"""Gives the context in which a recompute runs, so that a communicator knows the phase."""


def recomputed(announce: Announce, fn: Callable[..., R], *args: Any) -> R:
    """`fn(*args)`, whose activations are dropped and computed again when backward needs them."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), announce()

    out: R = checkpoint(fn, *args, use_reentrant=False, context_fn=contexts)
    return out
