"""Offload of tensors to host memory: buffers, and copies in both directions.

Copies of both directions are queued on one stream, after the work that made a tensor and before the
work that needs it. So a released buffer may be reused at once: the next write to it is queued after
the last read from it.

On CPU there are no streams: a copy is done when its launch returns, and all of its time is exposed.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isp.core.comm import pinned_memory, streams
from isp.core.comm.channel import Channel
from isp.core.comm.pending import Pending
from isp.core.comm.tag import Tag, Transfer
from isp.core.comm.transfer_log import CommLog

__all__ = [
    "FROM_HOST",
    "HOST",
    "TO_HOST",
    "HostChannel",
    "HostMemory",
    "HostMemoryError",
    "Stored",
]

HOST = "offload"
"""Name of the channel for offload; the channel `host` is another one, of all ranks on gloo."""

TO_HOST, FROM_HOST = "to_host", "from_host"
"""Kinds of the transfers in the log (`Transfer.kind`)."""


class HostMemoryError(ValueError):
    """The host has too little memory; the text says how much, and which keys reduce the need."""


class HostChannel(Channel):
    """A channel of one rank, for copies between a device and the memory of its host."""

    def __init__(self, device: torch.device, *, log: CommLog | None = None) -> None:
        super().__init__(None, name=HOST, log=log)
        self._device = device
        self._stream: streams.Stream | None = None

    def copy(self, out: Tensor, x: Tensor, *, kind: str, tag: Tag) -> Pending:
        """Launch the copy of x into `out`, after all work queued on the current stream so far."""
        if self._stream is None:
            self._stream = streams.new(self._device)

        def start() -> Any:
            streams.follow(self._stream)  # the current stream may still be computing x
            with streams.on(self._stream):
                out.copy_(x, non_blocking=True)
                # Or the allocator could reuse the memory of `out` and x before the copy ends.
                streams.in_use(out, x)
                return streams.mark(self._device)  # an event has `wait`, like a dist.Work

        return self._launch(kind, tag, x.nbytes, start, out, keep=())

    def forget(self, pending: Pending) -> None:
        """Wait for `pending` on the copy stream only, so that compute does not wait for the copy.

        The copy stream runs its copies in order, so later copies see the result.
        """
        with streams.on(self._stream):
            pending.wait()

    def finish(self) -> None:
        """Block the host until all copies are done, so that their host memory may be freed."""
        if self._stream is not None:
            self._stream.synchronize()

    def _start(
        self, transfer: Transfer, start: Callable[[], Any], pair: tuple[int, ...]
    ) -> Callable[[], object]:
        timed = self.log.start(*transfer)
        if self._stream is not None:
            return self.log.timed_on_device(timed, start, self._stream)
        start()  # without a stream the copy is done when this returns
        timed.wait_began, timed.waited = timed.launched, True
        timed.ended = time.perf_counter()
        timed.exposed = timed.ended - timed.launched
        return lambda: None


class HostMemory:
    """A rank's pool of host buffers, page-locked if the device is a GPU.

    Released buffers are kept, because blocks and steps need the same sizes again. Where rows vary
    in length, a tensor gets the smallest free buffer that is large enough; if there is none, the
    largest free buffer is dropped and a larger one is made.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        log: CommLog | None = None,
        channel: HostChannel | None = None,
    ) -> None:
        self.channel = HostChannel(device, log=log) if channel is None else channel
        self.reserved_bytes = 0
        """Number of bytes of all host buffers, whether they are leased or free."""
        self.num_buffers = 0
        """Number of all buffers, leased or free."""
        self.leased_bytes = 0
        """Number of bytes of the host buffers that are leased now."""
        self.is_apart = device.type == "cuda"
        """True if the device has memory of its own; host buffers are then page-locked."""
        self._device = device
        self._free: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)

    def describe(self) -> str:
        """Return a text such as `12.0 GiB of pinned host memory in 96 buffers`."""
        size, pinned = self.reserved_bytes, "pinned " if self.is_apart else ""
        shown = f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
        return f"{shown} of {pinned}host memory in {self.num_buffers} buffers"

    def store(self, x: Tensor, *, tag: Tag) -> Stored:
        """Launch the copy of x to the host.  Raises HostMemoryError if the host lacks memory."""
        return Stored(self, x, tag)

    def _lend(self, x: Tensor) -> Tensor:
        """Return a flat buffer with x's dtype and at least x's elements."""
        free = self._free[x.dtype]
        free.sort(key=Tensor.numel)
        # Index of the smallest free buffer that is large enough.
        place = bisect_left(free, x.numel(), key=Tensor.numel)
        if place == len(free) > 0:  # all free buffers are too small: replace the largest
            self.channel.finish()  # a copy from or to the dropped buffer may still run
            self.reserved_bytes -= free.pop().nbytes
            self.num_buffers -= 1
        buffer = free.pop(place) if place < len(free) else self._make(x)
        self.leased_bytes += buffer.nbytes
        return buffer

    def _make(self, x: Tensor) -> Tensor:
        """Return a new buffer with x's dtype and number of elements."""
        try:
            with torch.inference_mode(False):  # inference tensors cannot be written in training
                buffer = pinned_memory.zeros(x.numel(), x.dtype, self._device)
        except MemoryError as error:
            raise HostMemoryError(
                f"model.checkpoint_offload: this rank has {self.reserved_bytes / 2**30:.1f} GiB of"
                f" host memory, and cannot get {x.nbytes / 2**20:.1f} MiB more: {error}: use a"
                f" shorter data.seq_len, a larger model.checkpoint_segment, or"
                f" model.checkpoint_offload=false"
            ) from error
        self.reserved_bytes += buffer.nbytes
        self.num_buffers += 1
        return buffer

    def _take_back(self, buffer: Tensor) -> None:
        self.leased_bytes -= buffer.nbytes
        self._free[buffer.dtype].append(buffer)


class Stored:
    """A tensor in host memory; the device has a copy until the first `leave`, and after a `fetch`.

    The buffer returns to the pool when this object is garbage collected.
    """

    def __init__(self, memory: HostMemory, x: Tensor, tag: Tag) -> None:
        self._channel, self._tag = memory.channel, tag
        self._here: Pending | None = Pending.ready(x)
        buffer = memory._lend(x)
        # atexit=False: do not return the buffer at interpreter exit, when CUDA may be gone.
        weakref.finalize(self, memory._take_back, buffer).atexit = False
        self._buffer = buffer[: x.numel()].view(x.shape)
        self._device = x.device
        # Compute need not wait for the copy: only `fetch` reads it, later on the same copy stream.
        self._channel.forget(self._channel.copy(self._buffer, x, kind=TO_HOST, tag=tag))

    def leave(self) -> None:
        """Drop the tensor on the device; its copy in host memory stays, for `fetch`."""
        self._here = None

    def fetch(self) -> None:
        """Launch the copy back to the device, unless it is there or in flight."""
        if self._here is None:
            out = torch.empty_like(self._buffer, device=self._device)
            self._here = self._channel.copy(out, self._buffer, kind=FROM_HOST, tag=self._tag)

    def get(self) -> Tensor:
        """Return the tensor on the device, after a `fetch` if needed; kept until `leave`."""
        self.fetch()
        assert self._here is not None
        return self._here.wait()
