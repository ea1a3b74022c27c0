"""`Trainer`: the loop over steps, with its records, its checkpoints and its end."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from isp.checkpoint import CheckpointError
from isp.comm import Mesh
from isp.config import JobConfig
from isp.data.batch import MicroBatch
from isp.metrics import describe_mfu, device_name, peak_tflops, shared_cores
from isp.metrics.phases import PhaseClock, is_of_step
from isp.optim import learning_rate
from isp.parallel import Axis
from isp.parallel.phase import Phase
from isp.run.garbage import collected_every
from isp.run.signals import StopRequest
from isp.train.balance import ContextBalance
from isp.train.data import StepData
from isp.train.meter import StepMeter, StepOutputs, model_flops
from isp.train.out_of_memory import MemoryOwner, memory_owners
from isp.train.profile_steps import StepProfiler
from isp.train.resume import Start
from isp.train.saving import Progress, RunCheckpoints
from isp.train.step import StepOutcome, make_train_step
from isp.train.watch import (
    LossWatch,
    Pace,
    SlowRankWatch,
    StepFacts,
    agree,
    any_asked,
    check_skips,
    describe_skip,
    describe_waits,
)

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)


class Trainer:
    """Model, optimizer and checkpoints of a run on this rank, and the loop over its steps."""

    def __init__(
        self,
        config: JobConfig,
        mesh: Mesh,
        device: torch.device,
        *,
        start: Start,
        data: StepData,
        stop: StopRequest,
        hostnames: Sequence[str],
        begin: float,
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.device = device
        self.start = start
        self.data = data
        self.stop = stop
        self.deadline = begin + config.training.max_seconds
        """Latest end of the run, in `time.monotonic`; it began at `begin`."""
        self.clock = PhaseClock(device)
        self.train_step = make_train_step(config, mesh, device, clock=self.clock)
        mesh.set_timeout(config.comm.init_timeout_seconds)
        self.optimizer = self.train_step.optimizer
        self._balance = ContextBalance(self.train_step.built.sequence)
        self._checkpoints = RunCheckpoints(start.checkpoints, config, self.train_step, mesh, device)
        self.checkpointer = self._checkpoints.checkpointer
        self._profiler = StepProfiler(config, self.train_step, device, start.folder)
        self.step = 0
        """Steps done."""
        self.tokens = 0
        """Tokens that all ranks have trained on in them."""
        name = device_name(device)
        peak = peak_tflops(name, config.metrics.peak_tflops)
        ranks = mesh.topology.world_size
        self._meter = StepMeter(mesh.log, self.clock, device, num_ranks=ranks, peak_tflops=peak)
        self._pace = Pace(config)
        one_machine = len(set(hostnames)) == 1
        self._shared_cores = shared_cores(device, ranks) if one_machine else ""
        warn = config.metrics
        self._loss_watch = LossWatch(warn.loss_spike_deviations)
        self._slow_watch = SlowRankWatch(
            mesh.topology, hostnames, factor=warn.slow_rank_factor, steps=warn.slow_rank_steps
        )
        logger.info(
            "model       %s parameters, %s, on %s",
            f"{config.language_model.num_parameters:,}",
            config.training.dtype,
            name,
        )
        if self.optimizer.host_bytes:
            mib = f"{self.optimizer.host_bytes / 2**20:,.1f}"
            logger.info("optimizer   %s MiB of states in the memory of the host, a rank", mib)
        logger.info("%s", describe_mfu(config.language_model.flop_rule, name, peak))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        data = self.config.data
        return data.micro_bsz * data.micro_num * data.seq_len * self.mesh[Axis.DATA].size

    def where(self) -> str:
        """This rank's work now, in words."""
        phase = self.clock.current
        if is_of_step(phase):
            return f"in {phase} of step {self.step + 1}"
        return f"after step {self.step}, in {phase}"

    def memory_owners(self) -> list[MemoryOwner]:
        step = self.train_step
        return memory_owners(step.gradients, step.optimizer, step.communicator, step.built.host)

    def run(self) -> None:
        """Train to the last step, or until asked to stop or short of time, and save.

        What it begins from, see `RunCheckpoints.begin`.
        """
        self.step, self.tokens = self._checkpoints.begin(self.start)
        stopped: str | None = None
        folder, host = self.start.folder, self.mesh.host
        with (
            StepOutputs(self.config, folder, host, last_step=self.step) as outputs,
            collected_every(self.config.training.gc_freq) as collect_garbage,
        ):
            self._meter.restart()
            first = self.step + 1
            while self.step < self.config.training.steps and stopped is None:
                stopped = self._train_step(outputs)
                collect_garbage(self.step)
                if self.step == first:
                    offloaded = self.train_step.built.host
                    if offloaded.reserved_bytes:
                        logger.info("block inputs on the host: %s", offloaded.describe())
                    self._tell_balance()
                    self.mesh.set_timeout(self.config.comm.train_timeout_seconds)
        if self.step > first:
            self._tell_balance()
        self._end(stopped)

    def _train_step(self, outputs: StepOutputs) -> str | None:
        """One step, its checkpoint and its record. Returns why the run is to stop, if it is.

        Raises CheckpointError if the last checkpoint of the run cannot be written.
        """
        config = self.config
        lr = learning_rate(
            self.step,
            peak=config.optimizer.lr,
            total_steps=config.training.steps,
            config=config.lr_scheduler,
        )
        loss_scale = None if self.optimizer.scaler is None else self.optimizer.scaler.scale
        self._profiler.begin(self.step + 1)
        self.clock.enter(Phase.DATA)
        batches = self.data.training(self.step)
        outcome = self.train_step(batches, lr)
        self._balance.count(batches)
        self._pace.count(self._meter.end_step(), write_seconds=self.checkpointer.write_seconds)
        self.step += 1
        if self._profiler.is_due(self.step):
            self._profile(outcome)
        self.tokens += self.tokens_per_step
        if outcome.skipped:
            self._count_skip(outcome)
        facts = self._agree(batches)
        stopped = None
        if facts.asked:
            stopped = "as asked"
        elif facts.late:
            stopped = f"as another would pass training.max_time={config.training.max_time}"
        self._meter.count(tokens=self.tokens_per_step, flops=facts.flops)
        # Before an evaluation: a second signal, or a limit of time, must not cost the steps done.
        if stopped is not None or self.step == config.training.steps:
            self._save(last=True)
        elif config.checkpoint.interval and self.step % config.checkpoint.interval == 0:
            self._save(last=False)
        asked = self._report(outcome, lr, loss_scale, outputs, stopped=stopped is not None)
        self._warn(outcome, facts)
        if asked and stopped is None and self.step < config.training.steps:
            stopped = "as asked"
            self._save(last=True)
        return stopped

    def _agree(self, batches: list[MicroBatch]) -> StepFacts:
        """The facts that all ranks have to know at the end of a step."""
        counts = self.mesh[Axis.TENSOR].rank == self.mesh[Axis.PIPELINE].rank == 0
        return agree(
            self.mesh.host,
            asked=self.stop.requested,
            late=time.monotonic() + self._pace.seconds_to_stop() > self.deadline,
            flops=model_flops(self.config.language_model, batches) if counts else 0,
            own_seconds=self._meter.own_seconds,
        )

    def _warn(self, outcome: StepOutcome, facts: StepFacts) -> None:
        """Tell, from rank 0, what looks wrong."""
        if self.mesh.rank != 0:
            return
        spike = self._loss_watch.look(self.step, outcome.loss)
        slow = self._slow_watch.look(self.step, facts.own_seconds)
        for line in [*([] if spike is None else [spike]), *slow]:
            logger.warning("%s", line)

    def _report(
        self,
        outcome: StepOutcome,
        lr: float,
        loss_scale: float | None,
        outputs: StepOutputs,
        *,
        stopped: bool,
    ) -> bool:
        """The record of the step, with an evaluation if one is due. Returns whether a rank was
        asked to stop meanwhile."""
        eta_seconds = self._pace.seconds_left(self.step)
        outputs.progress(loss=outcome.loss, eta_seconds=eta_seconds)
        finished = self.step == self.config.training.steps
        freq = self.config.validation.freq
        evaluates = freq > 0 and (self.step % freq == 0 or finished)
        is_told = stopped or finished or self.step % self.config.metrics.log_freq == 0
        if not (evaluates or is_told):
            return False
        memory = self._meter.memory_gib()
        record = self._meter.record(
            outcome,
            step=self.step,
            tokens=self.tokens,
            lr=lr,
            mem_gib=self.mesh.host.all_reduce(memory, op="max").wait().item(),
            loss_scale=loss_scale,
            eta_seconds=eta_seconds,
        )
        asked = False
        if evaluates:
            self.clock.enter(Phase.EVALUATION)
            begin = time.perf_counter()
            val_loss = self._evaluate()
            asked = val_loss is None
            seconds = time.perf_counter() - begin
            self._leave_phase()
            record = dataclasses.replace(record, val_loss=val_loss, evaluation_ms=seconds * 1e3)
        logger.info("%s", record.line(self.config.training.steps))
        outputs.record(record)
        return asked

    def _evaluate(self) -> float | None:
        """The loss on held-out text; None if a rank is asked to stop before its end."""
        asked = False

        def until_asked() -> Iterator[list[MicroBatch]]:
            nonlocal asked
            for batches in self.data.validation():
                asked = any_asked(self.mesh.host, self.stop.requested)
                if asked:
                    return
                yield batches

        val_loss = self.train_step.evaluate(until_asked())
        return None if asked else val_loss

    def _profile(self, outcome: StepOutcome) -> None:
        """Write the profile of the step that has just been taken; no part of its time."""
        self.clock.enter(Phase.PROFILE)
        self._profiler.end(self.step, outcome.loss)
        self._leave_phase()

    def _leave_phase(self) -> None:
        """Leave out the time since the step: no part of it."""
        self.clock.enter(Phase.OTHER)
        self._meter.leave_out()

    def _count_skip(self, outcome: StepOutcome) -> None:
        """Tell of a skipped step. Raises ValueError if it is one too many in a row."""
        optimizer, limit = self.optimizer, self.config.optimizer.max_skipped_steps
        logger.warning("%s", describe_skip(optimizer, step=self.step, grad_norm=outcome.grad_norm))
        check_skips(optimizer, limit, step=self.step, checkpointer=self.checkpointer)

    def _save(self, *, last: bool) -> None:
        """Save. Raises CheckpointError if that fails, and it is the last one."""
        self.clock.enter(Phase.CHECKPOINT)
        done = Progress(self.step, self.tokens)
        if last:
            self._checkpoints.save_at_last(done)
        else:
            try:
                self._checkpoints.save(done)
            except CheckpointError as error:
                logger.error("%s The run goes on.", error)
        self._leave_phase()

    def _tell_balance(self) -> None:
        if told := str(self._balance):
            logger.info("attention: %s", told)

    def _end(self, stopped: str | None) -> None:
        if self._shared_cores:
            waits = describe_waits(self.mesh, self._meter.last_transfers)
            if waits is not None:
                logger.info("%s: %s", self._shared_cores, waits)
        if stopped is not None and self.step < self.config.training.steps:
            logger.info(
                "stopped after step %d of %d, %s; the same command goes on from there",
                self.step,
                self.config.training.steps,
                stopped,
            )
        else:
            logger.info("done: %d steps, in %s", self.step, self.start.folder.path)
            logger.info("text from it: %s", _how_to_generate(self.start.checkpoints))


def _how_to_generate(checkpoints: Path) -> str:
    """The line to type for text from the newest checkpoint."""
    isp = "isp" if shutil.which("isp") else f"{os.path.relpath(sys.executable)} -m isp"
    folder = checkpoints.parent if checkpoints.name == "checkpoint" else checkpoints
    here = Path.cwd()
    folder = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return f'{isp} generate {folder} --prompt "The "'
