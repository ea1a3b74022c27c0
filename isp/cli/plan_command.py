"""`isp layouts`, `isp plan` and `isp calibrate`: plans of memory and time for a machine."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isp.cli.options import Run, add_nproc, add_option, add_planning, check_planned, positive
from isp.cli.output import compute_on_one_thread, say, say_progress, show_progress
from isp.utils.text import counted

if TYPE_CHECKING:
    from isp.planner.fabric import Fabric

__all__ = ["add_calibrate", "add_layouts", "add_plan", "gib"]


def add_layouts(parser: argparse.ArgumentParser) -> Run:
    """Add the options of `isp layouts` besides the configuration."""
    parser.add_argument(
        "--world", type=positive, required=True, metavar="N", help="ranks to plan for"
    )
    add_planning(parser, "seconds")
    sequences = "sequences per step over all ranks (default: the configuration's)"
    add_option(parser, "batch", "N", positive, sequences)
    add_option(parser, "top", "N", positive, "layouts to show", 10)
    add_option(
        parser, "write", "FILE", str, "write the configuration of the fastest layout to FILE"
    )
    return _run_layouts


def _run_layouts(args: argparse.Namespace) -> int:
    """Print the layouts of a configuration, the fastest first; returns 1 if none fits."""
    say_progress(f"planning {args.config}: tracing its model", mixes=not args.json)
    from isp.cli.auto_layout import command_line, layout_words
    from isp.config import load_config, to_plain, to_yaml
    from isp.planner import as_json, as_text, load_fabric, search

    if args.write is not None and Path(args.write).exists():
        raise ValueError(f"--write {args.write} exists: name another file, or remove it")
    compute_on_one_thread()
    config = load_config(args.config, args.overrides)
    check_planned(config)
    fabric = load_fabric(args.fabric)
    fabric.check(args.world)
    progress = partial(show_progress, mixes=not args.json)
    found = search(config, args.world, fabric, rows=args.batch, progress=progress)
    say((as_json if args.json else as_text)(found, args.top))
    if found.fitting:
        words = layout_words(config, to_plain(found.fitting[0].config))
        command = command_line(args.config, args.world, fabric, [*args.overrides, *words])
        say(f"\ntrain with it:\n  {command}", error=args.json)
        if args.write is not None:
            best = load_config(args.config, [*args.overrides, *words])
            Path(args.write).write_text(to_yaml(best, of_decoder=False), encoding="utf-8")
            say(f"{args.write}: its configuration", error=True)
    return 0 if found.fitting else 1


def add_calibrate(parser: argparse.ArgumentParser) -> Run:
    """Add the options of `isp calibrate`."""
    add_nproc(parser)
    add_option(parser, "out", "FILE", str, "write the fabric to FILE (without it: print it)")
    parser.add_argument(
        "--quick", action="store_true", help="measure little, only to test that it works"
    )
    return _run_calibrate


def _run_calibrate(args: argparse.Namespace) -> int:
    """Measure this machine, and print or write its fabric."""
    from isp.cli.launch import start_ranks, world_size

    world_size(args.nproc)
    if args.nproc is not None:
        ranks = counted(args.nproc, "rank")
        say_progress(f"measuring links, compute and memory on {ranks}: a minute or a few")
        return start_ranks(args.nproc, args.words)
    from isp.planner.calibrate import calibrate

    fabric = calibrate(quick=args.quick)
    if fabric is None:
        return 0
    if args.out is None:
        say(fabric.to_yaml(), end="")
    else:
        Path(args.out).write_text(fabric.to_yaml(), encoding="utf-8")
        say(f"{args.out}: {fabric.name}; plan with --fabric {args.out}")
    return 0


# -- isp plan --------------------------------------------------------------------------------


_UNITS = {"": 2**30, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 1e6, "GB": 1e9, "TB": 1e12}
"""Bytes per unit of a size."""


def add_plan(parser: argparse.ArgumentParser) -> Run:
    """Add the options of `isp plan` besides the configuration."""
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
    return _run_plan


def gib(text: str) -> float:
    """Parse a size such as 80, 80GiB, 80GB or 1.5TiB, and return it in GiB."""
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


def _run_plan(args: argparse.Namespace) -> int:
    """Print the memory of a configuration, and with --max-seq-len the longest sequences."""
    say_progress(f"planning {args.config}: tracing its model", mixes=not args.json)
    from isp.config import load_config
    from isp.planner import load_fabric
    from isp.planner.exchange import choose_exchange
    from isp.planner.lengths import Budget, LadderStep, Planned, climb
    from isp.planner.lengths_report import MemoryPlan, lengths_as_json, lengths_as_text

    compute_on_one_thread()
    config = load_config(args.config, args.overrides)
    check_planned(config)
    world = args.world or config.parallel.least_ranks
    fabric = _with_memory(load_fabric(args.fabric), args)
    fabric.check(world)
    budget = Budget.of(fabric, world)
    config, exchange = choose_exchange(config, world, budget.device, on_cpu=fabric.on_cpu)
    planned = Planned(config, world, fabric.on_cpu)
    seq_len = config.data.seq_len
    memory, growth = planned.peak(seq_len), planned.growth(seq_len)
    longest, steps = None, list[LadderStep]()
    if args.max_seq_len:
        say_progress("longest sequence of the configuration as it is", mixes=not args.json)
        longest = planned.longest(budget)
        steps = climb(planned, budget, progress=partial(show_progress, mixes=not args.json))
    plan = MemoryPlan(planned, exchange, fabric, budget, memory, growth, longest, steps)
    say(lengths_as_json(plan) if args.json else lengths_as_text(plan))
    return 0 if plan.fits else 1


def _with_memory(fabric: Fabric, args: argparse.Namespace) -> Fabric:
    """Return the machine with the memory sizes given on the command line."""
    device, host = fabric.device, fabric.host
    if args.memory is not None:
        device = replace(device, memory_gib=args.memory)
    if args.host_memory is not None:
        host = replace(host, memory_gib=args.host_memory)
    return replace(fabric, device=device, host=host)
