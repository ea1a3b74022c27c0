"""`StepMeter`, which turns what steps did and how long they took into records."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from isp.comm import CommLog
from isp.data.batch import MicroBatch
from isp.metrics import StepRecord, peak_memory_gib, speed
from isp.train.step import StepOutcome
from model.config import ModelConfig
from model.flops import flops_per_step

__all__ = ["StepMeter", "model_flops"]


def model_flops(model: ModelConfig, batches: Iterable[MicroBatch]) -> int:
    """The FLOPs of forward and backward over `batches`, by the rule of `model.flops`."""
    lengths: list[int] = []
    for batch in batches:
        if batch.cu_seqlens is None:
            lengths += [batch.tokens.shape[1]] * batch.tokens.shape[0]
        else:
            lengths += batch.cu_seqlens.diff().tolist()
    return flops_per_step(model, lengths)


class StepMeter:
    """Counts the steps since the last record; times are means over them."""

    def __init__(
        self, log: CommLog, device: torch.device, *, num_ranks: int, peak_tflops: float | None
    ) -> None:
        self._log = log
        self._device = device
        self._num_ranks = num_ranks
        self._peak_tflops = peak_tflops
        self.restart()

    def restart(self) -> None:
        """Begin to count here; what lies before belongs to no record."""
        self._log.take()
        self._steps, self._tokens, self._flops = 0, 0, 0.0
        self._begin = time.perf_counter()

    def count(self, *, tokens: int, flops: float) -> None:
        """A step of all ranks has been done."""
        self._steps += 1
        self._tokens += tokens
        self._flops += flops

    def record(
        self, outcome: StepOutcome, *, step: int, tokens: int, lr: float, mem_gib: float
    ) -> StepRecord:
        """The record of `step`, the last one counted; `tokens` since the start of the run."""
        seconds = time.perf_counter() - self._begin
        totals = CommLog.totals(self._log.take())
        rates = speed(
            tokens=self._tokens,
            flops=self._flops,
            seconds=seconds,
            num_ranks=self._num_ranks,
            peak_tflops=self._peak_tflops,
        )
        return StepRecord(
            step=step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=lr,
            tokens=tokens,
            tgs=rates.tgs,
            tflops=rates.tflops,
            mfu=rates.mfu,
            step_ms=seconds / self._steps * 1e3,
            comm_ms=totals.comm_seconds / self._steps * 1e3,
            exposed_ms=totals.exposed_seconds / self._steps * 1e3,
            mem_gib=mem_gib,
            skipped=outcome.skipped,
        )

    def memory_gib(self) -> torch.Tensor:
        """Peak memory of this rank so far, in GiB; on its device, to be compared with others."""
        return torch.tensor(peak_memory_gib(self._device), device=self._device)
