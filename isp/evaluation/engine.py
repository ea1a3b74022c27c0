"""`Engine`: a model over the ranks of a tensor group that reads prompts and goes on token by token.

n prompts, T their tokens, padded to a multiple of p ranks where a sequence is split; V vocabulary

    mode             prefill                           decoding
    mtp, msp, fsp    features split, as in training    the same
    isp              tokens split, weights gathered    features split as in mtp, where they can be

In isp a rank attends with the same heads as in mtp, so the cache is that of both; of the weights it
has shards that are cut in both ways: with all ranks in one weight group, 2 / p of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.attention.cached import KeyValueCache
from isp.comm import Mesh, host_memory
from isp.comm.tag import Purpose, Tag
from isp.data.batch import MicroBatch
from isp.models.build import BuiltModel
from isp.models.decoding import decoding_layout
from isp.models.model import TracedModel
from isp.parallel import Axis, ParallelConfig, Topology
from isp.weights.trace import sequential_actions

__all__ = ["Engine"]

Build = Callable[[ParallelConfig, Mesh], BuiltModel]
"""Builds a model with its weights for a layout; a collective."""


class Engine:
    """A model that reads and decodes over all ranks of a mesh, which is one tensor group."""

    def __init__(
        self,
        model: TracedModel,
        parallel: ParallelConfig,
        mesh: Mesh,
        *,
        device: torch.device,
        build: Build,
        cache: KeyValueCache,
    ) -> None:
        """`build` gives what reads prompts, and what decodes; both with `cache`.

        A collective over the ranks of `mesh`.
        """
        self.cache = cache
        self._reads = self._decodes = _Layout(build(parallel, mesh), mesh, device)
        self.decoding = decoding_layout(model, parallel)
        """The layout of decoding."""
        if self.decoding is not parallel:
            topology = Topology.create(mesh.topology.world_size, self.decoding)
            mesh = Mesh(topology, mesh.rank, log=mesh.log)
            self._decodes = _Layout(build(self.decoding, mesh), mesh, device)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], capacity: int) -> Tensor:
        """The logits [n, V] behind each prompt; what follows may make it `capacity` tokens long."""
        with self.cache.prefill([len(prompt) for prompt in prompts], capacity):
            return self.logits(prompts, [1] * len(prompts))

    @torch.inference_mode()
    def logits(self, documents: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """The logits [sum of counts, V] behind the last tokens, so many, of each document."""
        lengths = [len(document) for document in documents]
        tokens = torch.tensor([token for document in documents for token in document])
        positions = torch.cat([torch.arange(length) for length in lengths])
        ends = itertools.accumulate(lengths)
        rows = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, counts, strict=True)])
        return self._reads.logits(tokens, positions, lengths, rows=rows)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """The logits [n, V] behind one more token [n] of each document."""
        with self.cache.decode():
            positions = torch.tensor([length - 1 for length in self.cache.lengths])
            return self._decodes.logits(tokens, positions, None, rows=None)

    @torch.inference_mode()
    def losses(self, batch: MicroBatch) -> Tensor:
        """The losses of the tokens of rows that are not packed, on every rank; as the labels."""
        return self._reads.losses(batch)

    def agree(self, tokens: Tensor) -> Tensor:
        """The tokens [n] of the first rank, on all ranks; in place."""
        channel = self._decodes.mesh[Axis.TENSOR]
        return channel.broadcast_(tokens, tag=Tag(tensor="tokens")).wait()


class _Layout:
    """A model as it is split over a mesh, and what all ranks know of its logits."""

    def __init__(self, built: BuiltModel, mesh: Mesh, device: torch.device) -> None:
        (chunk,) = built.chunks
        chunk.model.eval()
        self.mesh = mesh
        self._built = built
        self._device = device
        self._chunk = chunk
        mode, tensor = mesh.topology.mode, mesh[Axis.TENSOR]
        self._sliced = mode.slices_batch and tensor.size > 1
        self._splits_logits = mode.splits_features and tensor.size > 1
        self._padded_to = tensor.size if mode.splits_sequence else 1
        """Tokens of a call are a multiple of it."""

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        lengths: Sequence[int] | None,
        rows: Tensor | None,
    ) -> Tensor:
        """The logits [n, V] of the tokens at `rows` [n] of [T], on every rank; None: of all.

        `lengths` of the documents that are packed; None: each token goes on with its own.
        """
        count, num = tokens.shape[0], tokens.shape[0] if rows is None else rows.shape[0]
        padding = -count % self._padded_to
        ends = None
        if lengths is not None and (padding or len(lengths) > 1):
            documents = [*lengths, padding] if padding else lengths
            ends = F.pad(torch.tensor(documents).cumsum(0), (1, 0)).to(torch.int32)
        rows = None if rows is None else host_memory.send(rows, self._device)

        def pick(x: Tensor) -> Tensor:
            if x.shape[1] == count + padding:
                return x[:, :num] if rows is None else x.index_select(1, rows)
            return self._joined(x, torch.arange(num, device=x.device) if rows is None else rows)

        tokens, positions = self._given(tokens[None], positions[None], padding=padding)
        logits = self._chunk.logits_of(tokens, positions, ends, pick)[:, :num]
        if self._splits_logits:
            logits = self._whole(logits)
        return logits[0]

    def losses(self, batch: MicroBatch) -> Tensor:
        """See `Engine`; by the layers of training."""
        tensor, num_tokens = self.mesh[Axis.TENSOR], batch.tokens.shape[1]
        tokens, positions, labels = self._given(
            batch.tokens, batch.positions, batch.labels, padding=-num_tokens % tensor.size
        )
        losses = self._chunk.losses(self._chunk(tokens, positions, None), labels)
        if self._sliced:
            losses = tensor.all_gather(losses, dim=1, tag=Tag(tensor="losses")).wait()
        return losses[:, :num_tokens]

    def _given(self, *rows: Tensor, padding: int) -> list[Tensor]:
        """This rank's part of rows [B, T] and their padding; one forward of them follows."""
        tensor, communicator = self.mesh[Axis.TENSOR], self._built.communicator
        if communicator is not None:  # weights that travel begin to
            communicator.begin(sequential_actions(1, training=False))
            communicator.switch_current_model_chunk(0)
        own = [F.pad(x, (0, padding)) if padding else x for x in rows]
        if self._sliced:
            own = [x.chunk(tensor.size, dim=1)[tensor.rank].contiguous() for x in own]
        return [host_memory.send(x, self._device) for x in own]

    def _joined(self, x: Tensor, rows: Tensor) -> Tensor:
        """The tokens at `rows` [n] of all T, of which x [1, T/p, F] are this rank's: [1, n, F]."""
        tensor, size = self.mesh[Axis.TENSOR], x.shape[1]
        own = rows - tensor.rank * size
        elsewhere = (own < 0) | (own >= size)
        found = x.index_select(1, own.masked_fill(elsewhere, 0))
        found = found.masked_fill(elsewhere.view(1, -1, 1), 0)
        return tensor.all_reduce(found, tag=Tag(Purpose.ACTIVATION, tensor="rows")).wait()

    def _whole(self, logits: Tensor) -> Tensor:
        """The logits [1, n, V] of which a rank has [1, n, V'], the last ones maybe fewer."""
        tensor, vocab_size = self.mesh[Axis.TENSOR], self._chunk.vocab_size
        share = -(-vocab_size // tensor.size)
        logits = F.pad(logits, (0, share - logits.shape[-1])).contiguous()
        gathered: Tensor = tensor.all_gather(
            logits, dim=2, tag=Tag(Purpose.LOGITS, tensor="logits")
        ).wait()
        return gathered[..., :vocab_size]
