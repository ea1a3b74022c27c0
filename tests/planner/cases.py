"""Plans of the runs in `tests.train.runs`, and counts of their transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from isp.core.comm import Mesh
from isp.core.comm.transfer_log import CommLog
from isp.core.mesh import Axis
from isp.core.micro_batch import MicroBatch
from isp.planner.case import PlanCase
from isp.train.data import share_micro_batches, stacked
from model.config import ModelConfig
from tests.train.runs import SEQ_LEN, Layout

__all__ = ["Counts", "counted", "plan_case", "share"]

CPU = torch.device("cpu")
Counts = dict[tuple[str, str], tuple[int, int]]
"""Calls and sent bytes by kind and channel, in the format of `traffic`."""


def plan_case(
    layout: Layout,
    model: ModelConfig,
    dtype: Any = "float32",
    *,
    tokens: int = SEQ_LEN,
    **more: Any,
) -> PlanCase:
    """Return the case of a CPU step of `model` in `layout`: one row, or as `more` says."""
    return PlanCase(
        model=model,
        parallel=layout.parallel,
        topology=layout.topology(),
        tokens=tokens,
        micro_num=layout.micro,
        dtype=dtype,
        **{"rows": 1, "on_cpu": True, **more},
    )


def counted(log: CommLog) -> Counts:
    """Return the number of each transfer in `log`, and clear the log."""
    calls, sent = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for transfer in log.take():
        calls[transfer.kind, transfer.channel] += 1
        sent[transfer.kind, transfer.channel] += transfer.sent_bytes
    return {key: (calls[key], sent[key]) for key in calls}


def share(batches: Sequence[MicroBatch], mesh: Mesh) -> None:
    """Send the micro-batches of a step to the ranks of a sequence, as a run does."""
    tensor = mesh[Axis.TENSOR]
    rows, tokens = batches[0].tokens.shape
    share_micro_batches(
        stacked(batches, CPU) if tensor.rank == 0 else None,
        shape=(rows, tokens),
        micro_num=len(batches),
        packed=batches[0].cu_seqlens is not None,
        tensor=tensor,
        host=tensor,
        device=CPU,
    )
