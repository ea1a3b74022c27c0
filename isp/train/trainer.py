"""`Trainer`: the loop over the steps of a run, with records, evaluations and checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from isp.checkpoint import CheckpointError
from isp.checkpoint.agreement import attempt, attempt_first
from isp.config import JobConfig
from isp.core.comm import Mesh
from isp.core.mesh import Axis
from isp.core.mesh.phase import Phase
from isp.core.micro_batch import MicroBatch
from isp.core.optim.update_rules import learning_rate
from isp.metrics import (
    StepRecord,
    describe_mfu,
    device_name,
    peak_memory_gib,
    peak_tflops,
    shared_cores,
)
from isp.step.job_models import second_model, trained_model
from isp.step.objectives import DistillLoss, PreferenceLoss, RewardLoss
from isp.step.phases import PhaseClock, is_of_step
from isp.step.train_step import StepOutcome, TokenLoss, make_train_step
from isp.train.data import StepData
from isp.train.garbage import collected_every
from isp.train.monitor.balance import ContextBalance
from isp.train.monitor.meter import StepMeter, StepOutputs, evaluation_is_due, model_flops
from isp.train.monitor.watch import (
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
from isp.train.profiling.step_profiler import StepProfiler
from isp.train.signals import StopRequest
from isp.train.state.resume import Start, begin_run
from isp.train.state.saved_run import Progress, RunCheckpoints

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

_AS_ASKED = "as asked"
"""Reason for a stop by a signal, as the end of the log line `stopped after step ..`."""


class Trainer:
    """Model, optimizer and checkpoints of a run on this rank; `run` is the loop over its steps.

    Its constructor is a collective over the world. `begin`: time at which the run began, from
    `time.monotonic`. `hostnames` are by rank.
    """

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
        """Latest end of the run, on the clock of `time.monotonic`."""
        self.clock = PhaseClock(device)
        self.train_step = make_train_step(
            trained_model(config),
            config,
            mesh,
            device,
            clock=self.clock,
            initial_weights=False,
            objective=_objective(config, mesh, device),
        )
        mesh.set_timeout(config.comm.init_timeout_seconds)
        self.optimizer = self.train_step.optimizer
        self._balance = ContextBalance(self.train_step.built.sequence)
        self._checkpoints = RunCheckpoints(
            start.checkpoints, config, self.train_step, mesh, launched_at=start.launched_at
        )
        self.checkpointer = self._checkpoints.checkpointer
        self._profiler: StepProfiler | None = None
        if config.profiler.enable_profiling:
            self._profiler = StepProfiler(config, self.train_step, device, start.folder)
        self.step = 0
        """Number of steps done, including those of the checkpoint that the run began from."""
        self.tokens = 0
        """Number of tokens in these steps, over all ranks, without padding."""
        self._slots_per_step = config.sequences(mesh.topology) * config.data.seq_len
        name = device_name(device)
        peak = peak_tflops(name, config.metrics.peak_tflops)
        ranks = mesh.topology.world_size
        self._meter = StepMeter(mesh.log, self.clock, device, num_ranks=ranks, peak_tflops=peak)
        self._pace = Pace(config)
        # `describe_waits` compares times of ranks by one clock, so all must be on one machine.
        one_machine = len(set(hostnames)) == 1
        self._shared_cores = shared_cores(device, ranks) if one_machine else ""
        warn = config.metrics
        self._loss_watch = LossWatch(warn.loss_spike_deviations)
        self._slow_watch = SlowRankWatch(
            mesh.topology, hostnames, factor=warn.slow_rank_factor, steps=warn.slow_rank_steps
        )
        traced = trained_model(config)
        trained = sum(p.numel() for p in traced.shape.parameters() if p.requires_grad)
        logger.info(
            "model       %s parameters%s, %s, on %s",
            f"{traced.num_parameters:,}",
            f", {trained:,} of them trained" if trained < traced.num_parameters else "",
            config.training.dtype,
            name,
        )
        if self.optimizer.host_bytes:
            mib = f"{self.optimizer.host_bytes / 2**20:,.1f}"
            logger.info("optimizer   %s MiB of states per rank in host memory", mib)
        if peak is not None or device.type != "cpu":  # no peak of a CPU is known
            logger.info("mfu         %s", describe_mfu(name, peak))

    def where(self) -> str:
        """Return the step and the phase that this rank is in, in words, for errors about memory."""
        phase = self.clock.current
        if is_of_step(phase):
            return f"in {phase} of step {self.step + 1}"
        return f"after step {self.step}, in {phase}"

    def run(self) -> bool:
        """Train to the last step, or until a stop signal or the time limit, and save.

        Begins from the state that `begin_run` loads. Returns True if the run has finished. A
        collective over the world: all ranks stop after the same step.
        """
        begun = begin_run(self.start, self.config, self._checkpoints)
        self.step, self.tokens = begun.step, begun.tokens
        what = "finding the place in the stream of data"
        attempt(self.mesh.host, what, lambda: self.data.seek(begun.step, begun.place))
        stopped: str | None = None
        folder, host = self.start.folder, self.mesh.host
        with (
            StepOutputs(
                self.config, folder, host, last_step=self.step, last_record=begun.record
            ) as outputs,
            collected_every(self.config.training.gc_freq) as collect_garbage,
        ):
            # The previous process saved this step, but ended before its record or its evaluation
            # was in the metrics file: write them now, from the record in the checkpoint.
            if outputs.lacks_last and begun.record is not None:
                logger.info("completing step %d: its record or evaluation is missing", self.step)
                stopped = self._report(begun.record, outputs)
            self._meter.restart()
            first = self.step + 1
            while self.step < self.config.training.steps and stopped is None:
                stopped = self._train_step(outputs)
                collect_garbage(self.step)
                if self.step == first:
                    offloaded = self.train_step.built.host
                    if offloaded.reserved_bytes:
                        logger.info(
                            "inputs of recomputed blocks are kept in %s", offloaded.describe()
                        )
                    self._log_balance()
                    # The first step also loads kernels and opens connections, for which it has
                    # comm.init_timeout_seconds; collectives of later steps get the shorter limit.
                    self.mesh.set_timeout(self.config.comm.train_timeout_seconds)
        if self.step > first:
            self._log_balance()
        self._end(stopped)
        return stopped is None

    def _train_step(self, outputs: StepOutputs) -> str | None:
        """Run one step, then what is due after it: profile, checkpoint, evaluation and record.

        Returns the reason if the run has to stop, else None. Raises CheckpointError if the last
        checkpoint of the run cannot be written.
        """
        config = self.config
        lr = learning_rate(
            self.step,
            peak=config.optimizer.lr,
            total_steps=config.training.steps,
            config=config.lr_scheduler,
        )
        loss_scale = None if self.optimizer.scaler is None else self.optimizer.scaler.scale
        if self._profiler is not None:
            self._profiler.begin(self.step + 1)
        self.clock.enter(Phase.DATA)
        batches = self.data.training(self.step)
        outcome = self.train_step(batches, lr)
        if self.mesh.topology.context > 1:
            self._balance.count(batches)
        self._pace.count(self._meter.end_step(), write_seconds=self.checkpointer.write_seconds)
        self.step += 1
        if self._profiler is not None and self._profiler.is_due(self.step):
            self.clock.enter(Phase.PROFILE)
            self._profiler.end(self.step, outcome.loss)
            self._leave_phase()
        if outcome.skipped:
            self._count_skip(outcome)
        # A stop signal or the time limit may reach ranks at different steps. After this collective
        # all ranks decide the same.
        facts = self._agree(batches)
        self.tokens += facts.tokens
        stopped = None
        if facts.asked:
            stopped = _AS_ASKED
        elif facts.late:
            stopped = f"as another would pass training.max_time={config.training.max_time}"
        padding = self._slots_per_step - facts.tokens
        self._meter.count(tokens=facts.tokens, padding=padding, flops=facts.flops)
        is_last = stopped is not None or self.step == config.training.steps
        eta_seconds = self._pace.seconds_left(self.step)
        outputs.progress(loss=outcome.loss, eta_seconds=eta_seconds)
        record = self._record(outcome, lr, loss_scale, eta_seconds, is_last=is_last)
        done = Progress(self.step, self.tokens, record, self.data.tell(self.step))
        # Save before an evaluation: if a second signal or the cluster's time limit ends the run in
        # it, no step is lost.
        if is_last:
            self._save(done, last=True)
        elif config.checkpoint.interval and self.step % config.checkpoint.interval == 0:
            self._save(done, last=False)
        interrupted = None if record is None else self._report(record, outputs)
        self._warn(outcome, facts)
        if interrupted is not None and not is_last:
            self._save(done, last=True)
        # After the last step the run has finished, also if a signal asked it to stop, unless its
        # evaluation was interrupted.
        return interrupted if self.step == config.training.steps else stopped or interrupted

    def _agree(self, batches: list[MicroBatch]) -> StepFacts:
        """Return the facts that all ranks need at the end of a step, in one all-reduce."""
        # All ranks of a tensor group and all pipeline stages have the same tokens: only one rank of
        # them counts, or the sum over all ranks would have them several times.
        counts = self.mesh[Axis.TENSOR].rank == self.mesh[Axis.PIPELINE].rank == 0
        return agree(
            self.mesh.host,
            asked=self.stop.received is not None,
            late=time.monotonic() + self._pace.seconds_to_stop() > self.deadline,
            flops=model_flops(self.train_step.built.model, batches) if counts else 0,
            tokens=sum(batch.num_tokens for batch in batches) if counts else 0,
            own_seconds=self._meter.own_seconds,
        )

    def _warn(self, outcome: StepOutcome, facts: StepFacts) -> None:
        """Log warnings about the loss and about slow ranks, on rank 0."""
        if self.mesh.rank != 0:
            return
        # A step without labels has the loss 0. As nan it stays out of the median of losses.
        loss = outcome.loss if outcome.valid_tokens else math.nan
        spike = self._loss_watch.look(self.step, loss)
        slow = self._slow_watch.look(self.step, facts.own_seconds)
        for line in [*([] if spike is None else [spike]), *slow]:
            logger.warning("%s", line)

    def _record(
        self,
        outcome: StepOutcome,
        lr: float,
        loss_scale: float | None,
        eta_seconds: float | None,
        *,
        is_last: bool,
    ) -> StepRecord | None:
        """Return the record of the step without its evaluation; None if no record is due."""
        is_due = is_last or self.step % self.config.metrics.log_freq == 0
        if not (is_due or evaluation_is_due(self.config, self.step)):
            return None
        memory, config = torch.tensor(peak_memory_gib(self.device)), self.config.optimizer
        # The record lists the rates of update rules whose peak differs from optimizer.lr.
        peaks = {rule: config.of_rule(rule, "lr") for rule in sorted(config.rules)}
        return self._meter.record(
            outcome,
            step=self.step,
            tokens=self.tokens,
            lr=lr,
            lrs={rule: lr * x / config.lr for rule, x in peaks.items() if x != config.lr},
            mem_gib=self.mesh.host.all_reduce(memory, op="max").wait().item(),
            loss_scale=loss_scale,
            eta_seconds=eta_seconds,
        )

    def _report(self, record: StepRecord, outputs: StepOutputs) -> str | None:
        """Write the record of the step, after an evaluation if one is due, and log it.

        Returns the reason if the evaluation was interrupted, else None. The record has no losses of
        an interrupted evaluation.
        """
        stopped: str | None = None
        if evaluation_is_due(self.config, self.step):
            self.clock.enter(Phase.EVALUATION)
            begin = time.perf_counter()
            losses, stopped = self._evaluate()
            milliseconds = (time.perf_counter() - begin) * 1e3
            self._leave_phase()
            if stopped is None:
                record = dataclasses.replace(
                    record,
                    val_loss=self._mean_loss(losses),
                    val_losses=losses if len(self.config.data.valid_parts) > 1 else None,
                    evaluation_ms=milliseconds,
                )
        logger.info("%s", record.line(self.config.training.steps))
        if (evaluation := record.evaluation_line()) is not None:
            logger.info("%s", evaluation)
        outputs.record(record)
        return stopped

    def _evaluate(self) -> tuple[dict[str, float], str | None]:
        """Return the loss on held-out text by source, without sources that have no label.

        The second result is the reason if the evaluation was interrupted, else None.
        """
        asked = False

        def until_asked(source: int) -> Iterator[list[MicroBatch]]:
            """Yield the held-out batches of a source until any rank has got a stop signal."""
            nonlocal asked
            for batches in self.data.validation(source):
                # A signal may reach ranks at different batches. All have to stop at the same one,
                # or the others would wait in the next forward's collectives.
                asked = any_asked(self.mesh.host, self.stop.received is not None)
                if asked:
                    return
                yield batches

        losses: dict[str, float] = {}
        for source, part in enumerate(self.config.data.valid_parts):
            loss = self.train_step.evaluate(until_asked(source))
            if asked:
                return {}, _AS_ASKED
            if loss is not None:
                losses[part.title] = loss
        return losses, None

    def _mean_loss(self, losses: dict[str, float]) -> float | None:
        """Return the mean of the losses on held-out text, weighted by `weight` of each source.

        `losses` is by name of the source. If it is empty, warns and returns None.
        """
        weights = {part.title: part.weight for part in self.config.data.valid_parts}
        if not losses:
            logger.warning(
                "step %d: none of the evaluated held-out tokens has a label, so there is no"
                " val_loss: check data.valid_source (or data.valid_fraction) and validation.steps",
                self.step,
            )
            return None
        total = sum(weights[name] for name in losses)
        return sum(weights[name] / total * loss for name, loss in losses.items())

    def _leave_phase(self) -> None:
        """End a phase between steps, such as a save, and leave its time out of the next step's."""
        self.clock.enter(Phase.OTHER)
        self._meter.leave_out()

    def _count_skip(self, outcome: StepOutcome) -> None:
        """Log a step that the optimizer skipped.

        Raises ValueError if `max_skipped_steps` in a row were skipped.
        """
        optimizer, limit = self.optimizer, self.config.optimizer.max_skipped_steps
        logger.warning("%s", describe_skip(optimizer, outcome, step=self.step))
        check_skips(optimizer, limit, step=self.step, checkpointer=self.checkpointer)

    def _save(self, done: Progress, *, last: bool) -> None:
        """Save a checkpoint; `last`: the last one of the run, which is retried for a while.

        If saving fails, raises CheckpointError for the last one; for others only logs it.
        """
        self.clock.enter(Phase.CHECKPOINT)
        if last:
            self._checkpoints.save_at_last(done)
        else:
            try:
                self._checkpoints.save(done)
            except CheckpointError as error:
                logger.error("%s The run continues.", error)
        self._leave_phase()

    def _log_balance(self) -> None:
        """Log how evenly attention was split over context ranks; nothing without context ranks."""
        if text := str(self._balance):
            logger.info("attention: %s", text)

    def _end(self, stopped: str | None) -> None:
        """Log how the run ended, and mark its folder as finished unless it was `stopped`.

        `stopped` is the reason for a stop; None if the run has finished.
        """
        if self._shared_cores:
            waits = describe_waits(self.mesh, self._meter.last_transfers)
            if waits is not None:
                logger.info("%s: %s", self._shared_cores, waits)
        if stopped is not None:
            logger.info(
                "stopped after step %d of %d, %s; run the same command again to resume",
                self.step,
                self.config.training.steps,
                stopped,
            )
        else:
            folder, step = self.start.folder, self.step
            what = f"ending the run in {folder.path}"
            attempt_first(self.mesh.host, what, lambda: folder.write_finished(step))
            logger.info("done: %d steps, in %s", self.step, self.start.folder.path)
            if self.config.training.objective != "reward":  # a reward model writes no text
                how = _how_to_generate(self.start.checkpoints, chats=self.data.has_chats)
                logger.info("generate text: %s", how)


def _how_to_generate(checkpoints: Path, *, chats: bool) -> str:
    """Return the command that generates text from the run's newest checkpoint.

    `chats`: the run trained on conversations, so the prompt is a message.
    """
    isp = "isp" if shutil.which("isp") else f"{os.path.relpath(sys.executable)} -m isp"
    folder = checkpoints.parent if checkpoints.name == "checkpoint" else checkpoints
    here = Path.cwd()
    folder = folder.relative_to(here) if folder.is_relative_to(here) else folder
    prompt = '--chat --prompt "Hello"' if chats else '--prompt "The "'
    return f"{isp} generate {folder} {prompt} --temperature 0.8"


def _objective(config: JobConfig, mesh: Mesh, device: torch.device) -> TokenLoss:
    """Return the loss of `training.objective`, with its reference or teacher model if it has one.

    Building that model is a collective over the world.
    """
    model = second_model(config)
    if model is None:
        return RewardLoss() if config.training.objective == "reward" else TokenLoss()
    # The weights of this model do not change. But with `weights_may_change` it does not gather
    # weights ahead for its next forward: between its forwards no transfer of it is in flight.
    second = make_train_step(model, config, mesh, device, weights_may_change=True)
    for chunk in second.chunks:
        chunk.model.eval()  # adapters of the reference model may have dropout
    if config.training.objective == "dpo":
        return PreferenceLoss(config.training.dpo, second)
    return DistillLoss(config.training.distill, second)
