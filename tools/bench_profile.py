"""Measure how much longer a training step takes while `isp profile` records it.

    PYTHONPATH=. python tools/bench_profile.py --ranks 2 4 --rounds 30

A round is two steps of one model, one of them with the recorder of `isp profile`, in alternating
order.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from table_parser import table_parser

from isp.config import JobConfig
from isp.config.data import DataConfig
from isp.core.comm import Mesh
from isp.core.mesh import Mode, ParallelConfig, TensorConfig, WeightConfig
from isp.core.micro_batch import MicroBatch
from isp.parity.forked import run_ranks
from isp.profile.recorder import Recorder
from isp.step.job_models import trained_model
from isp.step.train_step import TrainStep, make_train_step
from isp.train.profiling.recording import recorder_for
from model.config import ModelConfig

COLUMNS = """\
step ms          median time of a step without the recorder, on the slowest rank
records          marks and transfers that the recorder kept for a step of rank 0
time             median over rounds of the step's time, recorded / not recorded, on the slowest rank
processor time   the same of processor time, which other programs disturb less
"""


class Cost(NamedTuple):
    """Seconds of a step on the slowest rank: wall time and processor time."""

    wall: float
    processor: float


def job(world: int, mode: Mode, options: argparse.Namespace) -> JobConfig:
    """Return a run of the quickstart's model, with one sequence over all ranks."""
    return JobConfig(
        model=ModelConfig(
            vocab_size=272,
            hidden_size=options.hidden,
            num_layers=options.layers,
            num_heads=4,
            intermediate_size=options.hidden * 8 // 3 // 16 * 16,
        ),
        data=DataConfig(source="none", seq_len=options.tokens),
        parallel=ParallelConfig(
            tensor=TensorConfig(size=world, mode=mode),
            weight=WeightConfig(size=world if mode is Mode.ISP else 1),
        ),
    )


def measure(rank: int, world: int, options: argparse.Namespace) -> None:
    """Time all modes on this rank; rank 0 prints a line for each."""
    cpu = torch.device("cpu")
    for mode in Mode:
        config = job(world, mode, options)
        mesh = Mesh(config.topology(world), rank)
        step = make_train_step(
            trained_model(config),
            config,
            mesh,
            cpu,
        )
        tokens = torch.randint(272, (1, options.tokens), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(options.tokens)[None]
        batch = MicroBatch(tokens, tokens.roll(-1, 1), positions, None)
        plain, recorded, marks = [], [], 0
        for i in range(options.warmup + options.rounds):
            for with_recorder in (i % 2 == 0, i % 2 == 1):
                recorder = recorder_for(step, cpu)
                cost = timed(step, batch, recorder if with_recorder else None)
                if i >= options.warmup:
                    (recorded if with_recorder else plain).append(cost)
                if with_recorder:
                    record = recorder.record()
                    marks = len(record.marks) + len(record.transfers)
        step.drain()
        if rank == 0:
            report(world, mode, plain, recorded, marks)


def timed(step: TrainStep, batch: MicroBatch, recorder: Recorder | None) -> Cost:
    """Make a step and return its cost, without that of entering and leaving the recorder."""
    if recorder is not None:
        recorder.__enter__()
        recorder.begin_step()
    dist.barrier()
    begin = time.perf_counter(), time.process_time()
    step([batch], 1e-4)
    own = [time.perf_counter() - begin[0], time.process_time() - begin[1]]
    if recorder is not None:
        recorder.begin_step()
        recorder.__exit__(None, None, None)
    step.mesh.log.collect()
    slowest = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Cost(*slowest.tolist())


def report(world: int, mode: Mode, plain: list[Cost], recorded: list[Cost], marks: int) -> None:
    """Print a line of the table."""
    ratios = Cost(
        *(
            statistics.median(with_it[i] / without[i] for with_it, without in pairs)
            for i in range(2)
            for pairs in [list(zip(recorded, plain, strict=True))]
        )
    )
    step_ms = statistics.median(cost.wall for cost in plain) * 1e3
    print(
        f"{world:>5}  {mode:<4}  {step_ms:>8.1f}  {marks:>7}"
        f"  {ratios.wall:>6.3f}  {ratios.processor:>14.3f}",
        flush=True,
    )


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="CPU ranks")
    parser.add_argument("--rounds", type=int, default=30, help="timed pairs of steps")
    parser.add_argument("--warmup", type=int, default=3, help="pairs of steps before these")
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the sequence")
    parser.add_argument("--quick", action="store_true", help="tiny, to see whether it runs")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.warmup = 2, 1
        options.hidden, options.layers, options.tokens = 32, 2, 64
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch", end=" ")
    print(f"{torch.__version__}, gloo, one thread a rank\n")
    print(COLUMNS)
    print("ranks  mode   step ms  records    time  processor time   (recorded / not recorded)")
    for world in options.ranks:
        run_ranks(world, measure, world, options, timeout_seconds=3600.0)


if __name__ == "__main__":
    main()
