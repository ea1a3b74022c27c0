"""`MemoryPool`: buffers for gathered weights and reduced gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from isp.core.comm import streams
from isp.core.comm.cuda import Allocate

__all__ = ["Lease", "MemoryPool"]


class Lease:
    """The right to use a buffer until `release`; reading `tensor` afterwards raises."""

    __slots__ = ("_kind", "_pool", "_released", "_tensor")

    def __init__(self, tensor: Tensor, kind: _Kind, pool: MemoryPool) -> None:
        self._tensor, self._kind, self._pool, self._released = tensor, kind, pool, False

    @property
    def tensor(self) -> Tensor:
        """The leased buffer.  Raises RuntimeError after `release`."""
        if self._released:
            raise RuntimeError("this buffer was released: another transfer may be writing to it")
        return self._tensor

    def release(self) -> None:
        """Return the buffer to the pool.  Raises RuntimeError if it was returned before."""
        if self._released:
            raise RuntimeError(
                "this buffer was released already: it may be leased to another user now; release a"
                " Lease only once"
            )
        self._released = True
        self._pool._take_back(self._tensor, self._kind)


_Free = list[tuple[Tensor, tuple[int, ...], streams.Event | None]]
"""Free buffers, each with its shape, and with an event after the last kernel that reads it."""


class _Kind(NamedTuple):
    """The pool's entry for one shape, dtype and device: the size in bytes and the free buffers."""

    shape: tuple[int, ...]
    num_bytes: int
    free: _Free
    """Shared with other shapes of the same number of elements."""


@dataclass(eq=False)
class MemoryPool:
    """Lends buffers by dtype, device and number of elements, and takes them back for reuse.

    Blocks have equal shapes, so the buffers of a freed block serve later blocks. Without `reuse`
    each lease allocates a buffer and drops it at its end, to compare with torch's allocator.
    `poison` fills returned buffers with NaN, so that a read after `release` shows in the loss.
    `allocate` replaces `torch.empty`, e.g. to return memory that is registered with NCCL.

    A reused buffer waits for the last kernel that reads it, not for all compute. See
    [Note: Reuse across streams] in docs/design/notes/weights.md.
    """

    reuse: bool = True
    poison: bool = False
    allocate: Allocate | None = None
    reserved_bytes: int = 0
    """Number of bytes of all buffers of the pool, whether they are leased or free."""
    leased_bytes: int = 0
    """Number of bytes of the buffers that are leased now."""
    allocations: int = 0
    """Number of leases that needed a new buffer."""
    reuses: int = 0
    """Number of leases that a free buffer served."""
    _kinds: dict[tuple[tuple[int, ...], torch.dtype, torch.device], _Kind] = field(
        default_factory=dict
    )
    _free: defaultdict[tuple[torch.dtype, torch.device, int], _Free] = field(
        default_factory=lambda: defaultdict(list)
    )

    def lease(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Lease:
        """Lease a buffer of this shape; its contents are undefined."""
        # The size in bytes and the list of free buffers are looked up in a cache, to save time:
        # each gather of a step leases a buffer.
        kind = self._kinds.get((shape, dtype, device)) or self._new_kind(shape, dtype, device)
        _, num_bytes, free = kind
        if free:
            buffer, last_shape, last_use = free.pop()
            if last_shape != shape:
                buffer = buffer.view(shape)
            if last_use is not None:
                # Make this stream wait for the last kernel that reads the buffer
                # [Note: Reuse across streams].
                last_use.wait()
            self.reuses += 1
        else:
            # A tensor made in inference mode could not be written in training later.
            with torch.inference_mode(False):
                if self.allocate is not None:
                    buffer = self.allocate(math.prod(shape), dtype).view(shape)
                else:
                    buffer = torch.empty(shape, dtype=dtype, device=device)
            self.reserved_bytes += num_bytes
            self.allocations += 1
        self.leased_bytes += num_bytes
        return Lease(buffer, kind, self)

    def reset_lazy_pools(self) -> None:
        """Drop free buffers, e.g. before a phase with other shapes."""
        for free in self._free.values():
            for buffer, _, last_use in free:
                # Wait for the last kernel that reads the buffer: if it runs on another stream, the
                # allocator does not know of it and would reuse the memory at once.
                if last_use is not None:
                    last_use.synchronize()
                self.reserved_bytes -= buffer.nbytes
            free.clear()

    def _new_kind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Kind:
        numel = math.prod(shape)
        free = self._free[dtype, device, numel]
        kind = self._kinds[shape, dtype, device] = _Kind(shape, numel * dtype.itemsize, free)
        return kind

    def _take_back(self, tensor: Tensor, kind: _Kind) -> None:
        shape, num_bytes, free = kind
        self.leased_bytes -= num_bytes
        if self.poison and tensor.is_floating_point():
            tensor.fill_(math.nan)
        if self.reuse:
            free.append((tensor, shape, streams.mark(tensor.device)))
        else:
            self.reserved_bytes -= num_bytes
            streams.in_use(tensor)
