"""`isp layouts` and `isp calibrate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from isp.cli.options import Run, add_nproc, add_option, add_planning, check_planned, positive
from isp.cli.output import say
from isp.cli.progress import show_progress

__all__ = ["add_calibrate", "add_layouts"]


def add_layouts(parser: argparse.ArgumentParser) -> Run:
    """Add `isp layouts` options besides the configuration."""
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
    """Print the layouts of a configuration, the fastest first."""
    from isp.cli.auto_layout import command_line, layout_words
    from isp.config import load_config, to_plain, to_yaml
    from isp.planner import as_json, as_text, load_fabric, search

    if args.write is not None and Path(args.write).exists():
        raise ValueError(f"--write {args.write} exists: name another file, or remove it")
    config = load_config(args.config, args.overrides)
    check_planned(config)
    fabric = load_fabric(args.fabric)
    fabric.check(args.world)
    found = search(config, args.world, fabric, rows=args.batch, progress=show_progress)
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
    """Add `isp calibrate`'s options."""
    add_nproc(parser)
    add_option(parser, "out", "FILE", str, "write the fabric to FILE (without it: print it)")
    parser.add_argument(
        "--quick", action="store_true", help="measure little, only to test that it works"
    )
    return _run_calibrate


def _run_calibrate(args: argparse.Namespace) -> int:
    """Measure this machine, and write its fabric."""
    from isp.cli.launch import start_ranks, world_size

    world_size(args.nproc)
    if args.nproc is not None:
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
