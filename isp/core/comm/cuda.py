"""Settings of a process for CUDA, which its environment may override, and buffers of NCCL's."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.torch_private import backend_of, set_allocator

__all__ = [
    "ALLOCATOR_VARIABLES",
    "Allocate",
    "check_registers",
    "compute_deterministically",
    "expand_segments",
    "few_connections",
    "registered",
    "use_more_connections",
]

Allocate = Callable[[int, torch.dtype], Tensor]
"""Makes a buffer of so many elements."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables from which torch takes settings of its allocator."""
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_USUAL_CONNECTIONS = 8
_MOST_CONNECTIONS = 32


def expand_segments() -> None:
    """Let the allocator's segments grow, so that rows of other lengths leave fewer holes.

    To be called before the first allocation. What the environment says of the allocator stays.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        set_allocator("expandable_segments:True")


def compute_deterministically() -> None:
    """Use deterministic kernels alone. To be called before the first product.

    cuBLAS needs workspaces of a fixed size for that, or torch 2.11 may refuse the product.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def use_more_connections() -> None:
    """Set the number of hardware queues to a device to 32, the most there are.

    A run has more streams than the default of 8. A value in the environment stays. Call this before
    CUDA starts, which reads the value then.
    """
    if not torch.cuda.is_initialized():
        os.environ.setdefault(_CONNECTIONS, str(_MOST_CONNECTIONS))


def few_connections(ranks: int) -> str:
    """Return what is lost where the host has too few queues to a device; empty if nothing.

    Streams that share a queue wait for each other: what was queued first begins first. One rank
    has no streams of collectives, and the usual queues are enough.
    """
    number, most = os.environ.get(_CONNECTIONS, ""), _MOST_CONNECTIONS
    if not number and ranks > 1:
        return (
            f"CUDA was started before ISP, with {_USUAL_CONNECTIONS} queues to a device: a run has"
            f" more streams, and those that share a queue wait for each other: set"
            f" {_CONNECTIONS}={most} before"
        )
    if not number.isdecimal() or int(number) >= _USUAL_CONNECTIONS:
        return ""
    return (
        f"{_CONNECTIONS}={number}: communication waits for compute that was queued before it, and"
        f" less of it is hidden: unset it ({most} queues)"
    )


def check_registers(key: str, device_type: str) -> None:
    """Raise ValueError, in the name of `key`, where no buffers can be registered with NCCL."""
    if device_type != "cuda":
        raise ValueError(
            f"{key}=true registers buffers with NCCL, but CPU ranks use gloo: use false"
        )
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise ValueError(
                f"{key}=true needs a special kind of memory, which torch 2.11 does not provide"
                f" with {name}={os.environ[name]}: use false, or unset the variable"
            )


def registered(group: dist.ProcessGroup, device: torch.device, *, key: str) -> Allocate:
    """Makes buffers in memory that is registered with NCCL for `group`, as FSDP2 has them made.

    NCCL then reads and writes them where they are, without buffers of its own between.
    Raises ValueError, in the name of `key`, where the device has no memory of that kind.
    """
    backend = backend_of(group, device)
    if not backend.supports_tensor_alloc(device):
        raise ValueError(
            f"{key}=true needs GPUs with NVLink SHARP, which {device} does not have: use false"
        )
    return lambda numel, dtype: backend.allocate_tensor(numel, dtype=dtype, device=device)
