"""Pinned buffers of a simulated device; `test_same_bits.py` tests the copies."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from isp.core.comm import pinned_memory
from isp.core.comm.host_offload import HostMemory, HostMemoryError
from isp.core.comm.tag import UNNAMED

CUDA = torch.device("cuda")


class _Runtime:
    """A stand-in for the CUDA runtime that can pin `room` bytes."""

    class cudaError:
        success = 0

    def __init__(self, room: int) -> None:
        self.room = room
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if sum(self.pinned.values()) + size > self.room:
            return 2
        if any(_pages(address, size) & _pages(*other) for other in self.pinned.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert _is_mapped(address), "unmapped while CUDA may still copy"
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"cudaError {code}"


def _pages(address: int, size: int) -> set[int]:
    """Return the numbers of the pages that contain these bytes."""
    return set(range(address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE + 1))


def _is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines)
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def _apart() -> HostMemory:
    memory = HostMemory(torch.device("cpu"))
    memory.is_apart, memory._device = True, torch.device("cuda")
    return memory


def test_pinned_buffers_are_as_large_as_their_tensors() -> None:
    """Catches sizes rounded up, buffers pinned again in each step, and pages that stay locked."""
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
    """Catches a buffer kept for each length ever used, and a row overwritten by another."""
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


def test_buffers_do_not_share_pages() -> None:
    """Catches two buffers on one page, which CUDA cannot lock twice, and pages unmapped too
    early.
    """
    sizes = (1, 7, 1024, 1025, 70_000, 3, 3)
    runtime = _Runtime(room=2**30)
    with mock.patch("torch.cuda.cudart", return_value=runtime):
        pieces = [pinned_memory.zeros(size, torch.float32, CUDA) for size in sizes]
        assert list(runtime.pinned.values()) == [4 * size for size in sizes]
        assert all(address % mmap.PAGESIZE == 0 for address in runtime.pinned)
        for number, piece in enumerate(pieces):
            assert not piece.any()
            piece.fill_(number)
        assert [piece.unique().tolist() for piece in pieces] == [[n] for n in range(len(sizes))]
        address, row = pieces[4].data_ptr(), pieces[4].view(-1, 7)[3]
        del pieces, piece
        gc.collect()
        assert list(runtime.pinned) == [address]  # held by a view of it
        assert row.tolist() == [4.0] * 7
        del row
        assert not runtime.pinned
        assert pinned_memory.zeros(0, torch.float32, CUDA).numel() == 0
        assert not runtime.pinned


class _Allocator:
    """A stand-in for torch's pinned allocator with `room` bytes; ordinary memory is not limited."""

    def __init__(self, room: int) -> None:
        self.room, self.zeros = room, torch.zeros

    def __call__(self, size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
        if pin_memory and size * dtype.itemsize > self.room:
            raise RuntimeError("CUDA error: out of memory\nand much more")
        return self.zeros(size, dtype=dtype)


def test_torchs_allocator_is_used_where_cuda_cannot_lock_pages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a run that ends although only locking of existing pages fails, and CUDA errors not
    cleared.
    """
    cleared: list[torch.device] = []
    monkeypatch.setattr(pinned_memory, "_clear_error", cleared.append)
    monkeypatch.setattr(torch, "zeros", _Allocator(room=100))
    pinned_memory._warn_of_rounding.cache_clear()
    with mock.patch("torch.cuda.cudart", return_value=_Runtime(room=0)):
        for _ in range(2):
            assert pinned_memory.zeros(25, torch.float32, CUDA).tolist() == [0.0] * 25
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "power of two, because CUDA cannot lock it in place (cudaError 2)" in caplog.text
        with pytest.raises(MemoryError, match=r"page-locked \(cudaError 2; .*out of memory\): "):
            pinned_memory.zeros(26, torch.float32, CUDA)
    assert cleared == [CUDA] * 3


def test_memory_that_cannot_be_pinned_is_an_error_that_names_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a step that continues with pageable memory, for which each copy blocks."""
    kept: list[object] = []
    x = torch.zeros(100, dtype=torch.float64)
    monkeypatch.setattr(pinned_memory, "_clear_error", lambda _: None)
    monkeypatch.setattr(torch, "zeros", _Allocator(room=0))

    def store(memory: HostMemory, x: Tensor) -> None:
        kept.append(memory.store(x, tag=UNNAMED))

    with mock.patch("torch.cuda.cudart", return_value=_Runtime(room=1000)):
        memory = _apart()
        store(memory, x)
        with pytest.raises(HostMemoryError, match=r"_offload: .* page-locked \(cudaError 2"):
            store(memory, x)
        assert memory.reserved_bytes == memory.leased_bytes == 800
