"""`isp plan`: a layout's memory, the longest sequences that fit, and what would help."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from isp.cli.options import Run, add_option, add_planning, check_planned, positive
from isp.cli.output import say
from isp.cli.progress import show_progress

if TYPE_CHECKING:
    from isp.planner.fabric import Fabric

__all__ = ["add_options"]

_UNITS = {"": 2**30, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 1e6, "GB": 1e9, "TB": 1e12}
"""Bytes of the units of a size."""


def add_options(parser: argparse.ArgumentParser) -> Run:
    """Add its options besides the configuration."""
    ranks = "ranks to plan for (default: as many as the layout needs)"
    add_option(parser, "world", "N", positive, ranks)
    parser.add_argument(
        "--max-seq-len",
        action="store_true",
        help="find the longest data.seq_len that fits, with each setting that saves memory",
    )
    add_option(parser, "memory", "GIB", gib, "memory of a device (default: the fabric's)")
    of_host = "memory of a node, which its ranks share (default: the fabric's, or no limit)"
    add_option(parser, "host-memory", "GIB", gib, of_host)
    add_planning(parser, "tokens")
    return _run


def gib(text: str) -> float:
    """A size such as 80, 80GiB, 80GB or 1.5TiB, in GiB."""
    number = text.rstrip("TGMiB")
    unit = text.removeprefix(number)
    try:
        size = float(number) * _UNITS[unit] / _UNITS["GiB"]
    except (KeyError, ValueError):
        size = 0.0
    if not 0 < size < 2**30:
        raise argparse.ArgumentTypeError(
            f"{text} must be a size: 80 and 80GiB are multiples of 2^30 bytes, 80GB of 10^9; also"
            f" TiB, TB, MiB and MB"
        )
    return size


def _run(args: argparse.Namespace) -> int:
    """Print the memory of a configuration, and with --max-seq-len the longest that fits."""
    from isp.config import load_config
    from isp.planner import load_fabric
    from isp.planner.exchange import choose_exchange
    from isp.planner.lengths import Budget, Planned, climb
    from isp.planner.lengths_report import MemoryPlan, lengths_as_json, lengths_as_text

    config = load_config(args.config, args.overrides)
    check_planned(config)
    world = args.world or config.parallel.least_ranks
    fabric = _with_memory(load_fabric(args.fabric), args)
    fabric.check(world)
    budget = Budget.of(fabric, world)
    config, exchange = choose_exchange(config, world, budget.device, on_cpu=fabric.on_cpu)
    planned = Planned(config, world, fabric.on_cpu)
    seq_len = config.data.seq_len
    plan = MemoryPlan(
        planned,
        exchange,
        fabric,
        budget,
        planned.peak(seq_len),
        planned.growth(seq_len),
        planned.longest(budget) if args.max_seq_len else None,
        climb(planned, budget, progress=show_progress) if args.max_seq_len else (),
    )
    say(lengths_as_json(plan) if args.json else lengths_as_text(plan))
    return 0 if plan.fits else 1


def _with_memory(fabric: Fabric, args: argparse.Namespace) -> Fabric:
    """The machine with the sizes of its memories that were given."""
    device, host = fabric.device, fabric.host
    if args.memory is not None:
        device = replace(device, memory_gib=args.memory)
    if args.host_memory is not None:
        host = replace(host, memory_gib=args.host_memory)
    return replace(fabric, device=device, host=host)
