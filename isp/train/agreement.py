"""What the ranks tell each other between steps, in one all-reduce each time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from isp.comm import Channel
from isp.comm.cargo import Cargo

__all__ = ["StepFacts", "agree", "any_asked"]

_METRICS = Cargo(tensor="metrics")


class StepFacts(NamedTuple):
    """The same on all ranks."""

    asked: bool
    """Whether any rank was asked to stop."""
    late: bool
    """Whether any rank has no time for another step."""
    flops: float
    """Of the global batch."""
    own_seconds: list[float]
    """By rank: what the step took without waiting for others."""


def agree(host: Channel, *, asked: bool, late: bool, flops: float, own_seconds: float) -> StepFacts:
    """The facts of all ranks of `host`, from each rank's own; `flops` are added up."""
    facts = torch.zeros(3 + host.size, dtype=torch.float64)
    facts[:3] = torch.tensor([asked, late, flops], dtype=torch.float64)
    facts[3 + host.rank] = own_seconds
    host.all_reduce_(facts, cargo=_METRICS).wait()
    num_asked, num_late, total, *by_rank = facts.tolist()
    return StepFacts(num_asked > 0, num_late > 0, total, by_rank)


def any_asked(host: Channel, asked: bool) -> bool:
    """Whether any rank of `host` was asked to stop."""
    return bool(host.all_reduce_(torch.tensor([asked]).int(), op="max", cargo=_METRICS).wait())
