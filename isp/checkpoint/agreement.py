"""Actions that succeed on all ranks or fail on all, so that no rank waits for one that failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from isp.checkpoint.plain import Plain, from_tensor, to_tensor
from isp.core.comm import Channel
from isp.core.comm.tag import Tag

__all__ = ["CheckpointError", "attempt", "attempt_first", "exchange"]

logger = logging.getLogger(__name__)


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the text says why.

    It is raised on all ranks, except after a failed upload at the end of training: on rank 0 only.
    The state of the run and earlier checkpoints are unchanged.
    """


def exchange(channel: Channel, value: Plain) -> list[Any]:
    """Gather `value` from all ranks and return the values in rank order; a collective.

    Values are sent as JSON: `torch.distributed.all_gather_object` would unpickle them.
    """
    data = to_tensor(value)
    # An all-gather needs equal lengths on all ranks: first gather the lengths, then padded values.
    length = torch.tensor([data.numel()])
    lengths = channel.all_gather(length, tag=Tag(tensor="lengths")).wait().tolist()
    padded = data.new_zeros(max(lengths))
    padded[: data.numel()] = data
    rows = channel.all_gather(padded, tag=Tag(tensor="values")).wait().view(channel.size, -1)
    return [from_tensor(row[:n]) for row, n in zip(rows, lengths, strict=True)]


def attempt(channel: Channel, what: str, act: Callable[[], Plain]) -> list[Any]:
    """Call `act` on every rank and return the results of all, in rank order; a collective.

    `what` describes the action in errors (`WHAT failed on rank 3: ..`). Raises CheckpointError on
    every rank if `act` raises on any, with these ranks and their errors.
    """
    result: Plain = None
    fault = None
    try:
        result = act()
    except CheckpointException as error:
        # torch raises this on all ranks, with the errors of the ranks that failed. Report only the
        # error of this rank, if it has one, or the text would blame every rank.
        own = error.failures.get(channel.rank)
        fault = None if own is None else _describe(own[0])
    except Exception as error:
        logger.debug("%s failed", what, exc_info=True)
        fault = _describe(error)
    answers = exchange(channel, (fault, result))
    faults = {rank: fault for rank, (fault, _) in enumerate(answers) if fault is not None}
    if faults:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in faults.items())
        raise CheckpointError(f"{what} failed on {reasons}")
    return [result for _, result in answers]


def attempt_first(channel: Channel, what: str, act: Callable[[], Plain]) -> Any:
    """Call `act` on rank 0 and return its result on all ranks; see `attempt`."""
    return attempt(channel, what, lambda: act() if channel.rank == 0 else None)[0]


def _describe(error: BaseException) -> str:
    """Return the first line of an error, after its type unless it is a CheckpointError."""
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
