"""Compare step times of ISP's data parallel wrappers and torch's DistributedDataParallel.

    python tools/bench_data_parallel.py --ranks 2 4 --steps 30

Every rank holds one copy of the model for each wrapper. The wrappers take turns, a step each, and
each round another one begins, so that other programs on the machine disturb all equally. A step is
forward, backward with the reduction of gradients, and SGD. A time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from table_parser import table_parser
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isp.core.comm import Channel
from isp.data_parallel import DataParallelBucket, DataParallelNaive
from isp.parity.forked import run_ranks

COLUMNS = """\
median ms      time of a step; fastest ms: the shortest one
of DDP         median over rounds of the time / DistributedDataParallel's
processor ms   processor time of a step, which other programs disturb less; then its ratio to DDP's
"""
REFERENCE = "DistributedDataParallel"
Step = Callable[[Tensor], None]
Times = dict[str, list[tuple[float, float]]]


def build(width: int, depth: int) -> nn.Module:
    """Build `depth` MLP blocks without residuals, with the same weights on every rank."""
    torch.manual_seed(0)
    blocks = []
    for _ in range(depth):
        blocks += [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()]
        blocks += [nn.Linear(4 * width, width)]
    return nn.Sequential(*blocks)


def steps_of(width: int, depth: int) -> dict[str, Step]:
    """Build the training step of each data-parallel wrapper, by name.

    Each has a process group of its own.
    """

    def theirs(view: bool) -> Step:
        model = DistributedDataParallel(
            build(width, depth), process_group=dist.new_group(), gradient_as_bucket_view=view
        )
        return training_step(model, model.zero_grad)

    def ours(kind: type[DataParallelBucket] | type[DataParallelNaive]) -> Step:
        model = kind(build(width, depth), Channel(dist.new_group()))
        return training_step(model, model.reset)

    return {
        REFERENCE: theirs(view=False),
        "DDP, gradient_as_bucket_view": theirs(view=True),
        "DataParallelBucket": ours(DataParallelBucket),
        "DataParallelNaive": ours(DataParallelNaive),
    }


def training_step(model: nn.Module, begin: Callable[[], None]) -> Step:
    """Build a training step (`begin`, forward, backward, SGD) of a wrapped model."""
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)

    def step(x: Tensor) -> None:
        begin()
        model(x).square().mean().backward()
        sgd.step()

    return step


def measure(rank: int, world: int, options: argparse.Namespace) -> None:
    """Time all data-parallel wrappers in turn on this rank; rank 0 prints the table."""
    steps = steps_of(options.width, options.depth)
    x = torch.randn(options.batch, options.width)
    names = list(steps)
    times: Times = {name: [] for name in names}
    for i in range(options.warmup + options.steps):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            # Begin together, so that no rank waits for a later one in the timed part.
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            steps[name](x)
            end = time.perf_counter(), time.process_time()
            seconds = torch.tensor(end, dtype=torch.float64) - torch.tensor(
                begin, dtype=torch.float64
            )
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if i >= options.warmup:
                times[name].append((seconds[0].item(), seconds[1].item()))
    if rank == 0:
        report(world, times)


def report(world: int, times: Times) -> None:
    """Print the table: a line for each wrapper."""
    columns = ("median ms", "fastest ms", "of DDP", "processor ms", "of DDP")
    print(f"{f'{world} ranks (gloo)':<30}" + "".join(f"{c:>14}" for c in columns))
    for name, pairs in times.items():
        (wall, cpu), (wall_ddp, cpu_ddp) = (
            zip(*pairs, strict=True),
            zip(*times[REFERENCE], strict=True),
        )
        print(
            f"{name:<30}{statistics.median(wall) * 1e3:>14.1f}{min(wall) * 1e3:>14.1f}"
            f"{median_ratio(wall, wall_ddp):>14.3f}{statistics.median(cpu) * 1e3:>14.1f}"
            f"{median_ratio(cpu, cpu_ddp):>14.3f}"
        )


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over rounds of `ours` / `theirs`."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="CPU ranks")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each wrapper")
    parser.add_argument("--warmup", type=int, default=5, help="steps before these")
    parser.add_argument("--width", type=int, default=384, help="features of the model")
    parser.add_argument("--depth", type=int, default=8, help="blocks of the model")
    parser.add_argument("--batch", type=int, default=256, help="rows of a rank")
    options = parser.parse_args()
    parameters = sum(p.numel() for p in build(options.width, options.depth).parameters())
    print(f"{parameters / 1e6:.1f}M float32 parameters, batch {options.batch}, 1 thread a rank\n")
    print(COLUMNS, flush=True)
    for world in options.ranks:
        run_ranks(world, measure, world, options, timeout_seconds=3600.0)


if __name__ == "__main__":
    main()
