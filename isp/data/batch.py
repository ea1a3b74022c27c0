"""Reads the micro-batches of each step, one step ahead."""

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
    """Stack samples to a micro-batch; with `pack`, into one row with bounds of documents."""
    shape = (1, -1) if pack else (len(samples), -1)
    *rows, padding = zip(*samples, strict=True)
    tokens, labels, positions = (
        torch.from_numpy(np.concatenate(of_samples)).reshape(shape) for of_samples in rows
    )
    cu_seqlens = document_bounds(positions[0] == 0) if pack else None
    return MicroBatch(tokens, labels, positions, cu_seqlens, padding if any(padding) else ())


@dataclass(frozen=True, kw_only=True)
class BatchSampler:
    """The micro-batches of each step, without any state: to resume is to ask for the next step.

    [Note: Global batch] Step t takes the samples [t * G, (t + 1) * G), with G = micro_num *
    data_size * micro_bsz, ordered by micro-batch, then data rank, then row. So the samples of a
    step, and their order, depend on G alone, not on how it is divided between the three.
    """

    dataset: Dataset
    micro_bsz: int
    micro_num: int

    def micro_batches(self, step: int, data_rank: int, data_size: int) -> list[MicroBatch]:
        """The `micro_num` micro-batches of `data_rank` at `step`, both counted from 0."""
        assert step >= 0
        assert 0 <= data_rank < data_size
        batches = []
        for micro in range(self.micro_num):
            index = (step * self.micro_num + micro) * data_size + data_rank  # of the whole run
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
    """The part of `data_rank` in the first `max_samples` held-out samples, always in one order.

    Every sample counts exactly once, whatever the number of ranks, and every rank gets the same
    number of micro-batches: where samples run out, rows without a label fill the place.
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
    """`fetch(step)`, with the next step's result being fetched by one thread meanwhile.

    Any step may be asked for at any time; only step + 1 comes for free. An error in the thread is
    raised to whoever asks for its step. `num_steps` ends the reading ahead.
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

    def _start(self, step: int) -> None:
        """Give `step` to the thread, in place of what it was to do next."""
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._ahead = (step, self._pool.submit(self._fetch, step))
