"""Sentences on how evenly attention is split over context ranks."""

from __future__ import annotations

from collections.abc import Iterable

from isp.config import JobConfig
from isp.core.attention.sequence import SequenceRanks
from isp.core.mesh.sequence_split import SequenceSplit
from isp.core.micro_batch import MicroBatch
from isp.step.job_models import trained_model

__all__ = ["ContextBalance", "balance_text"]


def balance_text(config: JobConfig) -> str:
    """Return a sentence on the imbalance of a full row, with documents of `seq_len` tokens.

    Empty without context ranks.
    """
    ranks = config.topology(config.parallel.least_ranks).context
    if ranks == 1:
        return ""
    data, windows = config.data, trained_model(config).attention_windows
    lengths = (data.seq_len,) * (data.micro_bsz if data.pack else 1)
    plan = (
        SequenceSplit.of(lengths, ranks, windows) if windows else SequenceSplit.of(lengths, ranks)
    )
    return (
        f"the busiest of {ranks} context ranks attends to {plan.imbalance:.1%} more than the mean,"
        f" in a row of {len(lengths)} x {data.seq_len:,} tokens"
    )


class ContextBalance:
    """The imbalance of attention over the rows that this rank's sequence group has computed."""

    def __init__(self, ranks: SequenceRanks) -> None:
        self._ranks = ranks
        self._rows = 0
        self._sum = self._worst = 0.0
        """Sum and maximum of the rows' imbalance."""

    def count(self, batches: Iterable[MicroBatch]) -> None:
        """Add the rows of a step, whose splits are cached."""
        for batch in batches:
            lengths = self._ranks.lengths(batch.tokens, batch.cu_seqlens)
            imbalance = self._ranks.split(lengths).imbalance
            self._rows += 1
            self._sum += imbalance
            self._worst = max(self._worst, imbalance)

    def __str__(self) -> str:
        """Return mean and largest imbalance in a sentence; empty before the first row."""
        if not self._rows:
            return ""
        return (
            f"the busiest of {self._ranks.context.size} context ranks attends to"
            f" {self._sum / self._rows:.1%} more than the mean, at worst {self._worst:.1%}, in"
            f" {self._rows:,} row{'s' if self._rows > 1 else ''}"
        )
