"""Host memory for what a device has no use for meanwhile, and the way there and back.

[Note: One stream] Copies of both directions follow each other on one stream of their own, behind
what made a tensor and ahead of who needs it. So a buffer that is given back may be reused at
once: what is written to it next is queued behind what was read from it.

Without streams, on CPU, a copy is done where it is asked for, and all of its time is exposed.
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
"""Name of the channel; `host` is that of all ranks, for values in CPU memory."""

TO_HOST, FROM_HOST = "to_host", "from_host"
"""Kinds of transfers."""


class HostMemoryError(ValueError):
    """The host has not the memory that was asked for: how much, and which key asks for less."""


class HostChannel(Channel):
    """The way between a device and the memory of its host; of this rank alone."""

    def __init__(self, device: torch.device, *, log: CommLog | None = None) -> None:
        super().__init__(None, name=HOST, log=log)
        self._device = device
        self._stream: streams.Stream | None = None

    def copy(self, out: Tensor, x: Tensor, *, kind: str, tag: Tag) -> Pending:
        """Write x, which is there when what is queued now is over, into `out`."""
        if self._stream is None:
            self._stream = streams.new(self._device)

        def start() -> Any:
            streams.follow(self._stream)
            with streams.on(self._stream):
                out.copy_(x, non_blocking=True)
                streams.in_use(out, x)
                return streams.mark(self._device)  # waited for as work of a process group is

        return self._launch(kind, tag, x.nbytes, start, out, keep=())

    def forget(self, pending: Pending) -> None:
        """Nobody but this channel, on which all is in order, will wait for `pending`."""
        with streams.on(self._stream):
            pending.wait()

    def finish(self) -> None:
        """Wait, on the host, until all copies are over: memory of theirs may then be freed."""
        if self._stream is not None:
            self._stream.synchronize()

    def _start(
        self, of: Transfer, start: Callable[[], Any], pair: tuple[int, ...]
    ) -> Callable[[], object]:
        transfer = self.log.start(*of)
        if self._stream is not None:
            return self.log.timed_on_device(transfer, start, self._stream)
        start()
        transfer.wait_began, transfer.waited = transfer.launched, True
        transfer.ended = time.perf_counter()
        transfer.exposed = transfer.ended - transfer.launched
        return lambda: None


class HostMemory:
    """Buffers in host memory, pinned where the device is not the host; a rank has one.

    Buffers are kept for reuse: blocks and steps are alike. Where rows are not, the smallest buffer
    that fits is taken, and a larger one is made in the place of one that is free.
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
        """Leased or free."""
        self.num_buffers = 0
        self.leased_bytes = 0
        """Leased now."""
        self.is_apart = device.type == "cuda"
        """Whether it is not the memory that the device computes in; pinned then."""
        self._device = device
        self._free: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)

    def describe(self) -> str:
        """The buffers in words: `12.0 GiB of pinned host memory in 96 buffers`."""
        size, pinned = self.reserved_bytes, "pinned " if self.is_apart else ""
        shown = f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
        return f"{shown} of {pinned}host memory in {self.num_buffers} buffers"

    def store(self, x: Tensor, *, tag: Tag) -> Stored:
        """Set a copy of x on its way to the host. Raises HostMemoryError if there is no room."""
        return Stored(self, x, tag)

    def _lend(self, x: Tensor) -> Tensor:
        free = self._free[x.dtype]
        free.sort(key=Tensor.numel)
        place = bisect_left(free, x.numel(), key=Tensor.numel)
        if place == len(free) > 0:  # all are too small
            self.channel.finish()
            self.reserved_bytes -= free.pop().nbytes
            self.num_buffers -= 1
        buffer = free.pop(place) if place < len(free) else self._make(x)
        self.leased_bytes += buffer.nbytes
        return buffer

    def _make(self, x: Tensor) -> Tensor:
        try:
            with torch.inference_mode(False):  # such a tensor could not be written in training
                buffer = pinned_memory.zeros(x.numel(), x.dtype, self._device)
        except MemoryError as error:
            raise HostMemoryError(
                f"model.checkpoint_offload: the host has {self.reserved_bytes / 2**30:.1f} GiB of"
                f" memory for this rank, and no further {x.nbytes / 2**20:.1f} MiB: {error}: use a"
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
    """A tensor in host memory, of which the device may have a copy.

    The buffer is given back when nobody holds this any more.
    """

    def __init__(self, memory: HostMemory, x: Tensor, tag: Tag) -> None:
        self._channel, self._tag = memory.channel, tag
        self._here: Pending | None = Pending.ready(x)
        buffer = memory._lend(x)
        weakref.finalize(self, memory._take_back, buffer).atexit = False
        self._buffer = buffer[: x.numel()].view(x.shape)
        self._device = x.device
        self._channel.forget(self._channel.copy(self._buffer, x, kind=TO_HOST, tag=tag))

    def leave(self) -> None:
        """Drop what the device has of it."""
        self._here = None

    def fetch(self) -> None:
        """Set it on its way back, unless it is there, or under way."""
        if self._here is None:
            out = torch.empty_like(self._buffer, device=self._device)
            self._here = self._channel.copy(out, self._buffer, kind=FROM_HOST, tag=self._tag)

    def get(self) -> Tensor:
        """The tensor on the device, which has it as long as somebody holds this."""
        self.fetch()
        assert self._here is not None
        return self._here.wait()
