"""Settings of a process for CUDA, which its environment may override."""

from __future__ import annotations

import os

import torch

__all__ = ["ALLOCATOR_VARIABLES", "expand_segments", "few_connections"]


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables from which torch takes settings of its allocator."""
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_USUAL_CONNECTIONS = 8


def expand_segments() -> None:
    """Let the allocator's segments grow, so that rows of other lengths leave fewer holes.

    To be called before the first allocation. What the environment says of the allocator stays.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def few_connections() -> str:
    """What is lost where the host has fewer queues to a device than is usual; empty if nothing.

    Streams that share a queue wait for each other: what was queued first begins first.
    """
    number = os.environ.get(_CONNECTIONS, "")
    if not number.isdecimal() or int(number) >= _USUAL_CONNECTIONS:
        return ""
    return (
        f"{_CONNECTIONS}={number}: communication waits for compute that was queued before it, and"
        f" less of it is hidden: unset it ({_USUAL_CONNECTIONS} queues), or set 32"
    )
