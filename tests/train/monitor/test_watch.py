"""Warnings about a loss that jumps and about a slow rank."""

from __future__ import annotations

import math
import os
import random
import socket
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isp.config import load_config
from isp.core.comm import CommLog
from isp.core.comm.tag import UNNAMED
from isp.core.mesh import ParallelConfig, PipelineConfig, TensorConfig, Topology
from isp.core.mesh.config import Mode
from isp.models.runtime.stage_module import StageModule
from isp.step.phases import PhaseClock, PhaseTimes
from isp.step.train_step import StepOutcome
from isp.train.monitor.meter import StepMeter
from isp.train.monitor.watch import LossWatch, SlowRankWatch
from isp.train.run import main
from tests.ranks import run_programs
from tests.train.jobs import run_folders, write_job

SLEEP_SECONDS = 0.05


def told(watch: LossWatch, losses: list[float]) -> list[int]:
    """Return the steps with a warning, counted from 0."""
    return [step for step, loss in enumerate(losses) if watch.look(step, loss) is not None]


def noisy(count: int, *, spread: float = 0.05) -> list[float]:
    """Return losses that fall from 4 to 2, with normal noise."""
    noise = random.Random(3)
    return [2 + 2 * math.exp(-step / 50) + noise.gauss(0, spread) for step in range(count)]


def test_a_spike_is_reported_once_and_again_when_it_returns() -> None:
    """Catches a warning for each step, and a spike that hides the next one."""
    losses = noisy(300)
    for step in (*range(200, 210), 250):
        losses[step] += 1.0
    losses[220] -= 1.0  # a drop is no spike
    assert told(LossWatch(6.0), losses) == [200, 250]
    assert told(LossWatch(0.0), losses) == []
    assert told(LossWatch(30.0), losses) == []
    watch = LossWatch(6.0)
    for loss in [2.0, 2.2] * 10:
        watch.look(0, loss)
    assert watch.look(20, 4.0) == (
        "step 20: the loss 4.0000 is 1.9000 above 2.1000, the median of the 20 steps before: 12.8"
        " deviations (reported from metrics.loss_spike_deviations=6 on)"
    )


def test_noise_and_the_first_steps_are_no_spikes() -> None:
    """Catches frequent false warnings, which users would soon ignore."""
    assert told(LossWatch(6.0), noisy(2000)) == []
    assert told(LossWatch(6.0), [2.0, *[1.0] * 18, 5.0]) == []
    assert told(LossWatch(6.0), [1.0] * 50 + [1.05] * 50) == [], "equal losses have no spread"
    assert told(LossWatch(6.0), [1.0] * 50 + [1.07] * 50) == [50]


def test_losses_that_are_not_finite_are_ignored() -> None:
    """Catches a median of NaN, which would end all warnings; skipped steps are reported
    elsewhere.
    """
    losses = [1.0] * 30 + [math.nan, math.inf] * 5 + [1.0, 9.0]
    assert told(LossWatch(6.0), losses) == [41]


def watch(world: int, *, stages: int = 1, factor: float = 1.5) -> SlowRankWatch:
    parallel = ParallelConfig(
        tensor=TensorConfig(mode=Mode.MTP), pipeline=PipelineConfig(size=stages)
    )
    hosts = [f"node{rank // 2}" for rank in range(world)]
    return SlowRankWatch(Topology.create(world, parallel), hosts, factor=factor, steps=3)


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_a_rank_that_stays_slow_is_named_once(world: int) -> None:
    """Catches another rank named, a single slow step reported, and a median moved by the slow
    rank.
    """
    found, slow = watch(world), [1.0] * (world - 1) + [1.6]
    steps = [slow, slow, [1.0] * world, slow, slow, slow, slow, slow]
    lines = [line for step, own in enumerate(steps) for line in found.look(step, own)]
    assert lines == [
        f"step 5: rank {world - 1} on node{(world - 1) // 2} is slow: for 3 steps it was at work"
        f" 1600 ms a step, the others of its stage 1000 ms (reported from"
        f" metrics.slow_rank_factor=1.5 on)"
    ]
    assert [watch(world, factor=2.0).look(s, own) for s, own in enumerate(steps)] == [[]] * 8
    assert [watch(world, factor=0.0).look(s, own) for s, own in enumerate(steps)] == [[]] * 8


def test_two_slow_ranks_of_five_are_found() -> None:
    """Catches a mean, which slow ranks move."""
    found = watch(5)
    lines = [found.look(step, [9.0, 1.0, 1.1, 0.9, 7.0]) for step in range(3)]
    assert [" ".join(line.split()[:4]) for line in lines[2]] == [
        "step 2: rank 4",
        "step 2: rank 0",
    ]


def test_stages_are_not_compared() -> None:
    """Catches the last pipeline stage, which has the head, reported as slow."""
    found = watch(4, stages=2)
    assert [found.look(step, [1.0, 1.0, 9.0, 9.0]) for step in range(4)] == [[]] * 4
    alone = watch(2, stages=2)
    assert [alone.look(step, [1.0, 9.0]) for step in range(4)] == [[]] * 4


def test_a_run_names_its_slow_rank_and_its_spike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a waiting rank named for the one it waits for, and a watch that no run uses."""
    forward, loss = StageModule.__call__, StageModule.loss
    end_step, own = StepMeter.end_step, []

    def slow_forward(self: StageModule, *args: Tensor) -> Tensor:
        if os.environ["RANK"] == "1":
            time.sleep(SLEEP_SECONDS)
        return forward(self, *args)

    def spiking(self: StageModule, *args: Tensor) -> Tensor:
        return loss(self, *args) * (4 if len(own) == 23 else 1)

    def told(self: StepMeter) -> PhaseTimes:
        times = end_step(self)
        own.append(self.own_seconds)
        self.own_seconds = 1.6 if os.environ["RANK"] == "1" else 1.0
        return times

    monkeypatch.setattr(StageModule, "__call__", slow_forward)
    monkeypatch.setattr(StageModule, "loss", spiking)
    monkeypatch.setattr(StepMeter, "end_step", told)
    job = write_job(tmp_path)
    words = ["--training.steps", "25", "--metrics.slow_rank_steps", "5", "--optimizer.lr", "1e-9"]

    def train(rank: int) -> float:
        main(load_config(job, words))
        return min(own)

    waits, works = run_programs(2, train)
    # apart from the sleep, both do equal work, which may take longer than that on a busy machine
    assert waits + SLEEP_SECONDS / 2 < works, "what a rank waits for the other is not its own"
    (run,) = run_folders(job)
    log = (run / "logs/rank_0.log").read_text()
    warnings = [line.split(": ", 1)[1] for line in log.splitlines() if " WARNING " in line]
    slow, spike = warnings
    assert f"rank 1 on {socket.gethostname()} is slow: for 5 steps" in slow
    assert spike.startswith("step 24: the loss ")


def test_transfers_during_an_evaluation_are_timed_from_its_end() -> None:
    """Catches weights sent during an evaluation counted as communication of the next step."""
    log, device = CommLog(), torch.device("cpu")
    meter = StepMeter(log, PhaseClock(device), device, num_ranks=1, peak_tflops=None)
    transfer = log.start("all_gather", "weight", UNNAMED, 8)
    transfer.launched -= 100.0
    meter.leave_out()
    transfer.ended, transfer.waited = time.perf_counter(), True
    meter.end_step()
    assert meter.last_transfers == [transfer]
    assert transfer.duration < 50.0


def test_a_record_of_several_steps_sums_them() -> None:
    """Catches the throughput of all ranks given as that of one, and transfer time counted twice."""
    log, device = CommLog(), torch.device("cpu")
    meter = StepMeter(log, PhaseClock(device), device, num_ranks=4, peak_tflops=1e3)
    begin = time.perf_counter() + 1
    for step in range(2):  # each for 2 seconds, of which the second's first is the first's last
        transfer = log.start("all_gather", "weight", UNNAMED, 8)
        transfer.launched, transfer.ended = begin + step, begin + step + 2
        transfer.waited, transfer.wait_began, transfer.exposed = True, begin, 0.5
        meter.end_step()
        meter.count(tokens=4000, padding=1000, flops=2e15)
    outcome = StepOutcome(loss=1.0, grad_norm=1.0, skipped=False, valid_tokens=1)
    optional = {"lrs": {}, "loss_scale": None, "eta_seconds": None}
    record = meter.record(outcome, step=2, tokens=8000, lr=0.1, mem_gib=1.0, **optional)
    assert (record.comm_ms, record.exposed_ms) == pytest.approx((1500, 500))
    seconds = 2 * record.step_ms / 1e3
    assert record.tgs == pytest.approx(8000 / seconds / 4)
    assert record.padding == 0.2
    assert record.tflops == pytest.approx(1e3 / seconds)
    assert record.mfu == pytest.approx(record.tflops / 1e3)
