"""The layout in which a model is read: what the command line says, or what just works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple

from isp.config import sections_from
from isp.models.decoding import decoding_layout
from isp.parallel import Mode, ParallelConfig
from isp.parallel.partition import any_of, divisors
from isp.settings.section import section

if TYPE_CHECKING:
    from isp.models.model import TracedModel

__all__ = ["InferenceLayout", "choose_layout"]


class InferenceLayout(NamedTuple):
    """How the ranks read."""

    parallel: ParallelConfig
    note: str
    """What was not as asked, in words; empty: nothing."""

    @property
    def ranks(self) -> int:
        """All of them are one tensor group."""
        return self.parallel.tensor.size

    def describe(self, model: TracedModel) -> str:
        """For people."""
        if self.ranks == 1:
            return "1 rank"
        mode, decoding = self.parallel.tensor.mode, decoding_layout(model, self.parallel)
        then = "" if decoding is self.parallel else f", decoding in {decoding.tensor.mode}"
        return f"{self.ranks} ranks, {mode}{then}"


@section("")
class _Keys:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The split over ranks."""


def choose_layout(model: TracedModel, ranks: int, overrides: Sequence[str]) -> InferenceLayout:
    """The layout of `ranks` ranks: mtp, or what `overrides` of `parallel` say.

    One rank where mtp was not asked for and does not fit the model. Raises ValueError, naming key,
    value and way out, for what cannot be.
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
        return InferenceLayout(ParallelConfig(), f"on one rank, not {ranks}: {error}")
    return InferenceLayout(parallel, "")


def _check(parallel: ParallelConfig, ranks: int) -> None:
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
