"""Saves in the background: a copy of the state, and a thread that writes it.

[Note: Why not async_save] `torch.distributed.checkpoint.async_save` ends when each rank has written
its files and rank 0 the table of contents. A checkpoint of ours is published after that, by an
agreement of all ranks about files and checksums, which has to be in the same thread as the
collectives of the save itself, or they would meet on the process group. So the thread is our own
and runs the very code of a save in the foreground. Torch's process instead of a thread
(`AsyncCheckpointerType.PROCESS`) would start slowly, need process groups of its own, and outlive a
rank that is killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from isp.checkpoint.boxes import Shard
from isp.core.comm import streams
from isp.core.comm.pinned_memory import zeros

__all__ = ["Flight", "Staging"]


class Staging:
    """CPU memory for copies of shards: the same for every save, page-locked where they are on CUDA.

    One copy at a time is valid. Holds as many bytes as the shards. Torch's `DefaultStager` holds
    as many as the tensors that they are parts of, and that of torch 2.11 copies only once.
    """

    def __init__(self) -> None:
        self._copies: dict[str, list[Tensor]] = {}

    def copy(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """The same shards with data that training does not change any more, on CPU.

        Waits until the data has arrived. Overwrites the last copy.
        """
        copied, devices = {}, set()
        for key, shard in shards.items():
            data = [piece.data for piece in shard.pieces]
            copies = self._copies.get(key, [])
            if [(c.shape, c.dtype) for c in copies] != [(x.shape, x.dtype) for x in data]:
                copies = [zeros(x.numel(), x.dtype, x.device).view(x.shape) for x in data]
                self._copies[key] = copies
            for copy, x in zip(copies, data, strict=True):
                copy.copy_(x, non_blocking=True)
                devices.add(x.device)
            copied[key] = shard.with_data(copies)
        for device in devices:
            if (arrived := streams.mark(device)) is not None:
                arrived.synchronize()
        return copied


class Flight:
    """A save that is being written by a thread; what it raised is in `error` afterwards."""

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        self.step = step
        self.error: Exception | None = None
        self._write = write
        # A run that ends with an error need not wait for a rank that is gone: see `join`.
        self._thread = threading.Thread(target=self._run, name=f"save step {step}", daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float | None = None) -> float:
        """Wait until it is over; for how many seconds it had to be waited for."""
        begin = time.perf_counter()
        self._thread.join(timeout_seconds)
        return time.perf_counter() - begin

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self.error = error
