"""`Engine`: logits and losses of a model on the ranks of one tensor group.

It runs the forward of training. n documents of T tokens in all, padded to a multiple of p ranks
where a sequence is split; V vocabulary
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.config import sections_from
from isp.core.comm import Mesh, pinned_memory
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.token_results import TokenLossRules
from isp.core.mesh import Axis, Mode, ParallelConfig
from isp.core.mesh.partition import any_of, divisors
from isp.core.micro_batch import MicroBatch
from isp.core.section import section
from isp.core.weights.uses import sequential_actions
from isp.models.build import BuiltModel
from isp.models.traced_model import TracedModel

__all__ = ["Engine", "EvaluationLayout", "choose_layout"]


class EvaluationLayout(NamedTuple):
    """How the ranks split the model for an evaluation."""

    parallel: ParallelConfig
    note: str
    """A sentence on how the layout differs from the requested one; empty if it does not."""

    @property
    def ranks(self) -> int:
        """The number of ranks, all of which form one tensor group."""
        return self.parallel.tensor.size

    def describe(self) -> str:
        """Return the layout in words."""
        return "1 rank" if self.ranks == 1 else f"{self.ranks} ranks, {self.parallel.tensor.mode}"


@section("")
class _Keys:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The split over ranks."""


def choose_layout(model: TracedModel, ranks: int, overrides: Sequence[str]) -> EvaluationLayout:
    """Return the layout of `ranks` ranks: mtp mode, or as `overrides` of `parallel` say.

    Falls back to one rank if mtp mode does not fit the model and was not requested. Raises
    ValueError for overrides that an evaluation does not support, with key, value and remedy.
    """
    mode = Mode.MTP if ranks > 1 else Mode.ISP
    defaults = {"tensor": {"size": ranks, "mode": mode}, "weight": {"size": ranks}}
    parallel = sections_from(_Keys, overrides, {"parallel": defaults}).parallel
    _check(parallel, ranks)
    try:
        model.check_layout(parallel, parallel.tensor.size)
    except ValueError as error:
        if any(word.startswith("--parallel.tensor.mode") for word in overrides):
            raise
        return EvaluationLayout(ParallelConfig(), f"on one rank, not {ranks}: {error}")
    return EvaluationLayout(parallel, "")


def _check(parallel: ParallelConfig, ranks: int) -> None:
    """Raise ValueError for keys that an evaluation does not support."""
    tensor, weight = parallel.tensor, parallel.weight
    if tensor.size != ranks:
        raise ValueError(
            f"parallel.tensor.size={tensor.size}: all {ranks} ranks work on the same text: leave it"
            f" out, or use --nproc {tensor.size}"
        )
    if ranks % weight.size:
        raise ValueError(
            f"parallel.weight.size={weight.size} must divide the {ranks} ranks: use"
            f" {any_of(divisors(ranks))}"
        )
    for key, value, supported in (
        ("pipeline.size", parallel.pipeline.size, 1),
        ("sequence_2D.enable", parallel.sequence_2D.enable, False),
        ("weight.vocab_parallel_loss", weight.vocab_parallel_loss, False),
    ):
        if value != supported:
            raise ValueError(
                f"parallel.{key}={value} is for training: leave it out; checkpoints of any layout"
                f" are read"
            )


class Engine:
    """A model that gives logits and losses on all ranks of a mesh, which is one tensor group."""

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
        """Tokens of a forward are padded to a multiple of this."""

    @torch.inference_mode()
    def logits(self, documents: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Return the logits [sum of counts, V] of the last `counts` tokens of each document.

        Documents are packed into one row. All ranks get the result.
        """
        lengths = [len(document) for document in documents]
        tokens = torch.tensor([token for document in documents for token in document])
        positions = torch.cat([torch.arange(length) for length in lengths])
        ends = itertools.accumulate(lengths)
        asked = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, counts, strict=True)])
        # Padding is a document of its own, so that it cannot change the others.
        padding = -len(tokens) % self._padded_to
        bounds = None
        if padding or len(lengths) > 1:
            packed = torch.tensor([*lengths, padding] if padding else lengths)
            bounds = F.pad(packed.cumsum(0), (1, 0)).to(torch.int32)
        num, rows = len(tokens) + padding, pinned_memory.send(asked, self._device)

        def pick(x: Tensor) -> Tensor:
            return x.index_select(1, rows) if x.shape[1] == num else self._joined(x, rows)

        x, positions = self._given(tokens[None], positions[None], padding=padding)
        # A head that gathers tokens (msp) gathers the same ones of each rank: one copy counts.
        logits = self._chunk.logits_of(x, positions, bounds, pick)[:, : len(asked)]
        return (self._whole(logits) if self._splits_logits else logits)[0]

    @torch.inference_mode()
    def losses(self, batch: MicroBatch) -> Tensor:
        """Return the losses of rows that are not packed, on every rank; shape of the labels."""
        tensor, num_tokens = self.mesh[Axis.TENSOR], batch.tokens.shape[1]
        tokens, positions, labels = self._given(
            batch.tokens, batch.positions, batch.labels, padding=-num_tokens % tensor.size
        )
        output = self._chunk(tokens, positions, None)
        losses = self._chunk.results(output, labels, TokenLossRules()).squeeze(-1)
        if self._sliced:
            losses = tensor.all_gather(losses, dim=1, tag=Tag(tensor="losses")).wait()
        return losses[:, :num_tokens]

    def _given(self, *rows: Tensor, padding: int) -> list[Tensor]:
        """Return this rank's part of rows [B, T], padded and on the device, for one forward."""
        tensor, communicator = self.mesh[Axis.TENSOR], self._built.communicator
        if communicator is not None:  # start the gathers of this forward
            communicator.begin(sequential_actions(1, training=False))
            communicator.switch_current_model_chunk(0)
        own = [F.pad(x, (0, padding)) if padding else x for x in rows]
        if self._sliced:
            own = [x.chunk(tensor.size, dim=1)[tensor.rank].contiguous() for x in own]
        return [pinned_memory.send(x, self._device) for x in own]

    def _joined(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return tokens `rows` [n] of all T from the slices x [1, T/p, F] of the ranks: [1, n, F].

        A rank contributes its own tokens and zeros for those of others, so the sum is exact.
        """
        tensor, size = self.mesh[Axis.TENSOR], x.shape[1]
        own = rows - tensor.rank * size
        elsewhere = (own < 0) | (own >= size)
        found = x.index_select(1, own.masked_fill(elsewhere, 0))
        found = found.masked_fill(elsewhere.view(1, -1, 1), 0)
        return tensor.all_reduce(found, tag=Tag(Purpose.ACTIVATION, tensor="rows")).wait()

    def _whole(self, logits: Tensor) -> Tensor:
        """Return the logits [1, n, V] from the ranks' parts [1, n, V'], of which the last may be
        narrower."""
        tensor, vocab_size = self.mesh[Axis.TENSOR], self._chunk.vocab_size
        share = -(-vocab_size // tensor.size)
        logits = F.pad(logits, (0, share - logits.shape[-1])).contiguous()
        gathered: Tensor = tensor.all_gather(
            logits, dim=2, tag=Tag(Purpose.LOGITS, tensor="logits")
        ).wait()
        return gathered[..., :vocab_size]
