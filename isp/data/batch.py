"""The micro-batches of each step, read one step ahead.

Shapes: B rows, S tokens of a row (`seq_len`).
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
    """Returns the micro-batches of any step, without state, so that resuming needs only the step.

    [Note: Global batch] Step t takes the samples [t * G, (t + 1) * G), with G = micro_num *
    data_size * micro_bsz, ordered by micro-batch, then data rank, then row. So the samples of a
    step, and their order, depend only on G, not on how it is divided between the three.
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
            index = (step * self.micro_num + micro) * data_size + data_rank  # in the whole run
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
    """Yield the micro-batches of `data_rank` in the first `max_samples` held-out samples.

    Every sample counts exactly once for any number of ranks, and every rank gets the same number
    of micro-batches: after the last sample, rows without labels fill them.
    """
    assert 0 <= data_rank < data_size
    count = min(dataset.samples_per_epoch, max_samples)
    for first in range(0, count, micro_bsz * data_size):
        rows = range(first + data_rank * micro_bsz, first + (data_rank + 1) * micro_bsz)
        samples = [dataset.sample(row if row < count else 0) for row in rows]
        for row, sample in zip(rows, samples, strict=True):
            if row >= count:
                sample.labels.fill(IGNORE_INDEX)
        yield stacked(samples, pack=dataset.pack)


class Prefetcher(Generic[T]):
    """Calls `fetch(step)`, and in a thread already `fetch(step + 1)`.

    Steps may come in any order, but only the next one has been prefetched. An error in the thread
    is raised by `get` of its step. Steps from `num_steps` on are not prefetched.
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
        """Wait for the thread to end, and drop its result."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, step: int) -> None:
        """Fetch `step` in the thread, after canceling what waits there."""
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._ahead = (step, self._pool.submit(self._fetch, step))
