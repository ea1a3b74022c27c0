"""CUDA streams and events; both are None on devices that run everything in order, such as CPU.

There, `on(None)` changes nothing, and nothing has to wait. All streams made here have priority over
compute. See [Note: Priorities] in docs/design/notes/communication.md.
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
"""The context of `on(None)`, which changes nothing."""


@cache
def _has_streams(device: torch.device) -> bool:
    # The function is cached because torch builds the string `type` anew at each access.
    has: bool = device.type == "cuda"
    return has


def new(device: torch.device) -> Stream | None:
    """Return a new stream with priority over compute [Note: Priorities]; None without streams."""
    return Stream(device, priority=-1) if _has_streams(device) else None


def current(device: torch.device) -> Stream | None:
    """Return the current stream, on which work is queued now; None without streams."""
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
    """Record the current stream as a user of `tensors`, all on one device; skip those on the host.

    Without this call, memory that is freed is reused on the stream that allocated it, even if other
    streams still read it. After this call it is reused only when the work that is queued on the
    current stream at the time of the free is done. Pinned host memory is not protected.
    """
    # The current stream is looked up once, and only if a tensor needs it.
    stream = None
    for tensor in tensors:
        if tensor.is_cuda:
            stream = stream or torch.cuda.current_stream(tensor.device)
            tensor.record_stream(stream)


def serve(group: dist.ProcessGroup, device: str | None = None) -> bool:
    """Return whether transfers of `group` run on streams: a wait then makes a stream wait."""
    return backend_name(group, device) == "nccl"


def backend_name(group: dist.ProcessGroup, device: str | None = None) -> str:
    """Return the backend of `group` for tensors on `device` ("cpu", "cuda").

    `device=None`: for CUDA tensors if the group supports them, else for CPU tensors.
    `dist.get_backend` does not return it for a group made with "cpu:gloo", "cpu:gloo,cuda:nccl" or
    by `init_device_mesh`. Raises ValueError if the group has no backend for the device.
    """
    config = dist.get_backend_config(group)  # such as cpu:gloo,cuda:nccl
    by_device = dict(item.split(":") for item in config.split(","))
    devices = ("cuda", "cpu") if device is None else (device,)
    found = next((by_device[d] for d in devices if d in by_device), None)
    if found is None:
        raise ValueError(
            f"the process group has the backends {config}, none of them for tensors on"
            f" {' or '.join(devices)}: make the group with a backend for these"
        )
    return found


def nccl_options() -> Any:
    """Return new options for an NCCL process group whose stream has a high priority.

    See [Note: Priorities] in docs/design/notes/communication.md.
    """
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
