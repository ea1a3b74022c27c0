"""Streams and events, with which a device does several things at once: the one door to CUDA's.

Other devices do everything in order. There a stream and an event are None, `on(None)` changes
nothing, and nothing has to wait.

[Note: Priorities] Whenever a multiprocessor is free, it takes its next work from the stream of the
highest priority. So a gather begins between two blocks of a long kernel, not behind it (unless that
is persistent, its blocks staying to its end: then only a launch ahead of it helps). Compute is
queued on the default stream, of priority 0. All others are higher: those made here (of gathers,
copies to and from the host, and the ends of timed transfers) have -1, and NCCL's, one for each
process group, the highest that torch has: -3 on CUDA, -1 on ROCm.
torch has 32 streams of each priority for a device, and gives them out round robin: the 33rd is the
first one again, and things queued on it wait for each other. So neither kind ever meets compute,
on CUDA the two kinds never meet, and each has far fewer than 32. Source: c10/cuda/CUDAStream.cpp.
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
    has: bool = device.type == "cuda"  # torch writes this word anew each time
    return has


def new(device: torch.device) -> Stream | None:
    """Another stream, ahead of compute [Note: Priorities]."""
    return Stream(device, priority=-1) if _has_streams(device) else None


def current(device: torch.device) -> Stream | None:
    """The stream on which things are queued now."""
    return torch.cuda.current_stream(device) if _has_streams(device) else None


def on(stream: Stream | None) -> AbstractContextManager[None]:
    """Within it things are queued on `stream`."""
    return _HERE if stream is None else torch.cuda.stream(stream)


def follow(stream: Stream | None) -> None:
    """Let `stream` wait for what is queued on the current stream now."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))


def mark(device: torch.device, *, timed: bool = False) -> Event | None:
    """An event that is over when all that is queued on the current stream now is."""
    if not _has_streams(device):
        return None
    event = Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def in_use(*tensors: Tensor) -> None:
    """Tell the allocator that the current stream uses `tensors`, of one device and the host.

    Memory that is freed is reused on the stream it was made on, without a wait for any other.
    Told of another one, the allocator waits for what is queued there when the memory is freed.
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
    """The options of one NCCL process group: its stream is ahead of compute [Note: Priorities]."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
