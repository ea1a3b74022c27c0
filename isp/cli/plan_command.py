"""`isp layouts` and `isp calibrate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from isp.cli.options import add_nproc, positive

if TYPE_CHECKING:
    from isp.planner import Candidate

__all__ = ["add_calibrate_options", "add_plan_options", "run_calibrate", "run_plan"]

_DEFAULT_FABRIC = "h100x8_ib400"


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add `isp layouts` options besides the configuration."""
    parser.add_argument(
        "--world", type=positive, required=True, metavar="N", help="ranks to plan for"
    )
    parser.add_argument(
        "--fabric",
        default=_DEFAULT_FABRIC,
        metavar="FILE",
        help="the machine: a YAML file, or one of those in configs/fabrics by name"
        f" (default: {_DEFAULT_FABRIC})",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        metavar="ROWS",
        help="sequences of a step over all ranks (default: those of the configuration)",
    )
    parser.add_argument(
        "--top", type=positive, default=10, metavar="N", help="layouts to show (default: 10)"
    )
    parser.usage = (
        "isp layouts CONFIG --world N [--fabric FILE] [--batch ROWS] [--top N] [--json]"
        " [--section.key value ...]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")


def run_plan(args: argparse.Namespace) -> int:
    """Print the layouts of a configuration, the fastest first."""
    from isp.config import ConfigError, load_config
    from isp.planner import as_json, as_text, evaluate, load_fabric, rows_of, search

    config = load_config(args.config, args.overrides)
    fabric = load_fabric(args.fabric)
    fabric.check(args.world)
    on_cpu = fabric.device.kind == "cpu"
    rows = args.batch or rows_of(config, args.world)
    own: Candidate | str
    try:
        own = evaluate(config, args.world, fabric, on_cpu=on_cpu)
    except ConfigError as error:
        own = str(error)
    found = search(config, args.world, fabric, rows=rows, on_cpu=on_cpu)
    show = as_json if args.json else as_text
    print(show(found, own, fabric, world_size=args.world, rows=rows, top=args.top))
    return 0 if found.fitting else 1


def add_calibrate_options(parser: argparse.ArgumentParser) -> None:
    """Add `isp calibrate`'s options."""
    add_nproc(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="write the fabric to FILE (without it: print it)"
    )
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")


def run_calibrate(args: argparse.Namespace) -> int:
    """Measure this machine, and write its fabric."""
    from isp.cli.launch import launch, world_size

    world_size(args.nproc)
    if args.nproc is not None:
        words = [*(["--out", args.out] if args.out else []), *(["--quick"] if args.quick else [])]
        return launch(args.nproc, ["-m", "isp", "calibrate", *words])
    from isp.planner.calibrate import calibrate

    fabric = calibrate(quick=args.quick)
    if fabric is None:
        return 0
    if args.out is None:
        print(fabric.to_yaml(), end="")
    else:
        Path(args.out).write_text(fabric.to_yaml(), encoding="utf-8")
        print(f"{args.out}: {fabric.name}; plan with --fabric {args.out}")
    return 0
