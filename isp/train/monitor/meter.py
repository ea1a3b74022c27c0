"""`StepMeter` makes the records of steps; `StepOutputs` writes them to files and trackers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any, Self

import torch

from isp.checkpoint.agreement import attempt_first
from isp.config import JobConfig
from isp.core.comm import Channel, CommLog
from isp.core.comm.transfer_log import TimedTransfer
from isp.core.mesh.phase import Phase
from isp.core.micro_batch import MicroBatch
from isp.metrics import (
    MetricsFile,
    ProgressBar,
    StepRecord,
    Trackers,
    is_recorded,
    watched_stream,
)
from isp.models.traced_model import TracedModel
from isp.step.phases import PhaseClock, PhaseTimes, training_seconds
from isp.step.train_step import StepOutcome
from isp.train.folder.run_folder import RunFolder
from isp.train.monitor.trackers import run_trackers

__all__ = ["StepMeter", "StepOutputs", "evaluation_is_due", "model_flops"]


def evaluation_is_due(config: JobConfig, step: int) -> bool:
    """Return True if an evaluation follows `step`: each `validation.freq` steps and at the end."""
    freq = config.validation.freq
    return freq > 0 and (step % freq == 0 or step == config.training.steps)


def model_flops(model: TracedModel, batches: Iterable[MicroBatch]) -> int:
    """Return the FLOPs of forward and backward over the documents of `batches`.

    They follow the model's rule (`TracedModel.flops`).
    """
    return model.flops([length for batch in batches for length in batch.document_lengths])


class StepMeter:
    """Adds up times, tokens and FLOPs of the steps since the last record.

    A record has means over these steps. The time of evaluations and checkpoints, transfers
    included, does not count as time of steps.
    """

    def __init__(
        self,
        log: CommLog,
        clock: PhaseClock,
        device: torch.device,
        *,
        num_ranks: int,
        peak_tflops: float | None,
    ) -> None:
        self._log = log
        self._clock = clock
        self._device = device
        self._num_ranks = num_ranks
        self._peak_tflops = peak_tflops
        self.own_seconds = 0.0
        """Seconds of this rank's last step, without waits for other ranks."""
        self.last_transfers: list[TimedTransfer] = []
        """All transfers of the last step on this rank that were waited for, with their times."""
        log.collect(device)
        self.restart()

    def restart(self) -> None:
        """Begin a record now: time before this call is in no record."""
        self._clock.take()
        self._forget()
        self.leave_out()

    def leave_out(self) -> None:
        """Drop the time since the last step, and its transfers: they were not part of a step."""
        self._log.take_waited()
        self._since = time.perf_counter()

    def end_step(self) -> PhaseTimes:
        """Count the times of a step on this rank; return the seconds of each phase since the last.

        The time between two steps, such as a save, is in the phases of the second one.
        """
        times = self._clock.take()
        moved = self.last_transfers = self._log.take_waited()
        # A transfer may have been launched before this step began. Its time until then was counted
        # with the step before, or dropped by `leave_out`: count only the rest.
        for transfer in moved:
            transfer.launched = max(transfer.launched, self._since)
        totals = CommLog.totals(moved)
        self._comm_seconds += totals.comm_seconds
        self._exposed_seconds += totals.exposed_seconds
        # The next step counts a transfer from this moment on, see above.
        self._since = max([self._since, *(transfer.arrived for transfer in moved)])
        for phase, seconds in times.items():
            self._times[phase] += seconds
        self.own_seconds = max(0.0, training_seconds(times) - totals.exposed_seconds)
        return times

    def count(self, *, tokens: int, padding: int, flops: float) -> None:
        """Count the global batch of a step: its tokens, its padding tokens and its FLOPs."""
        self._steps += 1
        self._tokens += tokens
        self._padding += padding
        self._flops += flops

    def record(
        self,
        outcome: StepOutcome,
        *,
        step: int,
        tokens: int,
        lr: float,
        lrs: dict[str, float],
        mem_gib: float,
        loss_scale: float | None,
        eta_seconds: float | None,
    ) -> StepRecord:
        """Return the record of `step`, the last step that was counted, and begin a new record.

        `tokens`: tokens since the start of the run. `lrs`: rates of update rules other than `lr`.
        """
        seconds = training_seconds(self._times)
        tflops = self._flops / seconds / self._num_ranks / 1e12  # TFLOP/s of one rank
        saving = self._times[Phase.CHECKPOINT]

        def a_step(part: float) -> float:
            """Return milliseconds for each step, given the seconds that all steps together took."""
            return part / self._steps * 1e3

        record = StepRecord(
            step=step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=lr,
            lrs=lrs or None,
            tokens=tokens,
            tgs=self._tokens / seconds / self._num_ranks,
            padding=self._padding / (self._tokens + self._padding) if self._padding else None,
            tflops=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            step_ms=a_step(seconds),
            comm_ms=a_step(self._comm_seconds),
            exposed_ms=a_step(self._exposed_seconds),
            mem_gib=mem_gib,
            data_ms=a_step(self._times[Phase.DATA]),
            forward_backward_ms=a_step(self._times[Phase.FORWARD_BACKWARD]),
            reduce_ms=a_step(self._times[Phase.REDUCE]),
            optimizer_ms=a_step(self._times[Phase.OPTIMIZER]),
            checkpoint_ms=saving * 1e3 if saving else None,
            loss_scale=loss_scale,
            expert_load=outcome.expert_load,
            unused_experts=outcome.unused_experts,
            eta_seconds=eta_seconds,
            skipped=outcome.skipped,
        )
        self._forget()
        return record

    def _forget(self) -> None:
        """Set all sums to 0, for a new record."""
        self._steps = self._tokens = self._padding = 0
        self._flops = 0.0
        self._times: PhaseTimes = dict.fromkeys(Phase, 0.0)
        self._comm_seconds = self._exposed_seconds = 0.0


class StepOutputs:
    """Metrics file, trackers and progress bar of a run, on rank 0; other ranks write nothing.

    It is a context, which continues the files after `last_step`; entering and leaving it are
    collectives over `host`. Raises CheckpointError on all ranks if the metrics file cannot be
    opened, is not a metrics file, or was removed. The bar is shown on a terminal only.

    `last_record`: record of `last_step` from the checkpoint, to complete the file with.
    """

    def __init__(
        self,
        config: JobConfig,
        folder: RunFolder,
        host: Channel,
        *,
        last_step: int,
        last_record: StepRecord | None = None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._host = host
        self._last_step = last_step
        self._last_record = last_record
        self.lacks_last = False
        """True if the record of `last_step`, or the evaluation due with it, is not in the file."""
        self._stack = ExitStack()
        self._file: MetricsFile | None = None
        self._trackers: Trackers | None = None
        self._bar: ProgressBar | None = None

    def record(self, record: StepRecord) -> None:
        """Write a record to the metrics file and the trackers."""
        if self._file is not None:
            self._file.write(record)
        if self._trackers is not None:
            self._trackers.log(record.step, record.values())

    def progress(self, *, loss: float, eta_seconds: float | None) -> None:
        """Move the progress bar on by a step."""
        if self._bar is not None:
            self._bar.show(loss=loss, eta_seconds=eta_seconds)

    def __enter__(self) -> Self:
        what = f"opening the metrics in {self._folder.path}"
        self.lacks_last = attempt_first(self._host, what, self._open)
        return self

    def _open(self) -> bool:
        """Open the metrics file, the trackers and the progress bar; called on rank 0.

        Returns True if the metrics file lacks the record of `last_step` or its evaluation.
        """
        opened = self._stack
        lacks_last = self._find_missing()
        # If the record of `last_step` is missing, the caller writes it: open the file so that it
        # ends one step earlier.
        last_step = self._last_step - lacks_last
        file = MetricsFile(self._folder.metrics_file, last_step=last_step)
        self._file = opened.enter_context(file)
        if self._config.metrics.trackers:
            trackers = run_trackers(self._config, self._folder, last_step=last_step)
            self._trackers = opened.enter_context(trackers)
        if (stream := watched_stream()) is not None:
            done, total = self._last_step, self._config.training.steps
            bar = ProgressBar(total=total, done=done, stream=stream)
            self._bar = opened.enter_context(bar)
        return lacks_last

    def _find_missing(self) -> bool:
        """Return True if the metrics file lacks the record of `last_step` or its evaluation.

        Returns False if the checkpoint has no record to add, as in a new run.
        """
        if self._last_record is None:
            return False
        path, due = self._folder.metrics_file, evaluation_is_due(self._config, self._last_step)
        if not path.exists():
            return due
        return not is_recorded(path, self._last_step, evaluated=due)

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None:
            what = f"writing the metrics in {self._folder.path}"
            attempt_first(self._host, what, self._stack.close)
        else:
            # Suppress an error about the file, which is logged: the error that ended the run is
            # the one to raise. The trackers get that error, and report that the run failed.
            with suppress(OSError):
                self._stack.__exit__(kind, *rest)
