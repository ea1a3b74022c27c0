"""`StepData`: the micro-batches of each step, read by one rank of each tensor group and shared.

n micro-batches of a step, S tokens of a packed row
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from isp.checkpoint.plain import Plain
from isp.config import JobConfig
from isp.core.comm import Channel, Mesh, pinned_memory
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh import Axis, Topology
from isp.core.micro_batch import MicroBatch, document_bounds
from isp.data.batch import BatchSampler, Prefetcher, held_out_micro_batches
from isp.data.dataset import Dataset
from isp.data.mixture import MixedDataset
from isp.data.sources import Datasets, check_sources, open_datasets
from isp.data.stream import StreamDataset
from isp.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["StepData", "check_data", "open_for_rank", "share_micro_batches", "stacked"]

logger = logging.getLogger(__name__)

_TAG = Tag(Purpose.DATA, tensor="data")


def check_data(config: JobConfig) -> None:
    """Raise ValueError or FileNotFoundError for missing data; reads first lines at most."""
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer, eos_token=data.eos_token)
    _check_vocabulary(config, tokenizer)
    check_sources(data, tokenizer, objective=config.training.objective)


def open_for_rank(config: JobConfig, topology: Topology, rank: int) -> Datasets | None:
    """Open the datasets if this rank reads for its tensor group; else return None.

    Raises ValueError or FileNotFoundError if they cannot be read or do not fit the model.
    """
    if topology.index(Axis.TENSOR, rank) != 0:
        return None
    datasets = open_datasets(config.data, seed=config.training.seed)
    _check_vocabulary(config, datasets.tokenizer)
    return datasets


def _check_vocabulary(config: JobConfig, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the model has fewer embeddings than the tokenizer has entries."""
    entries = tokenizer.vocab_size
    if entries > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {entries} entries of"
            f" data.tokenizer={config.data.tokenizer}: use at least {entries}"
        )


class _Read(NamedTuple):
    """A step's micro-batches on the rank that reads them, before they are shared."""

    tensors: Tensor
    """Result of `stacked`."""
    padding: list[tuple[int, ...]]
    """`MicroBatch.padding` of each micro-batch."""


class StepData:
    """Gives the micro-batches of each step, and reads the next step ahead until it is left."""

    def __init__(
        self, config: JobConfig, datasets: Datasets | None, mesh: Mesh, device: torch.device
    ) -> None:
        self._data = config.data
        self.has_chats = datasets is not None and datasets.has_chats
        """True if this rank reads conversations."""
        self._num_micro_batches = config.data.num_micro_batches
        self._tensor: Channel = mesh[Axis.TENSOR]
        self._host = mesh.open_host(Axis.TENSOR, "tensor_host")
        self._replica: Channel = mesh[Axis.DATA]
        self._device = device
        self._valid_steps = config.validation.steps
        self._valid: list[Dataset] = []
        """Held-out data by source; empty on ranks that do not read."""
        if datasets is not None and isinstance(valid := datasets.valid, MixedDataset):
            self._valid = [part.dataset for part in valid.parts]
        elif datasets is not None and datasets.valid is not None:
            self._valid = [datasets.valid]
        self._reader: Prefetcher[_Read] | None = None
        self._places: dict[int, Plain] = {}
        """Places in the stream where the step read last and the next one begin, by step."""
        self._stream: StreamDataset | MixedDataset | None = None
        rank, size = self._replica.rank, self._replica.size
        self._samples = config.sequences(mesh.topology)
        """Number of sequences in a step, over all ranks."""
        if datasets is not None:
            if config.data.streaming:
                assert isinstance(datasets.train, StreamDataset | MixedDataset)
                self._stream = datasets.train
            sampler = BatchSampler(
                dataset=datasets.train,
                micro_bsz=config.data.micro_bsz,
                micro_num=self._num_micro_batches,
            )

            def read(step: int) -> _Read:
                """Read this data rank's micro-batches of `step`; runs in the reader's thread."""
                batches = sampler.micro_batches(step, rank, size)
                if self._stream is not None:
                    # Kept for two steps: a checkpoint after this step asks where the next begins,
                    # when the reader may have read that one too.
                    place = self._stream.tell((step + 1) * self._samples)
                    self._places = {step: self._places.get(step), step + 1: place}
                return _Read(stacked(batches, device), [batch.padding for batch in batches])

            self._reader = Prefetcher(read, num_steps=config.training.steps)

    def tell(self, step: int) -> Plain:
        """Return the place in the stream where `step` begins, to be saved in checkpoints.

        Returns None without a stream, and on ranks that have not read the step before.
        """
        return self._places.get(step)

    def seek(self, step: int, place: Any) -> None:
        """Begin `step`, the first one that is read, at a `place` that `tell` returned.

        None, with a warning, is the beginning of each source.
        """
        if self._stream is None or step == 0:
            return
        if place is None:
            logger.warning(
                "step %d begins at the beginning of data.source, as data.streaming_restart allows",
                step + 1,
            )
            place = self._stream.tell(0)
        self._stream.seek(step * self._samples, place)

    def training(self, step: int) -> list[MicroBatch]:
        """Return the `micro_num` micro-batches of `step`, counted from 0.

        Only ranks that read have `MicroBatch.padding`; it is empty on others.
        """
        if self._reader is None:  # another rank of the tensor group reads
            return self._share(None, self._num_micro_batches)
        read = self._reader.get(step)
        batches = self._share(read.tensors, self._num_micro_batches)
        return [replace(b, padding=rows) for b, rows in zip(batches, read.padding, strict=True)]

    def validation(self, source: int) -> Iterator[list[MicroBatch]]:
        """Yield held-out micro-batches of one of `data.valid_parts`, at most `micro_num` at a time.

        They are the same each time and do not depend on other sources. `validation.steps` counts
        global batches, so which samples are used depends only on the global batch size.
        """
        data, ranks = self._data, self._replica
        read: Iterator[MicroBatch] = iter(())
        if self._valid:
            read = held_out_micro_batches(
                self._valid[source],
                micro_bsz=data.micro_bsz,
                data_rank=ranks.rank,
                data_size=ranks.size,
                max_samples=self._valid_steps * self._samples,
            )
        while True:
            batches = list(islice(read, self._num_micro_batches))
            shared = torch.tensor([len(batches)])  # ranks that do not read do not know the end
            self._host.broadcast_(shared, tag=_TAG).wait()
            if (count := int(shared.item())) == 0:
                return
            yield self._share(stacked(batches, self._device) if batches else None, count)

    def _share(self, read: Tensor | None, count: int) -> list[MicroBatch]:
        """Return `count` micro-batches on each rank of the tensor group; see the function."""
        data = self._data
        rows = (1, data.micro_bsz * data.seq_len) if data.pack else (data.micro_bsz, data.seq_len)
        return share_micro_batches(
            read,
            shape=rows,
            micro_num=count,
            packed=data.pack,
            tensor=self._tensor,
            host=self._host,
            device=self._device,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()


def stacked(batches: Sequence[MicroBatch], device: torch.device) -> Tensor:
    """Stack tokens, labels and positions to int64 [n, 3, rows, tokens], pinned for CUDA."""
    fields = [torch.stack((b.tokens, b.labels, b.positions)) for b in batches]
    return pinned_memory.pinned(torch.stack(fields), device)


def share_micro_batches(
    read: Tensor | None,
    *,
    shape: tuple[int, int],
    micro_num: int,
    packed: bool,
    tensor: Channel,
    host: Channel,
    device: torch.device,
) -> list[MicroBatch]:
    """Return the micro-batches of a step on all ranks of a tensor group, by one broadcast.

    `read` is the result of `stacked` on the group's first rank, None on others; each micro-batch
    has `shape` (rows, tokens). On CUDA the bounds of documents, which are needed in host memory,
    are sent separately over `host`, a channel of the same ranks for CPU tensors.
    """
    if read is None:
        payload = torch.empty(micro_num, 3, *shape, dtype=torch.int64, device=device)
    else:
        payload = pinned_memory.send(read, device)
    tensor.broadcast_(payload, tag=_TAG).wait()
    starts = _starts(payload, read, host) if packed else ()
    bounds = map(document_bounds, starts) if packed else [None] * micro_num
    rows = zip(*payload.unbind(1), bounds, strict=True)
    return [MicroBatch(*of_one) for of_one in rows]


def _starts(payload: Tensor, read: Tensor | None, host: Channel) -> Tensor:
    """Return which tokens begin a document (position 0): bool [n, S], in host memory."""
    if payload.device.type == "cpu":
        return payload[:, 2, 0] == 0
    num_rows, num_tokens = payload.shape[0], payload.shape[-1]
    bits = torch.empty(num_rows, -(-num_tokens // 8), dtype=torch.uint8)  # one bit for each token
    if read is not None:
        bits = torch.from_numpy(np.packbits(read[:, 2, 0].numpy() == 0, axis=1))
    host.broadcast_(bits, tag=_TAG).wait()
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=num_tokens)).bool()
