"""`Pending`, a tensor on its way: the only asynchronous currency; `Link`, a slower way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isp.comm import streams

__all__ = ["Link", "Pending"]


class Pending:
    """A tensor on its way; `wait()` gives it.

    `wait` may be called again and gives the same tensor at no cost. Whoever holds the `Pending`
    owns the transfer. The tensor is `result`, there when `finish` has returned, or, without it,
    what that gives.

    [Note: Lifetime of what travels] Until the wait all that the transfer reads and writes is kept
    alive here. On CUDA the transfer may not be over then: the stream that waits is only told to.
    So the allocator learns that this stream uses it all, and reuses nothing of it, on
    whatever stream, before that one has come to the end of the transfer.
    """

    __slots__ = ("_finish", "_keep", "_result")

    def __init__(
        self,
        finish: Callable[[], Any] | None = None,
        *,
        result: Tensor | None = None,
        keep: tuple[Tensor, ...] = (),
    ) -> None:
        self._finish = finish
        self._result = result
        self._keep = keep

    @classmethod
    def ready(cls, tensor: Tensor) -> Pending:
        """A tensor that has already arrived."""
        return cls(result=tensor)

    @property
    def waited(self) -> bool:
        """Whether the tensor has been handed out already."""
        return self._finish is None

    def wait(self) -> Tensor:
        """The tensor; on CPU blocks until it is there, on CUDA makes the current stream wait.

        Raises what the transfer raised; the transfer is over then, and waiting again raises too.
        """
        if self._finish is not None:
            finish, self._finish = self._finish, None
            result, self._result = self._result, None
            found = finish()
            self._result = found if result is None else result
            if self._keep:
                streams.in_use(*self._keep)
                self._keep = ()
        if self._result is None:
            raise RuntimeError("this transfer failed when it was first waited for")
        return self._result

    def then(self, fn: Callable[[Tensor], Tensor]) -> Pending:
        """The result of `fn` on the tensor once there; `fn` runs in `wait`."""
        if self._finish is None:
            return Pending(result=fn(self.wait()))
        return Pending(lambda: fn(self.wait()))


@dataclass
class Link:
    """A modelled wire, shared by every channel it is given to: transfers queue on it.

    A transfer of n bytes launched at t is there at max(t, end of the one before) + latency +
    n / bandwidth, or when the real transfer is done, whichever is later. Waiting sleeps, so the
    cores stay free for compute, as they do while a network card works.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    _busy_until: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.latency_seconds < 0:
            raise ValueError(
                f"a link needs bytes_per_second > 0 and latency_seconds >= 0, got"
                f" {self.bytes_per_second} and {self.latency_seconds}"
            )

    def book(self, num_bytes: int) -> float:
        """The end of a transfer of `num_bytes` launched now, in `time.perf_counter`."""
        start = max(time.perf_counter(), self._busy_until)
        self._busy_until = start + self.latency_seconds + num_bytes / self.bytes_per_second
        return self._busy_until
