"""Balance of attention over context ranks, as text for the log."""

from __future__ import annotations

from collections.abc import Iterable

from isp.config import JobConfig
from isp.core.attention.sequence import SequenceRanks
from isp.core.mesh.sequence_split import SequenceSplit
from isp.core.micro_batch import MicroBatch
from isp.step.job_models import trained_model

__all__ = ["ContextBalance", "balance_text"]


def balance_text(config: JobConfig) -> str:
    """Return a sentence about the imbalance of a row that is full of `seq_len`-token documents.

    The imbalance is how much more the busiest context rank attends to than the mean of the ranks.
    Returns "" without context ranks.
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
    """Mean and largest imbalance of attention over the rows that this tensor group has computed."""

    def __init__(self, ranks: SequenceRanks) -> None:
        self._ranks = ranks
        self._rows = 0
        self._sum = self._worst = 0.0
        """Sum and maximum, over all rows so far, of the imbalance of a row's split over ranks."""

    def count(self, batches: Iterable[MicroBatch]) -> None:
        """Add the imbalance of each row of a step's micro-batches to the sum and the maximum."""
        for batch in batches:
            lengths = self._ranks.lengths(batch.tokens, batch.cu_seqlens)
            imbalance = self._ranks.split(lengths).imbalance  # the forward has cached it
            self._rows += 1
            self._sum += imbalance
            self._worst = max(self._worst, imbalance)

    def __str__(self) -> str:
        """Return a sentence with the mean and the largest imbalance; "" before the first row."""
        if not self._rows:
            return ""
        return (
            f"the busiest of {self._ranks.context.size} context ranks attends to"
            f" {self._sum / self._rows:.1%} more than the mean, at worst {self._worst:.1%}, in"
            f" {self._rows:,} row{'s' if self._rows > 1 else ''}"
        )
