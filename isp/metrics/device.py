"""Facts about a device: its name, its peak TFLOP/s, and the memory in use."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from isp.utils.text import counted

__all__ = [
    "MemoryMeter",
    "describe_mfu",
    "device_name",
    "peak_memory_gib",
    "peak_tflops",
    "reset_peak_memory",
    "shared_cores",
]

_DENSE_BF16_TFLOPS: list[tuple[str, float]] = [
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B300", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.5),
    ("H100", 989.4),
    ("H800 PCIe", 756.5),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX A6000", 154.8),
    ("RTX 6000 Ada", 364.2),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI210", 181.0),
    ("MI250X", 191.5),  # of one die: each of the card's two dies is a device
    ("MI250", 181.0),
    ("MI300A", 980.6),
    ("MI300X", 1307.4),
    ("MI325X", 1307.4),
    ("MI350X", 2300.0),
    ("MI355X", 2500.0),
]
"""Dense bfloat16 TFLOP/s of devices whose name has all the given words; the first match counts.
Source: data sheets of the makers; figures for 2:4 sparsity are halved."""


def device_name(device: torch.device) -> str:
    """Return the maker's name of `device`, such as `NVIDIA H100 80GB HBM3`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    found = None
    if cpu_info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpu_info.read_text(), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def peak_tflops(name: str, configured: float | None = None) -> float | None:
    """Return the dense bfloat16 TFLOP/s of the device called `name`; None if not known.

    `configured` (`metrics.peak_tflops`) comes before the table. For a slice of a GPU (MIG) it is
    not known, since the name does not say how large a share of the peak it has.
    """
    if configured is not None:
        return configured
    words = set(re.findall(r"\w+", name.upper()))
    if "MIG" in words:
        return None
    for known, tflops in _DENSE_BF16_TFLOPS:
        if words.issuperset(known.upper().split()):
            return tflops
    return None


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB.

    On CUDA it is the memory of tensors on the device (`torch.cuda.max_memory_allocated`), on CPU
    the peak resident set of the whole process, code and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    if status.exists():
        # Do not use ru_maxrss on Linux: a forked process starts with that of its parent.
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


class MemoryMeter:
    """Reads the memory that this process uses at present.

    Reading is cheap: on Linux it keeps /proc/self/statm open until `close`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages: int | None = None
        if device.type != "cuda" and sys.platform == "linux":
            self._pages = os.open("/proc/self/statm", os.O_RDONLY)

    def gib(self) -> float:
        """Return the memory in use in GiB, measured as in `peak_memory_gib`."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device) / 2**30
        if self._pages is None:
            # Without Linux's /proc only the peak is known.
            return peak_memory_gib(self._device)
        resident = int(os.pread(self._pages, 128, 0).split()[1])
        return resident * resource.getpagesize() / 2**30

    def close(self) -> None:
        """Close the file that `gib` reads; do not call `gib` after this."""
        if self._pages is not None:
            os.close(self._pages)
            self._pages = None


def reset_peak_memory(device: torch.device) -> None:
    """Make `peak_memory_gib` count from now on, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError), open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # tells Linux to set VmHWM, the peak, to the current resident set


def describe_mfu(device: str, peak: float | None) -> str:
    """Return how `mfu` is computed on devices called `device`, whose peak is `peak` TFLOP/s."""
    if peak is None:
        return f"left out: the peak of {device} is not known: set metrics.peak_tflops"
    return f"tflops / {peak:g}, the peak of {device} in dense bfloat16"


def shared_cores(device: torch.device, ranks: int) -> str:
    """Return a text such as `4 ranks share 2 cores`; empty if each rank has a core or device."""
    cores = os.cpu_count() or 1
    if device.type != "cpu" or ranks <= cores:
        return ""
    return f"{ranks} ranks share {counted(cores, 'core')}"
