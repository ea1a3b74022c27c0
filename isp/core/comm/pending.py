"""`Pending`, the result of every asynchronous transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isp.core.comm import streams

__all__ = ["Pending"]


class Pending:
    """A tensor that a transfer in flight will write; `wait()` returns it.

    A second `wait` returns the same tensor at no cost. The holder of the `Pending` owns the
    transfer and must wait for it. The tensor is `result`, valid once `finish` has returned, or the
    value that `finish` returns if there is no `result`.

    [Note: Lifetime of what travels] All tensors that the transfer reads and writes (`keep`) stay
    alive here until the wait. On CUDA the transfer may still run after `wait` has returned: only
    the waiting stream was made to wait. So `wait` records that stream as a user of these tensors
    (`record_stream`), and the allocator reuses none of them, on any stream, before the waiting
    stream has passed the end of the transfer.
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
        """Return a `Pending` whose tensor is there already."""
        return cls(result=tensor)

    @property
    def waited(self) -> bool:
        """Return whether `wait` has been called, or was never needed."""
        return self._finish is None

    def wait(self) -> Tensor:
        """Wait for the transfer and return the tensor.

        On CPU the host blocks until it is there; on CUDA the current stream waits, the host not.
        Raises the error of a failed transfer, and RuntimeError at each further wait.
        """
        finish, result = self._finish, self._result
        if finish is not None:
            # Cleared first: if `finish` raises, a second wait must not return an unwritten tensor.
            self._finish = self._result = None
            found = finish()
            self._result = result = found if result is None else result
            if self._keep:
                streams.in_use(*self._keep)
                self._keep = ()
        if result is None:
            raise RuntimeError("this transfer failed when it was first waited for")
        return result

    def then(self, fn: Callable[[Tensor], Tensor]) -> Pending:
        """Return a `Pending` of `fn(tensor)`; `fn` runs in its first `wait`, or now if waited."""
        if self._finish is None:
            return Pending(result=fn(self.wait()))
        return Pending(lambda: fn(self.wait()))
