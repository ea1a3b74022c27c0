"""`Pending`, the result of every asynchronous transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isp.core.comm import streams

__all__ = ["Pending"]


class Pending:
    """A tensor that a transfer in flight will write; `wait()` returns it.

    A second `wait` returns the same tensor at no cost. Code that has the `Pending` must wait for it
    once. The tensor is `result`, valid once `finish` has returned, or if there is no `result` the
    value that `finish` returns. `keep`: the tensors that the transfer reads and writes; they stay
    allocated until it is over.
    See [Note: Lifetime of tensors in flight] in docs/design/notes/communication.md.
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
        """Return a `Pending` of a tensor that needs no wait."""
        return cls(result=tensor)

    @property
    def waited(self) -> bool:
        """Return whether `wait` has been called, or was never needed."""
        return self._finish is None

    def wait(self) -> Tensor:
        """Wait for the transfer and return the tensor.

        On CPU the host blocks until the transfer is over; on CUDA only the current stream waits.
        If the transfer fails, raises its error, and RuntimeError in each later `wait`.
        """
        finish, result = self._finish, self._result
        if finish is not None:
            # Cleared first: if `finish` raises, a second wait must not return an unwritten tensor.
            self._finish = self._result = None
            found = finish()
            self._result = result = found if result is None else result
            # On CUDA the transfer may still run: keep its tensors from being reused before it ends
            # [Note: Lifetime of tensors in flight].
            if self._keep:
                streams.in_use(*self._keep)
                self._keep = ()
        if result is None:
            raise RuntimeError("this transfer failed: its first wait() raised the error")
        return result

    def then(self, fn: Callable[[Tensor], Tensor]) -> Pending:
        """Return a `Pending` of `fn(tensor)`.

        `fn` runs in the first `wait` of the returned `Pending`, or at once if no wait is needed.
        """
        if self._finish is None:
            return Pending(result=fn(self.wait()))
        return Pending(lambda: fn(self.wait()))
