"""CUDA streams and events, with None in their place on devices that run everything in order.

On such a device, as on CPU, `on(None)` changes nothing, and nothing has to wait.

[Note: Priorities] A multiprocessor that becomes free takes its next block from the stream of the
highest priority. So a gather starts between two blocks of a long kernel, not after the kernel
(unless that is persistent and its blocks stay until its end: then the gather must be launched
before it). Compute runs on the default stream, of priority 0. All others are higher: streams made
here (for gathers, copies to and from the host, and the ends of timed transfers) have -1; NCCL's,
one for each process group, have the highest that torch offers: -3 on CUDA, -1 on ROCm.
torch has 32 streams of each priority for a device and assigns them round robin: the 33rd is the
first one again, and work on a shared stream is serialized. With priorities of their own, neither
kind shares a stream with compute, on CUDA the two kinds share none with each other, and each has
far fewer than 32. Source: c10/cuda/CUDAStream.cpp.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Event",
    "Stream",
    "current",
    "follow",
    "in_use",
    "mark",
    "nccl_options",
    "new",
    "on",
    "serve",
]

Stream = torch.cuda.Stream
Event = torch.cuda.Event

_HERE = nullcontext()


@cache
def _has_streams(device: torch.device) -> bool:
    has: bool = device.type == "cuda"  # cached: torch builds this string at each access
    return has


def new(device: torch.device) -> Stream | None:
    """Return a new stream with priority over compute [Note: Priorities]; None without streams."""
    return Stream(device, priority=-1) if _has_streams(device) else None


def current(device: torch.device) -> Stream | None:
    """Return the stream that work is queued on now; None without streams."""
    return torch.cuda.current_stream(device) if _has_streams(device) else None


def on(stream: Stream | None) -> AbstractContextManager[None]:
    """Return a context in which work is queued on `stream`."""
    return _HERE if stream is None else torch.cuda.stream(stream)


def follow(stream: Stream | None) -> None:
    """Make `stream` wait for all work queued on the current stream so far."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))


def mark(device: torch.device, *, timed: bool = False) -> Event | None:
    """Record an event after all work queued on the current stream so far; None without streams."""
    if not _has_streams(device):
        return None
    event = Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def in_use(*tensors: Tensor) -> None:
    """Record the current stream as a user of `tensors`, all on one device or the host.

    The allocator reuses freed memory on the stream that allocated it, without waiting for other
    streams. After this call it also waits for the work that is queued on the recorded stream when
    the memory is freed.
    """
    stream = None
    for tensor in tensors:
        if tensor.is_cuda:
            stream = stream or torch.cuda.current_stream(tensor.device)
            tensor.record_stream(stream)


def serve(group: dist.ProcessGroup, device: str | None = None) -> bool:
    """Return whether transfers of `group` run on streams, so that a wait makes a stream wait."""
    return backend_name(group, device) == "nccl"


def backend_name(group: dist.ProcessGroup, device: str | None = None) -> str:
    """Return the backend of `group` for tensors on `device` ("cpu", "cuda").

    None: for CUDA tensors if the group serves them, else for CPU tensors. `dist.get_backend` does
    not name it for a group made with "cpu:gloo", "cpu:gloo,cuda:nccl" or by `init_device_mesh`.
    Raises ValueError if the group does not serve the device.
    """
    config = dist.get_backend_config(group)  # such as cpu:gloo,cuda:nccl
    by_device = dict(item.split(":") for item in config.split(","))
    devices = ("cuda", "cpu") if device is None else (device,)
    found = next((by_device[d] for d in devices if d in by_device), None)
    if found is None:
        raise ValueError(
            f"the process group has the backends {config}, none for tensors on"
            f" {' or '.join(devices)}: make it with one that has"
        )
    return found


def nccl_options() -> Any:
    """Return new options for an NCCL process group whose stream has a high priority.

    See [Note: Priorities].
    """
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
