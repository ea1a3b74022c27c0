"""Rows that differ within a tensor group, which no loss reveals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import isp
from isp.config import JobConfig
from isp.core.mesh.config import PipelineConfig
from isp.loop.parallel_run import ParallelRun
from isp.loop.token_query import TokenScores
from tests.host_syncs import HostSyncs
from tests.loop.test_loops import raised
from tests.models.models import (
    VOCAB,
    Rows,
    assert_trained_as,
    job,
    tiny,
    trained,
    trained_plainly,
)
from tests.ranks import run_ranks

LENGTH = 24
IDS = torch.randint(3, VOCAB - 3, (4, LENGTH), generator=torch.Generator().manual_seed(0))
DATA = [Rows(IDS)] * 2
SAID = "input_ids, labels, position_ids, attention_mask and pick on all ranks of a tensor group"


def _sampled(run: ParallelRun, rank: int) -> Any:
    return run.loss(IDS[rank : rank + 1])  # as with DistributedSampler(data) without the data ranks


def _evaluated(run: ParallelRun, rank: int) -> Any:
    with torch.no_grad():
        return _sampled(run, rank)


def _one_label(run: ParallelRun, rank: int) -> Any:
    labels = IDS.clone()
    labels[2, 5] += rank
    return run.loss(IDS, labels)


def _other_documents(run: ParallelRun, rank: int) -> Any:
    positions = torch.arange(LENGTH).expand(4, LENGTH).clone()
    positions[:, 9 + rank :] -= 9 + rank
    return run.loss(IDS, None, positions)


def _other_lengths(run: ParallelRun, rank: int) -> Any:
    return run.loss(IDS[:, : 8 + 4 * rank])


def _swapped(run: ParallelRun, rank: int) -> Any:
    return run.log_probs(IDS.roll(rank, 0)).log_probs


def _other_pick(run: ParallelRun, rank: int) -> Any:
    return run.logits(IDS, (IDS + rank).unsqueeze(-1) % VOCAB)


def _other_mask(run: ParallelRun, rank: int) -> Any:
    mask = torch.ones_like(IDS)
    mask[1, LENGTH - rank :] = 0
    return run.hidden(IDS, attention_mask=mask)


def _sum(scores: TokenScores, _: Mapping[str, Any]) -> Tensor:
    return scores.log_probs.sum()


def _micro_batches(run: ParallelRun, rank: int) -> Any:
    """Run micro-batches of which the second differs between ranks."""
    batches = [{"input_ids": IDS}, {"input_ids": IDS.roll(rank)}]
    return run.forward_backward(batches, _sum)


DIFFERENT = [
    *(_sampled, _evaluated, _one_label, _other_documents, _other_lengths, _swapped, _other_pick),
    *(_other_mask, _micro_batches),
]


def _errors(rank: int, _: None) -> Any:
    """Return the errors of all calls in DIFFERENT, raised in the first step and later, and the
    results.
    """
    run, said = isp.parallelize(tiny("llama"), job(2, 2)), {}

    def go_wrong(run: ParallelRun, _: Rows) -> None:
        said.update({f"{call.__name__}": raised(call, run, rank) for call in DIFFERENT})

    found = trained(run, DATA, go_wrong)
    assert run.loss(IDS[rank // 2].unsqueeze(0)).isfinite()  # data ranks may have different rows
    return said, found


def test_different_rows_in_a_tensor_group_are_an_error_on_all_ranks() -> None:
    """Catches a loss of parts of several sequences, in each call that takes rows."""
    expected = trained_plainly(tiny("llama"), DATA)
    for rank, (said, found) in enumerate(run_ranks(4, _errors, None)):
        assert_trained_as(expected, [found])
        assert said.keys() == {call.__name__ for call in DIFFERENT}
        for name, text in said.items():
            assert SAID in text, name
            assert "num_replicas=run.dp_size, rank=run.dp_rank" in text
            assert f"rank {rank // 2 * 2 + 1} than rank {rank // 2 * 2}" in text, name


def _staged(rank: int, config: JobConfig) -> str:
    """Return the error for rows that differ, as from a loader on the first stage only."""
    run = isp.parallelize(tiny("llama"), config)
    return raised(run.forward_backward, [{"input_ids": IDS.roll(rank)}] * 2, _sum)


def _read_late(rank: int, config: JobConfig) -> str:
    """Return the error for rows that the host has not compared before the step, as on CUDA."""
    run = isp.parallelize(tiny("llama"), config)
    with HostSyncs() as guard:
        guard.of_host(IDS)
        run.step(run.loss(IDS, IDS))
        before = [p.detach().clone() for p in run.model.parameters()]
        guard.take()
        loss = run.loss(IDS, IDS + rank)
        assert guard.take() == []
        said = raised(run.step, loss)
        assert SAID in said
        with torch.no_grad():
            run.log_probs(IDS.roll(rank))
            assert SAID in raised(run.log_probs, IDS)
            assert SAID in raised(run.loss, IDS + rank)
    for parameter, value in zip(run.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    return said


def test_different_rows_of_stages_and_late_reads_are_found() -> None:
    """Catches stages with other rows, and an update by gradients of rows that differed."""
    stages = replace(job().parallel, pipeline=PipelineConfig(size=2))
    staged = replace(job(), parallel=stages, data=replace(job().data, micro_num=2))
    for call, config in ((_staged, staged), (_read_late, job(2, 2))):
        for text in run_ranks(2, call, config):
            assert "(rank 1 than rank 0)" in text
