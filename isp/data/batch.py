"""`BatchSampler` makes the micro-batches of a step; `Prefetcher` makes them one step ahead.

B samples in a micro-batch, S tokens in a sample (`seq_len`)
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from isp.core.micro_batch import MicroBatch, document_bounds
from isp.data.dataset import IGNORE_INDEX, Dataset, Sample

__all__ = ["BatchSampler", "Prefetcher", "held_out_micro_batches", "stacked"]

T = TypeVar("T")


def stacked(samples: Sequence[Sample], *, pack: bool) -> MicroBatch:
    """Stack B samples into a micro-batch [B, S], or with `pack` [1, B * S] and document bounds."""
    shape = (1, -1) if pack else (len(samples), -1)
    *rows, padding = zip(*samples, strict=True)
    tokens, labels, positions = (
        torch.from_numpy(np.concatenate(of_samples)).reshape(shape) for of_samples in rows
    )
    cu_seqlens = document_bounds(positions[0] == 0) if pack else None
    return MicroBatch(tokens, labels, positions, cu_seqlens, padding if any(padding) else ())


@dataclass(frozen=True, kw_only=True)
class BatchSampler:
    """Makes the micro-batches of any step. It has no state: to resume, only the step is needed.

    Which samples a step has depends only on the size of the global batch. See [Note: Global batch]
    in docs/design/notes/data.md.
    """

    dataset: Dataset
    micro_bsz: int
    micro_num: int

    def micro_batches(self, step: int, data_rank: int, data_size: int) -> list[MicroBatch]:
        """Return the `micro_num` micro-batches of `data_rank` at `step`, both counted from 0."""
        assert step >= 0
        assert 0 <= data_rank < data_size
        batches = []
        for micro in range(self.micro_num):
            # Index of this micro-batch among those of the whole run [Note: Global batch].
            index = (step * self.micro_num + micro) * data_size + data_rank
            rows = range(index * self.micro_bsz, (index + 1) * self.micro_bsz)
            samples = [self.dataset.sample(row) for row in rows]
            batches.append(stacked(samples, pack=self.dataset.pack))
        return batches


def held_out_micro_batches(
    dataset: Dataset,
    *,
    micro_bsz: int,
    data_rank: int,
    data_size: int,
    max_samples: int,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of `data_rank` over the first `max_samples` held-out samples.

    Each sample comes exactly once, for any number of ranks, and all ranks get the same number of
    micro-batches: the last ones are filled up with rows without labels.
    """
    assert 0 <= data_rank < data_size
    count = min(dataset.samples_per_epoch, max_samples)
    for first in range(0, count, micro_bsz * data_size):
        rows = range(first + data_rank * micro_bsz, first + (data_rank + 1) * micro_bsz)
        samples = [dataset.sample(row if row < count else 0) for row in rows]
        for row, sample in zip(rows, samples, strict=True):
            if row >= count:  # It fills the micro-batch up: sample 0, without its labels.
                sample.labels.fill(IGNORE_INDEX)
        yield stacked(samples, pack=dataset.pack)


class Prefetcher(Generic[T]):
    """Returns results of `fetch(step)`, and calls `fetch(step + 1)` ahead, in a thread.

    Steps may be asked for in any order, but only the one after the last has been prefetched. An
    error in the thread is raised by `get` of that step. Steps from `num_steps` on are not
    prefetched.
    """

    def __init__(self, fetch: Callable[[int], T], *, num_steps: int | None = None) -> None:
        self._fetch = fetch
        self._num_steps = num_steps
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="isp-data")
        self._ahead: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """Return the result of `step`, and start to fetch the next one."""
        if self._ahead is None or self._ahead[0] != step:
            self._start(step)
        assert self._ahead is not None
        result = self._ahead[1].result()
        self._ahead = None
        if self._num_steps is None or step + 1 < self._num_steps:
            self._start(step + 1)
        return result

    def close(self) -> None:
        """Wait until the thread has ended, and drop its result."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, step: int) -> None:
        """Fetch `step` in the thread; cancel what was prefetched, if it has not begun."""
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._ahead = (step, self._pool.submit(self._fetch, step))
