"""Memory of the host that a device copies from and to by itself: page-locked, and checked for room.

[Note: No host waits] In a step the host never waits for the device, so that it can run ahead. What
the device needs of the host goes there by `send`, what the host needs of the device by `HostCopy`.

[Note: Page-locked as it is] CUDA copies beside its kernels only from and to pages that stay where
they are. torch's own allocator of such memory takes the next power of two for each piece; here
ordinary memory is locked as it is, so that it takes what it was planned with. Each piece has pages
of its own: pieces of one heap may share a page, and CUDA locks no page twice.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from isp.core.comm import streams

__all__ = [
    "HostCopy",
    "attainable_bytes",
    "available_bytes",
    "pinned",
    "send",
    "total_bytes",
    "zeros",
]

logger = logging.getLogger(__name__)

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_PORTABLE = 1
"""cudaHostRegisterPortable: for every device of the process."""


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`size` zeros in the memory of the host of `device`, page-locked for CUDA; none for meta.

    Raises MemoryError, in words, where there is too little, or it cannot be locked.
    """
    if device.type == "meta":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes, room = size * dtype.itemsize, attainable_bytes()
    if room is not None and num_bytes > room:
        raise MemoryError(f"{_gib(num_bytes)} are needed, and the machine has {_gib(room)}")
    try:
        if device.type == "cuda" and num_bytes:
            return _locked(size, dtype, device)
        return torch.zeros(size, dtype=dtype)
    except (OSError, RuntimeError) as error:  # of mmap; CPU's allocator has no error of its own
        raise MemoryError(_first_line(error)) from None


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """x, of host memory, in memory that `device` copies from by itself; x itself if it is there.

    It may be dropped while a copy is under way: torch reuses it when that is over.
    """
    return x.pin_memory() if device.type == "cuda" else x


def send(x: Tensor, device: torch.device) -> Tensor:
    """x on `device`; the host waits for nothing, and the current stream for the copy.

    From memory that is not page-locked, CUDA may wait for the stream before it copies.
    """
    if x.device.type == "cpu":
        x = pinned(x, device)
    return x.to(device, non_blocking=True)


class HostCopy:
    """The value of a tensor of a device, on its way to the host."""

    def __init__(self, x: Tensor) -> None:
        self._value = x.to("cpu", non_blocking=True, copy=True)  # page-locked, if from CUDA
        self._over = streams.mark(x.device)

    @property
    def is_there(self) -> bool:
        """Whether the value was in host memory from the start, as on CPU."""
        return self._over is None

    def wait(self) -> Tensor:
        """The value; waits for what was queued on the current stream when it set off."""
        if self._over is not None:
            self._over.synchronize()
        return self._value


def available_bytes() -> int | None:
    """Memory that is free now, on this process's machine and in its cgroup; None: not known.

    A virtual machine whose memory grows on demand has more.
    """
    return _room("MemAvailable")


def attainable_bytes() -> int | None:
    """All memory of this process's machine, or what is left in its cgroup; None: not known."""
    return _room("MemTotal")


def _room(field: str) -> int | None:
    """Return `field` of /proc/meminfo in bytes, or what the cgroup has left if that is less."""
    if not _MEMINFO.exists():
        return None
    size = 1024 * int(_MEMINFO.read_text().split(f"{field}:")[1].split()[0])
    limit = _CGROUP / "memory.max"
    if not limit.exists() or (most := limit.read_text().strip()) == "max":
        return size
    fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    cached = int(fields["active_file"]) + int(fields["inactive_file"])  # is given back when asked
    taken = int((_CGROUP / "memory.current").read_text()) - cached
    return max(0, min(size, int(most) - taken))


def total_bytes() -> int | None:
    """Memory and swap space of this process's machine, or of its cgroup; None: it does not say."""
    if not _MEMINFO.exists():
        return None
    sizes = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    memory, swap = (1024 * int(sizes.get(k, "0").split()[0]) for k in ("MemTotal", "SwapTotal"))
    limit = _CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        memory = min(memory, int(most))
    return memory + swap


def _locked(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in page-locked pages of their own, or in memory that torch locks."""
    num_bytes = size * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # far fewer pages to lock
    # What the tensor owns, and what owns the pages: CUDA lets go of them before they are unmapped.
    owner = (ctypes.c_byte * num_bytes).from_buffer(pages)
    memory, address = torch.frombuffer(owner, dtype=dtype), ctypes.addressof(owner)
    cuda = torch.cuda.cudart()
    code = cuda.cudaHostRegister(address, num_bytes, _PORTABLE)
    if code == cuda.cudaError.success:
        weakref.finalize(owner, cuda.cudaHostUnregister, address).atexit = False  # CUDA may be gone
        return memory
    why = cuda.cudaGetErrorString(code)
    _clear_error(device)
    del memory, owner, pages
    try:
        memory = torch.zeros(size, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise MemoryError(
            f"{_gib(num_bytes)} could not be page-locked ({why}; {_first_line(error)}): `ulimit -l`"
            f" and the machine's free memory limit it"
        ) from None
    _warn_of_rounding(why)
    return memory


def _clear_error(device: torch.device) -> None:
    """Clear the error of CUDA's last call, which the next kernel would raise as its own."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)


@cache
def _warn_of_rounding(why: str) -> None:
    logger.warning(
        "memory of the host is page-locked by torch, which rounds each piece up to a power of two,"
        " as CUDA cannot lock it as it is (%s)",
        why,
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
