"""`MemoryPool`, the buffers that weights are gathered into and gradients are reduced into."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from isp.comm import streams

__all__ = ["Lease", "MemoryPool", "PoolCounters"]


class PoolCounters(NamedTuple):
    """A pool's holdings and past work; sizes in bytes."""

    reserved_bytes: int
    """Held by the pool, leased or free."""
    leased_bytes: int
    """Leased now."""
    peak_leased_bytes: int
    """The most that was leased at once."""
    allocations: int
    """Leases for which a new buffer had to be made."""
    reuses: int
    """Leases served by a buffer that was there."""


@dataclass(slots=True, eq=False)
class Lease:
    """The right to use a buffer until `release`; reading `tensor` afterwards raises."""

    _tensor: Tensor
    _pool: MemoryPool
    _released: bool = False

    @property
    def tensor(self) -> Tensor:
        """The buffer.  Raises RuntimeError once the lease has ended."""
        if self._released:
            raise RuntimeError("this buffer was released: another transfer may be writing to it")
        return self._tensor

    def release(self) -> None:
        """Give the buffer back.  Raises RuntimeError if that was done already."""
        if self._released:
            raise RuntimeError("this buffer was released already: it may be leased to another now")
        self._released = True
        self._pool._take_back(self._tensor)


_Key = tuple[torch.dtype, torch.device, int]


@dataclass(eq=False)
class MemoryPool:
    """Lends buffers by dtype, device and number of elements, and takes them back for reuse.

    Blocks are alike, so the buffers of a block serve all blocks after the next. With `reuse` off
    every lease is a new buffer, dropped at its end: the same program with the allocator instead.
    `poison` fills what is given back with NaN, so that reading it late shows in the loss.

    [Note: Reuse across streams] On CUDA a buffer that is given back may still be read by kernels
    queued on the stream of whoever used it. An event marks that point, and a lease makes the stream
    that is current at that moment wait for it: the gather waits for just this, not for all compute.
    """

    reuse: bool = True
    poison: bool = False
    _free: dict[_Key, list[tuple[Tensor, streams.Event | None]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _reserved: int = 0
    _leased: int = 0
    _peak: int = 0
    _allocations: int = 0
    _reuses: int = 0

    def lease(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Lease:
        """A buffer of this shape, its contents undefined."""
        waiting = self._free[dtype, device, math.prod(shape)]
        if waiting:
            buffer, last_use = waiting.pop()
            if last_use is not None:
                last_use.wait()
            self._reuses += 1
        else:
            with torch.inference_mode(False):  # such a tensor could not be written in training
                buffer = torch.empty(math.prod(shape), dtype=dtype, device=device)
            self._reserved += buffer.nbytes
            self._allocations += 1
        self._leased += buffer.nbytes
        self._peak = max(self._peak, self._leased)
        return Lease(buffer.view(shape), self)

    def counters(self) -> PoolCounters:
        """Bytes held and lent, and how often a buffer was reused."""
        return PoolCounters(
            self._reserved, self._leased, self._peak, self._allocations, self._reuses
        )

    def reset_peak(self) -> None:
        """Count the peak from what is leased now."""
        self._peak = self._leased

    def reset_lazy_pools(self) -> None:
        """Drop the buffers that are not leased, e.g. before a phase with other shapes."""
        for buffer, last_use in (item for items in self._free.values() for item in items):
            if last_use is not None:
                last_use.synchronize()
            self._reserved -= buffer.nbytes
        self._free.clear()

    def _take_back(self, tensor: Tensor) -> None:
        self._leased -= tensor.nbytes
        if self.poison and tensor.is_floating_point():
            tensor.fill_(math.nan)
        if not self.reuse:
            self._reserved -= tensor.nbytes
            streams.in_use(tensor)
            return
        key = (tensor.dtype, tensor.device, tensor.numel())
        self._free[key].append((tensor.view(-1), streams.mark(tensor.device)))
