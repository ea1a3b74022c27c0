"""Compare step times of ISP and torch's fully_shard, with weights sharded over all GPUs.

    torchrun --nproc-per-node 8 tools/bench_fully_shard.py
    torchrun --nproc-per-node 2 tools/bench_fully_shard.py --device cpu --quick

As `bench_overlap`, but over the links of the machine: a step is forward, backward and the reduction
of gradients of the same decoder, in bfloat16 with gradients reduced in float32; each rank has a row
of its own. fully_shard uses its own collectives and streams. First all losses and gradients are
compared. Then the rows of the table take turns, a step each, and each round another one begins.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap_rows import Compute, Row, compare, compute_alone, llama_layers, mesh_of, ours, theirs
from table_parser import table_parser

from isp.core.attention.local import make_local_attention
from isp.core.comm import Mesh, World
from isp.core.mesh import Axis
from isp.core.mesh.config import OverlapUnit
from isp.metrics import device_name

COLUMNS = """\
tokens a rank   length of the row of each rank
who             `compute alone`: every rank has the whole model and nothing is communicated;
                `ours`: ISP; `weights stay`: gathered in forward, kept for backward
ms a step       median on the slowest rank
of compute      that median / the median of `compute alone`
"""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Largest difference of losses and gradients, as a share of their norms: bfloat16 has 8 bits."""


def compute_of(options: argparse.Namespace, mesh: Mesh, device: torch.device) -> Compute:
    """Return what a rank computes: layers with the sizes of llama3.1-8b, on rows of tokens.

    The rows have the first of `options.lengths`; the caller sets the other lengths later.
    """
    dtype = getattr(torch, options.dtype)
    model = llama_layers(options.layers, quick=options.quick)
    attention = make_local_attention(
        device=device, dtype=dtype, head_dim=model.head_size, group=4, everyone=mesh.host
    )
    tokens = options.lengths[0]
    return Compute(model, 1, tokens, device=device, dtype=dtype, attention=attention)


def contestants(compute: Compute, mesh: Mesh) -> list[Row]:
    """Build the rows of the table: compute alone, then ways to shard the weights over all ranks."""
    apart = mesh.open(Axis.WEIGHT, "weight_reduce")
    return [
        compute_alone(compute),
        ours("ours, no overlap", compute, mesh, overlap=False),
        ours("ours", compute, mesh),
        ours("ours, own_reduce_group", compute, mesh, apart=apart),
        ours("ours, per module", compute, mesh, unit=OverlapUnit.MODULE),
        ours("ours, weights stay", compute, mesh, reshard_after_forward=False),
        theirs("fully_shard", compute, None, prefetch=False),
        theirs("fully_shard, explicit prefetch", compute, None, prefetch=True),
        theirs(
            "fully_shard, explicit prefetch, weights stay",
            compute,
            None,
            prefetch=True,
            reshard_after_forward=False,
        ),
    ]


def seconds(row: Row, device: torch.device) -> float:
    """Return the time of a step on the slowest rank. All ranks must call this."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    dist.barrier()
    wait()
    begin = time.perf_counter()
    row.step()
    wait()
    taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def main() -> None:
    """Compare losses and gradients, then print the table, on every rank that torchrun starts."""
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="of a row")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each row")
    parser.add_argument("--quick", action="store_true", help="tiny, to see whether it runs")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.lengths, options.rounds = 2, [64], 2
    index = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", index) if options.device == "cuda" else torch.device("cpu")
    with World(device) as world:
        if world.size == 1:
            sys.exit(
                "error: one rank shards nothing: start at least two, by torchrun --nproc-per-node 2"
            )
        mesh = mesh_of(world.size, world.rank)
        found = measure(options, mesh, device)
        if world.rank == 0 and options.json:
            options.json.write_text(json.dumps(found, indent=1))


def measure(options: argparse.Namespace, mesh: Mesh, device: torch.device) -> list[dict[str, Any]]:
    """Return the lines of the table, one for each way and length; rank 0 prints them."""
    compute = compute_of(options, mesh, device)
    rows = contestants(compute, mesh)
    compare(rows[0], rows[1:], TOLERANCE[compute.dtype])
    found: list[dict[str, Any]] = []
    for tokens in options.lengths:
        compute.tokens = tokens
        taken: dict[str, list[float]] = {row.name: [] for row in rows}
        for turn in range(options.rounds + 1):
            first = turn % len(rows)
            for row in rows[first:] + rows[:first]:
                taken[row.name].append(seconds(row, device))
        # The first turn warms up and is left out.
        medians = {name: statistics.median(times[1:]) for name, times in taken.items()}
        alone = medians[rows[0].name]
        found += [
            {"who": name, "tokens": tokens, "ms": median * 1e3, "of_compute": median / alone}
            for name, median in medians.items()
        ]
    if mesh.rank == 0:
        ranks = mesh.topology.world_size
        print(f"{ranks} x {device_name(device)}, torch {torch.__version__}, {options.dtype}\n")
        print(COLUMNS)
        print("| tokens a rank | who | ms a step | of compute |\n|---:|---|---:|---:|")
        for one in found:
            print("| {tokens:,} | {who} | {ms:.1f} | {of_compute:.3f} |".format(**one))
    return found


if __name__ == "__main__":
    main()
