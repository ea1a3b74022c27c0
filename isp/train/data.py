"""`StepData`: the micro-batches of each step, read by one rank of each tensor group and broadcast.

n micro-batches in a step, S tokens in a packed row
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
    """Check that the data and the tokenizer of `config` exist and fit each other and the model.

    Reads the first lines of files at most. Raises ValueError or FileNotFoundError.
    """
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer, eos_token=data.eos_token)
    _check_vocabulary(config, tokenizer)
    check_sources(data, tokenizer, objective=config.training.objective)


def open_for_rank(config: JobConfig, topology: Topology, rank: int) -> Datasets | None:
    """Open the datasets on the first rank of each tensor group; return None on other ranks.

    Raises ValueError or FileNotFoundError if they cannot be read or do not fit the model.
    """
    if topology.index(Axis.TENSOR, rank) != 0:
        return None
    datasets = open_datasets(config.data, seed=config.training.seed)
    _check_vocabulary(config, datasets.tokenizer)
    return datasets


def _check_vocabulary(config: JobConfig, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the model has fewer embeddings than the tokenizer has token ids."""
    entries = tokenizer.vocab_size
    if entries > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {entries} entries of"
            f" data.tokenizer={config.data.tokenizer}: use at least {entries}"
        )


class _Read(NamedTuple):
    """A step's micro-batches on the rank that reads them, before the broadcast."""

    tensors: Tensor
    """Tokens, labels and positions, as `stacked` returns them: int64 [n, 3, rows, tokens]."""
    padding: list[tuple[int, ...]]
    """For each micro-batch, the number of padding tokens of each row (`MicroBatch.padding`)."""


class StepData:
    """Reader of a run's data: the micro-batches of each step, and of evaluations.

    One rank of each tensor group reads, in a thread that is one step ahead, and broadcasts to the
    others. Leaving the object as a context stops the thread.
    """

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
        """Places in the stream where steps begin, for the step read last and the next one."""
        self._stream: StreamDataset | MixedDataset | None = None
        data_rank, data_size = self._replica.rank, self._replica.size
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
                batches = sampler.micro_batches(step, data_rank, data_size)
                if self._stream is not None:
                    # Keep two steps: a checkpoint saved after this step needs the place where the
                    # next step begins, and the reader may have read that step already.
                    place = self._stream.tell((step + 1) * self._samples)
                    self._places = {step: self._places.get(step), step + 1: place}
                return _Read(stacked(batches, device), [batch.padding for batch in batches])

            self._reader = Prefetcher(read, num_steps=config.training.steps)

    def tell(self, step: int) -> Plain:
        """Return the place in the stream where `step` begins, for a checkpoint.

        Returns None without a stream, on ranks that do not read, and unless the step before `step`
        has been read.
        """
        return self._places.get(step)

    def seek(self, step: int, place: Any) -> None:
        """Set where in the stream the run's first step, `step`, is read from.

        `place` is a result of `tell`. None means the beginning of each source, with a warning.
        Without a stream it does nothing.
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
        """Return the `micro_num` micro-batches of `step`, counted from 0; a collective.

        Only ranks that read have `MicroBatch.padding`; it is empty on others.
        """
        if self._reader is None:  # another rank of the tensor group reads
            return self._share(None, self._num_micro_batches)
        read = self._reader.get(step)
        batches = self._share(read.tensors, self._num_micro_batches)
        return [replace(b, padding=rows) for b, rows in zip(batches, read.padding, strict=True)]

    def validation(self, source: int) -> Iterator[list[MicroBatch]]:
        """Yield held-out micro-batches of `data.valid_parts[source]`, up to `micro_num` at a time.

        They are the same each time and do not depend on other sources. `validation.steps` counts
        global batches, so the samples depend on the global batch size and not on the layout. Each
        item is a collective over the tensor group.
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
            # Only ranks that read know where the data ends: send the count, or others would wait
            # for micro-batches that never come.
            num_batches = torch.tensor([len(batches)])
            self._host.broadcast_(num_batches, tag=_TAG).wait()
            if (count := int(num_batches.item())) == 0:
                return
            yield self._share(stacked(batches, self._device) if batches else None, count)

    def _share(self, read: Tensor | None, count: int) -> list[MicroBatch]:
        """Return `count` micro-batches on each rank of the tensor group: `share_micro_batches`."""
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
    """Broadcast the micro-batches of a step to all ranks of a tensor group, and return them.

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
    # unbind: tokens, labels and positions, each [n, rows, tokens].
    fields = zip(*payload.unbind(1), bounds, strict=True)
    return [MicroBatch(*of_one) for of_one in fields]


def _starts(payload: Tensor, read: Tensor | None, host: Channel) -> Tensor:
    """Return a mask of the tokens that begin a document (position 0): bool [n, S], in host memory.

    `payload` is [n, 3, 1, S] on the device, after the broadcast; `read` is the same in host memory
    on the rank that read it, else None.
    """
    if payload.device.type == "cpu":
        return payload[:, 2, 0] == 0  # positions of the single packed row
    # On CUDA, a copy of the payload back to the host would wait for all work on the device. So the
    # mask is made from `read` and broadcast between hosts, at one bit a token.
    num_rows, num_tokens = payload.shape[0], payload.shape[-1]
    bits = torch.empty(num_rows, -(-num_tokens // 8), dtype=torch.uint8)
    if read is not None:
        bits = torch.from_numpy(np.packbits(read[:, 2, 0].numpy() == 0, axis=1))
    host.broadcast_(bits, tag=_TAG).wait()
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=num_tokens)).bool()
