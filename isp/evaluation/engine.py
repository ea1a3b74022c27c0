"""`Engine`: computes logits and losses of a model on ranks that form one tensor group.

It runs the forward of training, without backward.

B rows, T tokens in a row (in all documents together, if packed), n tokens asked for, F features,
V vocabulary; /p = over the p ranks of the group
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
    """The split of the model over ranks for an evaluation."""

    parallel: ParallelConfig
    note: str
    """Sentence on how the layout differs from the requested one, and why; "" if it does not."""

    @property
    def ranks(self) -> int:
        """Number of ranks, which all form one tensor group."""
        return self.parallel.tensor.size

    def describe(self) -> str:
        """Return the number of ranks and the mode in words, such as `4 ranks, mtp`."""
        return "1 rank" if self.ranks == 1 else f"{self.ranks} ranks, {self.parallel.tensor.mode}"


@section("")
class _Keys:
    """Sections of the configuration that an evaluation accepts on its command line."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The split over ranks."""


def choose_layout(model: TracedModel, ranks: int, overrides: Sequence[str]) -> EvaluationLayout:
    """Return the layout for an evaluation on `ranks` ranks: mtp mode, unless `overrides` change it.

    `overrides` are keys of `parallel`, from the command line. If mtp mode does not fit the model
    and was not requested, one rank is used. Raises ValueError for overrides that an evaluation does
    not support, with key, value and remedy.
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
    """Raise ValueError for keys of `parallel` that an evaluation does not support."""
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
    """Computes logits and losses with a built model; every rank of `mesh` gets the results.

    The ranks have to form one tensor group. Both methods are collectives over them.
    """

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
        """The number of tokens in a forward of `logits` is padded to a multiple of this."""

    @torch.inference_mode()
    def logits(self, documents: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Return the logits [n, V] of the last `counts[i]` tokens of each document i.

        n is the sum of `counts`. Documents are packed into one row.
        """
        lengths = [len(document) for document in documents]
        tokens = torch.tensor([token for document in documents for token in document])
        positions = torch.cat([torch.arange(length) for length in lengths])
        ends = itertools.accumulate(lengths)
        asked = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, counts, strict=True)])
        # Padding is a document of its own, so no other document attends to it.
        padding = -len(tokens) % self._padded_to
        bounds = None
        if padding or len(lengths) > 1:
            packed = torch.tensor([*lengths, padding] if padding else lengths)
            bounds = F.pad(packed.cumsum(0), (1, 0)).to(torch.int32)
        num, rows = len(tokens) + padding, pinned_memory.send(asked, self._device)

        # Pick tokens before the head: logits of all T tokens may not fit into memory.
        def pick(x: Tensor) -> Tensor:
            return x.index_select(1, rows) if x.shape[1] == num else self._joined(x, rows)

        x, positions = self._given(tokens[None], positions[None], padding=padding)
        # In msp the head gathers the tokens of all ranks along the sequence. After `pick` all have
        # the same n tokens, so the result has p copies: keep one.
        logits = self._chunk.logits_of(x, positions, bounds, pick)[:, : len(asked)]
        return (self._whole(logits) if self._splits_logits else logits)[0]

    @torch.inference_mode()
    def losses(self, batch: MicroBatch) -> Tensor:
        """Return the loss of each label [B, T] of rows that are not packed, in nats."""
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
        """Begin a forward: return this rank's part of each of `rows` [B, T], on the device.

        Rows get `padding` more tokens, and are [B, T/p] if ranks have parts of the sequence.
        """
        tensor, communicator = self.mesh[Axis.TENSOR], self._built.communicator
        # Every forward has a plan of its own, which starts the gathers of its first weights.
        if communicator is not None:
            communicator.begin(sequential_actions(1, training=False))
            communicator.switch_current_model_chunk(0)
        own = [F.pad(x, (0, padding)) if padding else x for x in rows]
        if self._sliced:
            own = [x.chunk(tensor.size, dim=1)[tensor.rank].contiguous() for x in own]
        return [pinned_memory.send(x, self._device) for x in own]

    def _joined(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the hidden states [1, n, F] of the tokens with indices `rows` [n].

        `x` [1, T/p, F] is this rank's part of the sequence. The result is an all-reduce, to which a
        rank contributes zeros for tokens that other ranks have, so the sum is exact.
        """
        tensor, size = self.mesh[Axis.TENSOR], x.shape[1]
        own = rows - tensor.rank * size
        elsewhere = (own < 0) | (own >= size)
        # For tokens of other ranks, select any valid index first and zero the result after.
        found = x.index_select(1, own.masked_fill(elsewhere, 0))
        found = found.masked_fill(elsewhere.view(1, -1, 1), 0)
        return tensor.all_reduce(found, tag=Tag(Purpose.ACTIVATION, tensor="rows")).wait()

    def _whole(self, logits: Tensor) -> Tensor:
        """Return all logits [1, n, V], gathered from the ranks' shares of the vocabulary.

        `logits` is this rank's share, [1, n, ceil(V / p)]; the last rank's may be narrower.
        """
        tensor, vocab_size = self.mesh[Axis.TENSOR], self._chunk.vocab_size
        share = -(-vocab_size // tensor.size)
        # An all-gather needs equal shapes: pad the last share, and cut the padding off below.
        logits = F.pad(logits, (0, share - logits.shape[-1])).contiguous()
        gathered: Tensor = tensor.all_gather(
            logits, dim=2, tag=Tag(Purpose.LOGITS, tensor="logits")
        ).wait()
        return gathered[..., :vocab_size]
