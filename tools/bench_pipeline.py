"""Measure the bubble of each pipeline schedule, and the weight gathers that it leaves exposed.

    python tools/bench_pipeline.py            # two and four ranks; takes minutes
    python tools/bench_pipeline.py --quick    # tiny, to see whether it runs

Runs the training step. Each linear sleeps for `--ms` for each of its three products (output, input
gradient, weight gradient), so that ranks do not compete for cores. Where weights stay on their
rank, as in the first table, the product of the weight gradient does not sleep: it is added straight
into the main gradient. Theory and simulation count the three products as equally long.

The second table is in isp mode over a modelled link, with weights sharded over two ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from paced import Link, Paced, linears_of

from isp.core.comm import Mesh, TimedTransfer
from isp.core.mesh import (
    Axis,
    Mode,
    ParallelConfig,
    PipelineConfig,
    PipelineSchedule,
    TensorConfig,
    Topology,
    WeightConfig,
)
from isp.core.micro_batch import MicroBatch
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.zero1 import Zero1Optimizer
from isp.core.pipeline.order import PipelineOrder, timeline
from isp.models.build import build_model
from isp.parity.forked import run_ranks
from isp.step.train_step import TrainStep
from model.build import language_model
from model.config import ModelConfig

BUBBLE_COLUMNS = """\
chunks      model chunks of a rank
bubble      median of step / work of a rank - 1. The work is the time of the micro-batches without
            a pipeline, divided by the ranks
theory      1F1B: (p - 1) / m with p ranks and m micro-batches; over v chunks 1/v of it; with split
            backwards a third of that
simulated   bubble of the same order of actions, all equally long (`isp.core.pipeline.order`)
"""
GATHER_COLUMNS = """\
gathers              all-gathers of weights in a step, on the rank of the stage with most exposed
exposed              those that compute waited for longer than a twentieth of their time
of the first block   those among them of the first block, which nothing can hide on the first stage
exposed time         time for which compute waited for gathers, as a share of the gathers' time
"""
CPU = torch.device("cpu")
TOKENS = 16
SCHEDULES = (
    (PipelineSchedule.ONE_F_ONE_B, 1),
    (PipelineSchedule.INTERLEAVED, 2),
    (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, 1),
    (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, 2),
    (PipelineSchedule.ZBV, 2),
)


class Contestant:
    """A training step on this rank, whose linears sleep, and which can be timed."""

    def __init__(
        self, rank: int, world: int, parallel: ParallelConfig, o: argparse.Namespace, micro: int
    ) -> None:
        model = ModelConfig(
            vocab_size=32,
            hidden_size=o.hidden,
            num_layers=o.layers,
            num_heads=4,
            intermediate_size=2 * o.hidden,
        )
        self.link = Link(1e15, 0.0)
        self.mesh = Mesh(Topology.create(world, parallel), rank)
        traced = language_model(model, "float32")
        built = build_model(traced, parallel, self.mesh, seed=1, device=CPU, dtype=torch.float32)
        for layer in linears_of(built):
            if layer.name != traced.trace.head:  # only one stage has it: stages would be unequal
                layer.communicator = Paced(layer.communicator, lambda _: o.ms / 1e3)
        gradients = MainGradients(built.parameters, self.mesh, rows_of=self.mesh[Axis.ZERO1])
        names = traced.trained_names
        optimizer = Zero1Optimizer(gradients, self.mesh, OptimizerConfig(), names=names)
        self.step = TrainStep(built, gradients, optimizer, self.mesh, micro_num=micro)
        self.link.slow(self.mesh.opened)
        positions = torch.arange(TOKENS)[None]
        tokens = torch.randint(32, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
        self.batches = [MicroBatch(tokens[:, :-1], tokens[:, 1:], positions, None)] * micro

    def timed(self) -> tuple[float, list[TimedTransfer]]:
        """Make a step; return its seconds on the slowest rank, and this rank's transfers."""
        world = self.mesh[Axis.WORLD]
        world.all_reduce(torch.zeros(1)).wait()
        self.mesh.log.collect()
        start = time.perf_counter()
        self.step(self.batches, 1e-4)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        transfers = self.mesh.log.take()
        return world.all_reduce(seconds, op="max").wait().item(), transfers


def theory(schedule: PipelineSchedule, chunks: int, size: int, micro: int) -> float:
    """Return the bubble of a schedule if forward and each half of backward take the same time."""
    return (size - 1) / micro / chunks / (3 if schedule.splits_backward else 1)


def bubbles(rank: int, world: int, o: argparse.Namespace) -> None:
    """Time all schedules on this rank; rank 0 prints the table of bubbles."""
    micro = o.micro * world
    alone = Contestant(0, 1, ParallelConfig(), o, 1)
    if rank == 0:
        print(f"\n### bubble: {world} ranks, {micro} micro-batches, {o.layers} layers\n")
        print(BUBBLE_COLUMNS)
        print("| schedule | chunks | step, ms | bubble | theory | simulated |")
        print("|---|---|---|---|---|---|")
    for schedule, chunks in SCHEDULES:
        pipeline = PipelineConfig(size=world, schedule=schedule, num_chunks=chunks)
        parallel = ParallelConfig(tensor=TensorConfig(mode=Mode.MTP), pipeline=pipeline)
        piped = Contestant(rank, world, parallel, o, micro)
        pairs = [(piped.timed()[0], alone.timed()[0]) for _ in range(1 + o.rounds)][1:]
        step = statistics.median(step for step, _ in pairs)
        bubble = statistics.median(step / (work * micro / world) - 1 for step, work in pairs)
        ideal = timeline(PipelineOrder(pipeline), micro, lambda stage, kind: 1.0).bubble
        if rank == 0:
            print(
                f"| {schedule} | {chunks} | {step * 1e3:.0f} | {bubble:.1%}"
                f" | {theory(schedule, chunks, world, micro):.1%} | {ideal:.1%} |",
                flush=True,
            )


class Exposure(NamedTuple):
    """Number of all-gathers that compute waited for, in a step on one rank."""

    exposed: int
    """Gathers that compute waited for longer than a twentieth of their time."""
    count: int
    """Number of all gathers of weights in the step."""
    first: int
    """Exposed gathers of the first block that the rank computes."""
    share: float
    """Time for which compute waited for gathers / time of all gathers."""


def exposure(transfers: list[TimedTransfer]) -> Exposure:
    """Return which of the gathers among `transfers` were exposed."""
    gathers = [t for t in transfers if t.kind == "all_gather" and t.channel == Axis.WEIGHT]
    waited = [t for t in gathers if t.exposed > t.duration / 20]
    # The first gathers are at most the embedding's and those of the 4 linears of a block.
    first = {t.label for t in gathers[: 1 + 4]}
    seconds = sum(t.duration for t in gathers)
    return Exposure(
        len(waited),
        len(gathers),
        sum(t.label in first for t in waited),
        sum(t.exposed for t in gathers) / seconds if seconds else 0.0,
    )


def exposed_gathers(rank: int, world: int, o: argparse.Namespace) -> None:
    """Time all schedules in isp mode, weights sharded over two ranks; rank 0 prints the table."""
    size, micro = world // 2, o.micro * (world // 2)
    if rank == 0:
        print(f"\n### gathers: {size} stages x weight 2, {micro} micro-batches,", end=" ")
        print("transfers half of compute\n")
        print(GATHER_COLUMNS)
        print(
            "| schedule | chunks | stage | gathers | exposed | of the first block | exposed time |"
        )
        print("|---|---|---|---|---|---|---|")
    for schedule, chunks in SCHEDULES:
        parallel = ParallelConfig(
            tensor=TensorConfig(mode=Mode.ISP),
            weight=WeightConfig(size=2),
            pipeline=PipelineConfig(size=size, schedule=schedule, num_chunks=chunks),
        )
        found = Contestant(rank, world, parallel, o, micro)
        moved = [t for t in (found.timed(), found.timed())[1][1] if t.channel == Axis.WEIGHT]
        sent = sum(t.sent_bytes for t in moved)
        # In a step a rank sleeps for 3 products of each of the 4 linears in each of its layers.
        work = 3 * 4 * o.layers / size * micro * o.ms / 1e3
        found.link.bytes_per_second = sent / (0.5 * work)
        rounds = [exposure(found.timed()[1]) for _ in range(o.rounds)]
        own = sorted(rounds)[len(rounds) // 2]
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, own)
        if rank == 0:
            for stage in range(size):
                e = max(everybody[2 * stage : 2 * stage + 2])
                print(
                    f"| {schedule} | {chunks} | {stage} | {e.count} | {e.exposed} | {e.first}"
                    f" | {e.share:.1%} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"columns of bubbles:\n{BUBBLE_COLUMNS}\ncolumns of gathers:\n{GATHER_COLUMNS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ms", type=float, default=4.0, help="sleep of a linear for a product")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--micro", type=int, default=2, help="micro-batches for each stage")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each schedule")
    parser.add_argument("--quick", action="store_true", help="tiny, to see whether it runs")
    o = parser.parse_args()
    if o.quick:
        o.ms, o.rounds = 1.0, 1
    for world in (2, 4):
        run_ranks(world, bubbles, world, o, timeout_seconds=3600.0)
    run_ranks(4, exposed_gathers, 4, o, timeout_seconds=3600.0)


if __name__ == "__main__":
    main()
