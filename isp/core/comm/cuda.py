"""CUDA settings of a process, which the environment overrides, and buffers registered with NCCL."""

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
"""A function that is given a number of elements and a dtype, and returns a new buffer."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables from which torch reads the settings of its CUDA allocator."""
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_USUAL_CONNECTIONS = 8
"""CUDA's default number of hardware queues of a device."""
_MOST_CONNECTIONS = 32
"""The largest number of hardware queues of a device that CUDA accepts."""


def expand_segments() -> None:
    """Turn on torch's expandable segments: rows of varying lengths then fragment less memory.

    Call this before the first allocation. Does nothing if the environment sets the allocator.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        set_allocator("expandable_segments:True")


def compute_deterministically() -> None:
    """Make torch use deterministic kernels only. Call this before the first matrix product.

    cuBLAS reads its workspace size from the environment at its first use; without a fixed size
    torch 2.11 may refuse matrix products in deterministic mode.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def use_more_connections() -> None:
    """Set the number of hardware queues of a device to 32, the maximum.

    A run has more streams than the default of 8 queues. A value in the environment is kept. Call
    this before CUDA is initialized, which reads the value once; afterwards it does nothing.
    """
    if not torch.cuda.is_initialized():
        os.environ.setdefault(_CONNECTIONS, str(_MOST_CONNECTIONS))


def few_connections(ranks: int) -> str:
    """Return a warning if a device has too few hardware queues for a run; empty if it has enough.

    Streams that share a queue wait for each other: work starts in the order in which it was queued.
    A run of one rank has no streams for collectives, so the default number is enough.
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
    """Raise ValueError, naming the configuration `key`, if NCCL cannot register buffers here."""
    if device_type != "cuda":
        raise ValueError(
            f"{key}=true registers buffers with NCCL, but CPU ranks use gloo: use false"
        )
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise ValueError(
                f"{key}=true needs memory that NCCL can register, which torch 2.11 does not provide"
                f" with {name}={os.environ[name]}: use false, or unset the variable"
            )


def registered(group: dist.ProcessGroup, device: torch.device, *, key: str) -> Allocate:
    """Return a function that allocates buffers registered with NCCL for `group`.

    NCCL reads and writes such buffers directly, without copies through its own buffers. Raises
    ValueError, naming the configuration `key`, if the device cannot allocate such memory.
    Source: torch FSDP2, `set_allocate_memory_from_process_group_for_comm`.
    """
    backend = backend_of(group, device)
    if not backend.supports_tensor_alloc(device):
        raise ValueError(
            f"{key}=true needs GPUs with NVLink SHARP, which {device} does not have: use false"
        )
    return lambda numel, dtype: backend.allocate_tensor(numel, dtype=dtype, device=device)
