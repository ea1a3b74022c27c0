"""Page-locked host memory, copies that do not block the host, and the host's free memory.

In a step the host never waits for the device, so that it can queue work ahead. `send` copies a
tensor to the device and `HostCopy` a value to the host, both without a wait.

CUDA overlaps copies with kernels only from and to page-locked memory. `zeros` locks ordinary memory
in place. See [Note: Page-locked as it is] in docs/design/notes/communication.md.
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
"""cudaHostRegisterPortable: memory that is page-locked for all devices of the process."""


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `size` zeros in host memory, page-locked for a CUDA `device`; for meta, on meta.

    Raises MemoryError, with sizes or the cause, if there is too little memory or it cannot be
    locked.
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
    except (OSError, RuntimeError) as error:  # as mmap and torch's allocator raise
        raise MemoryError(_first_line(error)) from None


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """Return a page-locked copy of x, a CPU tensor, if `device` is CUDA, else x itself.

    The copy may be freed while its transfer is in flight: torch reuses its memory only afterwards.
    """
    return x.pin_memory() if device.type == "cuda" else x


def send(x: Tensor, device: torch.device) -> Tensor:
    """Return x on `device`, copied on the current stream; the host does not wait.

    CPU tensors are page-locked first: a copy from ordinary memory may block the host.
    """
    if x.device.type == "cpu":
        x = pinned(x, device)
    return x.to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor's value from its device to the host, in flight until `wait`."""

    def __init__(self, x: Tensor) -> None:
        self._value = x.to("cpu", non_blocking=True, copy=True)  # torch page-locks it for CUDA
        self._over = streams.mark(x.device)

    @property
    def is_there(self) -> bool:
        """Return whether the value needs no wait, as on CPU, where the copy is done at once."""
        return self._over is None

    def wait(self) -> Tensor:
        """Return the value, once all work queued before the copy on its stream is done."""
        if self._over is not None:
            self._over.synchronize()
        return self._value


def available_bytes() -> int | None:
    """Return the bytes that are free now on this machine and in its cgroup; None: unknown.

    A virtual machine whose memory grows on demand can get more.
    """
    return _room("MemAvailable")


def attainable_bytes() -> int | None:
    """Return the machine's memory in bytes, or what its cgroup has left if less; None: unknown."""
    return _room("MemTotal")


def _room(field: str) -> int | None:
    """Return `field` of /proc/meminfo in bytes, or the rest of the cgroup's limit if less."""
    if not _MEMINFO.exists():
        return None
    size = 1024 * int(_MEMINFO.read_text().split(f"{field}:")[1].split()[0])
    limit = _CGROUP / "memory.max"
    if not limit.exists() or (most := limit.read_text().strip()) == "max":
        return size
    fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    # memory.current counts the page cache, which the kernel gives back under pressure.
    cached = int(fields["active_file"]) + int(fields["inactive_file"])
    taken = int((_CGROUP / "memory.current").read_text()) - cached
    return max(0, min(size, int(most) - taken))


def total_bytes() -> int | None:
    """Return bytes of memory (at most the cgroup's limit) plus swap; None: unknown."""
    if not _MEMINFO.exists():
        return None
    sizes = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    memory, swap = (1024 * int(sizes.get(k, "0").split()[0]) for k in ("MemTotal", "SwapTotal"))
    limit = _CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        memory = min(memory, int(most))
    return memory + swap


def _locked(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `size` zeros in page-locked memory.

    New pages are mapped and then locked; if that fails, torch's pinned allocator is used. Raises
    MemoryError if both fail.
    """
    num_bytes = size * dtype.itemsize
    # The kernel fills new pages with zeros.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Huge pages are fewer pages to lock; kernels without them raise OSError.
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    # The tensor owns `owner`, and `owner` the pages: its finalizer unlocks them before the unmap.
    owner = (ctypes.c_byte * num_bytes).from_buffer(pages)
    memory, address = torch.frombuffer(owner, dtype=dtype), ctypes.addressof(owner)
    cuda = torch.cuda.cudart()
    code = cuda.cudaHostRegister(address, num_bytes, _PORTABLE)
    if code == cuda.cudaError.success:
        # atexit=False: at interpreter exit CUDA may be gone.
        weakref.finalize(owner, cuda.cudaHostUnregister, address).atexit = False
        return memory
    why = cuda.cudaGetErrorString(code)
    _clear_error(device)  # or the next kernel launch would raise the error of cudaHostRegister
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
    """Clear the error of CUDA's last call by launching a kernel that raises it."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)


@cache
def _warn_of_rounding(why: str) -> None:
    logger.warning(
        "host memory is page-locked by torch's allocator, which rounds each piece up to a power of"
        " two, because CUDA cannot lock it in place (%s)",
        why,
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
