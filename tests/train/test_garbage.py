"""Garbage: that of a rank's parent, and what is collected and released at given steps."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref

import pytest
import torch

from isp.metrics.device import MemoryMeter
from isp.parity.forked import run_ranks
from isp.train.garbage import collected_every


class Cycle:
    """Garbage as soon as nobody has it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_goes_at_its_steps_alone() -> None:
    """Catches a collection at any other step, and one that stays off after a run."""
    with collected_every(2) as collect:
        assert not gc.isenabled()
        cycle = weakref.ref(Cycle())
        collect(1)
        assert cycle() is not None
        collect(2)
        assert cycle() is None
    assert gc.isenabled()


def test_python_may_collect_as_it_likes() -> None:
    with collected_every(0) as collect:
        assert gc.isenabled()
        collect(0)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_memory_between_living_tensors_goes_back_to_the_system() -> None:
    """Catches a resident set that keeps the holes which tensors of varying sizes leave."""
    meter = MemoryMeter(torch.device("cpu"))
    below_mmap = 100_000  # bytes: what is larger may be no part of the heap
    # Kept tensors too large for the holes of an old heap, so that they lie between what is freed;
    # where they do not, the heap shrinks without help: measured from before that.
    pairs = [(torch.ones(below_mmap // 4), torch.ones(below_mmap // 8)) for _ in range(600)]
    full = meter.gib()
    kept = [small for _, small in pairs]
    del pairs
    with collected_every(1) as collect:
        collect(1)
    freed = (full - meter.gib()) * 2**30
    meter.close()
    assert freed > 0.8 * below_mmap * len(kept)


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
