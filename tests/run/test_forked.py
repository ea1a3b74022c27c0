"""Ranks that begin as copies of a process."""

from __future__ import annotations

import gc
import os

from isp.run.forked import run_ranks


class Owner:
    """Something that can be taken down only where it was made, in a cycle."""

    def __init__(self) -> None:
        self.itself = self
        self.process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(3)


def _collect(rank: int) -> int:
    gc.collect()
    return rank


def test_a_rank_leaves_the_garbage_of_its_parent_alone() -> None:
    """A rank that took down a store of its parent's waited for a thread that it did not have."""
    gc.disable()  # so that it is still there when ranks begin
    try:
        Owner()
        assert run_ranks(1, _collect) == [0]
    finally:
        gc.enable()
