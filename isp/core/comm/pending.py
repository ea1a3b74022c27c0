"""`Pending`, a tensor on its way: the only asynchronous currency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isp.core.comm import streams

__all__ = ["Pending"]


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
