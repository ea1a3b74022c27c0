"""Garbage collection: of a rank's parent, and at given steps."""

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
    """A reference cycle, garbage as soon as it is not referenced."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_only_at_its_steps() -> None:
    """Catches a collection at another step, and collection that stays off after a run."""
    with collected_every(2) as collect:
        assert not gc.isenabled()
        cycle = weakref.ref(Cycle())
        collect(1)
        assert cycle() is not None
        collect(2)
        assert cycle() is None
    assert gc.isenabled()


def test_an_interval_of_0_leaves_collection_to_python() -> None:
    """Catches an interval of 0 that switches Python's own collection off."""
    with collected_every(0) as collect:
        assert gc.isenabled()
        collect(0)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_memory_between_live_tensors_returns_to_the_system() -> None:
    """Catches a resident set that keeps the holes of freed tensors of varying sizes."""
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
    """An object in a cycle that must be deleted in the process that created it."""

    def __init__(self) -> None:
        self.itself = self
        self.process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(3)


def _collect(rank: int) -> int:
    gc.collect()
    return rank


def test_a_rank_does_not_collect_garbage_of_its_parent() -> None:
    """Catches a rank that deletes a store of its parent and waits for a thread that it does not
    have.
    """
    gc.disable()  # so that the garbage still exists when ranks start
    try:
        Owner()
        assert run_ranks(1, _collect) == [0]
    finally:
        gc.enable()
