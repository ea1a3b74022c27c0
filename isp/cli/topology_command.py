"""`isp topology`: prints the groups of ranks, and how a weight is cut over them."""

from __future__ import annotations

import argparse

from isp.cli.options import Run, positive
from isp.cli.output import say

__all__ = ["add_options"]


def add_options(parser: argparse.ArgumentParser) -> Run:
    """Add the sizes of the groups, and the shape of a weight."""
    from isp.core.mesh.config import Mode

    sizes = {
        "--world": "number of ranks",
        "--tensor": "ranks that share one sequence",
        "--context": "isp: ranks of a tensor group that attend with the same heads",
        "--pipeline": "pipeline stages",
        "--weight": "isp: ranks that share one copy of the weights",
        "--expert": "ranks of a weight group (isp) or tensor group that share a layer's experts",
    }
    for name, meaning in sizes.items():
        required = name == "--world"
        parser.add_argument(
            name, type=positive, default=1, required=required, metavar="N", help=meaning
        )
    parser.add_argument(
        "--context-first",
        action="store_true",
        help="make ranks with the same heads neighbours, not ranks with different heads",
    )
    parser.add_argument(
        "--zero1",
        type=int,
        default=-1,
        metavar="N",
        help="ranks that share optimizer states; -1: all",
    )
    parser.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        default=Mode.ISP.value,
        help="mode (default: isp)",
    )
    parser.add_argument(
        "--shape",
        type=_shape,
        metavar="OUTxIN",
        help="draw how a weight of this shape is sharded, rank by rank",
    )
    return _run


def _run(args: argparse.Namespace) -> int:
    """Print the groups of a layout."""
    from isp.core.mesh.config import (
        DevicePlacementConfig,
        Mode,
        ParallelConfig,
        PipelineConfig,
        Sequence2DConfig,
        TensorConfig,
        WeightConfig,
        Zero1Config,
    )
    from isp.core.mesh.experts import ExpertConfig
    from isp.core.mesh.picture import describe_cuts
    from isp.core.mesh.topology import Topology

    mode = Mode(args.mode)
    if args.context > 1 and not mode.slices_batch:
        raise ValueError(
            f"--context {args.context} needs --mode {Mode.ISP}, not {mode}: use that, or --context"
            f" 1"
        )
    parallel = ParallelConfig(
        tensor=TensorConfig(size=args.tensor, mode=mode),
        weight=WeightConfig(size=args.weight),
        pipeline=PipelineConfig(size=args.pipeline),
        zero1=Zero1Config(size=args.zero1),
        expert=ExpertConfig(size=args.expert),
        sequence_2D=Sequence2DConfig(
            enable=True,
            context_size=args.context,
            device_placement_strategy=DevicePlacementConfig(head_first=not args.context_first),
        ),
    )
    topology = Topology.create(args.world, parallel)
    picture = "" if args.shape is None else describe_cuts(topology, args.shape)
    say(topology.describe())
    if picture:
        say(f"\n{picture}")
    return 0


def _shape(text: str) -> tuple[int, int]:
    outputs, _, inputs = text.partition("x")
    if not (outputs.isdecimal() and inputs.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write, for example, 16x8")
    return positive(outputs), positive(inputs)
