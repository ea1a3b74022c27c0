"""Reading one step ahead, so that the disk never holds up a step."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

__all__ = ["Prefetcher"]

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """`fetch(step)`, with the next step's result being fetched by one thread meanwhile.

    Any step may be asked for at any time; only step + 1 comes for free. An error in the thread is
    raised to whoever asks for its step. `num_steps` ends the reading ahead. Used as a context, or
    closed, which waits for the thread.
    """

    def __init__(self, fetch: Callable[[int], T], *, num_steps: int | None = None) -> None:
        self._fetch = fetch
        self._num_steps = num_steps
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="isp-data")
        self._ahead: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """The result for `step`; starts on the next one."""
        if self._ahead is None or self._ahead[0] != step:
            self._start(step)
        assert self._ahead is not None
        result = self._ahead[1].result()
        self._ahead = None
        if self._num_steps is None or step + 1 < self._num_steps:
            self._start(step + 1)
        return result

    def close(self) -> None:
        """Wait for the thread to end; what it was fetching is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, step: int) -> None:
        """Give `step` to the thread, in place of what it was to do next."""
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._ahead = (step, self._pool.submit(self._fetch, step))
