"""The bubble of each pipeline schedule against its theory, and the gathers it leaves exposed.

    python tools/bench_pipeline.py            # two and four ranks; takes minutes
    python tools/bench_pipeline.py --quick    # tiny, to see whether it runs

The real training step, whose linears sleep for `--ms` in place of each of their three products, so
that ranks do not compete for cores and a forward costs as much as each half of a backward.

    bubble      step time over the work of a rank, minus one; work is what its products sleep, as
                measured in a run without a pipeline, by the share of the layers that a rank has
    theory      1F1B (p-1)/m; over v chunks 1/v of it; with split backwards a third of that
    simulated   `isp.core.pipeline.order.timeline` of the same order of work
    exposed     isp over a modelled link: gathers of a step that a rank waited for longer than a
                twentieth of their time, of all its gathers; and those of the first block, which
                nothing can hide on the first stage
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
    """A training step on this rank, which can be timed."""

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
            if layer.name != traced.trace.head:
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
        """Seconds of a step on the slowest rank, and this rank's transfers of it."""
        world = self.mesh[Axis.WORLD]
        world.all_reduce(torch.zeros(1)).wait()
        self.mesh.log.collect()
        start = time.perf_counter()
        self.step(self.batches, 1e-4)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        transfers = self.mesh.log.take()
        return world.all_reduce(seconds, op="max").wait().item(), transfers


def theory(schedule: PipelineSchedule, chunks: int, size: int, micro: int) -> float:
    """The bubble where a forward and each half of a backward cost the same."""
    return (size - 1) / micro / chunks / (3 if schedule.splits_backward else 1)


def bubbles(rank: int, world: int, o: argparse.Namespace) -> None:
    """A table of all schedules."""
    micro = o.micro * world
    alone = Contestant(0, 1, ParallelConfig(), o, 1)
    if rank == 0:
        print(f"\n### bubble: {world} ranks, {micro} micro-batches, {o.layers} layers\n")
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
    """Gathers of a step on the rank with the most exposed ones."""

    exposed: int
    count: int
    first: int
    """Exposed ones of the first block that the rank works on."""
    share: float
    """Exposed time of gathers over their time."""


def exposure(transfers: list[TimedTransfer]) -> Exposure:
    """What is exposed of the gathers among `transfers`."""
    gathers = [t for t in transfers if t.kind == "all_gather" and t.channel == Axis.WEIGHT]
    waited = [t for t in gathers if t.exposed > t.duration / 20]
    first = {t.label for t in gathers[: 1 + 4]}
    seconds = sum(t.duration for t in gathers)
    return Exposure(
        len(waited),
        len(gathers),
        sum(t.label in first for t in waited),
        sum(t.exposed for t in gathers) / seconds if seconds else 0.0,
    )


def exposed_gathers(rank: int, world: int, o: argparse.Namespace) -> None:
    """A table of all schedules in isp mode, weights cut over two ranks."""
    size, micro = world // 2, o.micro * (world // 2)
    if rank == 0:
        print(f"\n### gathers: {size} stages x weight 2, {micro} micro-batches,", end=" ")
        print("transfers half of compute\n")
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
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ms", type=float, default=4.0, help="of a product")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--micro", type=int, default=2, help="micro-batches for each stage")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    o = parser.parse_args()
    if o.quick:
        o.ms, o.rounds = 1.0, 1
    for world in (2, 4):
        run_ranks(world, bubbles, world, o, timeout_seconds=3600.0)
    run_ranks(4, exposed_gathers, 4, o, timeout_seconds=3600.0)


if __name__ == "__main__":
    main()
