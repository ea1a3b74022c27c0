"""Pinned buffers, for a device that is not there; copies are those of `test_same_bits.py`."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from torch import Tensor

from isp.comm.host import HostMemory, HostMemoryError
from isp.comm.tag import UNNAMED


class _Runtime:
    """Of CUDA, as far as it pins memory; so many bytes."""

    class cudaError:
        success = 0

    def __init__(self, room: int) -> None:
        self.room = room
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if sum(self.pinned.values()) + size > self.room:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"cudaError {code}"


def _apart() -> HostMemory:
    memory = HostMemory(torch.device("cpu"))
    memory.is_apart, memory._device = True, torch.device("cuda")
    return memory


def test_pinned_buffers_are_as_large_as_their_tensors() -> None:
    """Catches sizes rounded up, buffers pinned again in each step, and pages left locked."""
    runtime, x = _Runtime(room=3 * 800), torch.arange(100.0, dtype=torch.float64)
    with mock.patch("torch.cuda.cudart", return_value=runtime):
        memory = _apart()
        for _ in range(2):
            stored = [memory.store(n * x, tag=UNNAMED) for n in range(3)]
            for each in stored:
                each.leave()
            assert all(torch.equal(each.get(), n * x) for n, each in enumerate(stored))
            assert memory.leased_bytes == 2400
            del stored, each
        assert memory.leased_bytes == 0
        assert list(runtime.pinned.values()) == [800] * 3
        assert memory.describe() == "0.0 MiB of pinned host memory in 3 buffers"
        del memory
        gc.collect()
        assert not runtime.pinned


def test_rows_of_other_lengths_share_buffers() -> None:
    """Catches buffers of each length there ever was, and a row that comes back with another's."""
    runtime, rows = _Runtime(room=3 * 800), torch.arange(300.0, dtype=torch.float64).view(3, 100)
    with mock.patch("torch.cuda.cudart", return_value=runtime):
        memory = _apart()
        for length in (40, 100, 7, 60, 100):
            stored = [memory.store(x[:length], tag=UNNAMED) for x in rows]
            for each in stored:
                each.leave()
            for each, x in zip(stored, rows, strict=True):
                assert torch.equal(each.get(), x[:length])
            del stored, each
        assert memory.leased_bytes == 0
        assert memory.reserved_bytes == sum(runtime.pinned.values()) == 3 * 800
        assert memory.num_buffers == len(runtime.pinned) == 3


def test_pages_that_cannot_be_locked_are_told_with_the_key() -> None:
    """Catches a step that goes on with memory that copies wait for."""
    kept: list[object] = []
    x = torch.zeros(100, dtype=torch.float64)

    def store(memory: HostMemory, x: Tensor) -> None:
        kept.append(memory.store(x, tag=UNNAMED))

    with mock.patch("torch.cuda.cudart", return_value=_Runtime(room=1000)):
        memory = _apart()
        store(memory, x)
        with pytest.raises(HostMemoryError, match=r"_offload: .* page-locked \(cudaError 2"):
            store(memory, x)
        assert memory.reserved_bytes == memory.leased_bytes == 800
