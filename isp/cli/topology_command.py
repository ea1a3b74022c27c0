"""`isp topology` prints the groups of ranks, and how a weight is cut over them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from isp.cli.options import Run, positive
from isp.cli.output import say

if TYPE_CHECKING:  # `isp --help` imports this file, and must not wait for the runtime
    from isp.core.mesh.topology import Topology

__all__ = ["add_options", "describe_cuts"]


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
        help="make ranks with the same heads neighbors, not ranks with different heads",
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
        ExpertConfig,
        Mode,
        ParallelConfig,
        PipelineConfig,
        Sequence2DConfig,
        TensorConfig,
        WeightConfig,
        Zero1Config,
    )
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
    """Parse a shape such as 16x8; for argparse."""
    outputs, _, inputs = text.partition("x")
    if not (outputs.isdecimal() and inputs.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write, for example, 16x8")
    return positive(outputs), positive(inputs)


def describe_cuts(topology: Topology, shape: tuple[int, int]) -> str:
    """Return a picture of a linear's weight, `shape` (outputs, inputs), cut over its ranks.

    One line for each shard, with all ranks of the first stage that hold it. Raises ValueError if
    `topology` cannot cut a weight of this shape.
    """
    from isp.core.mesh.partition import chunk_range
    from isp.core.mesh.topology import Axis

    group, size = topology.groups(Axis.WEIGHT)[0], f"{shape[0]}x{shape[1]}"
    holders = [_ranks(topology.group_of(Axis.WEIGHT_DATA, rank)) for rank in group]

    def lines(length: int, place: str) -> list[str]:
        shards = [chunk_range(length, len(group), i) for i in range(len(group))]
        spans = [place.format(f"{s.start}:{s.stop}" if s else "nothing") for s in shards]
        width = max(map(len, spans))
        return [f"  {span:<{width}}  {who}" for span, who in zip(spans, holders, strict=True)]

    by_rows = lines(shape[0], "[{}, :]")
    if topology.mode.gathers_weights:
        # Gathered weights may be cut unevenly: the last ranks hold less, or nothing.
        title = f"column and row linear, weight {size}: cut by outputs, gathered where it is used"
        return "\n".join([title, *by_rows])
    for length, what, role in ((shape[0], "outputs", "column"), (shape[1], "inputs", "row")):
        if length % len(group):
            raise ValueError(
                f"the {length} {what} of a weight of {size} do not divide by the {len(group)}"
                f" tensor ranks, over which {topology.mode} cuts a {role} linear: use a multiple"
                f" of {len(group)}"
            )
    return "\n".join(
        [
            f"column linear, weight {size}: cut by outputs, each rank computes its share of them",
            *by_rows,
            f"row linear, weight {size}: cut by inputs, the ranks' products are summed",
            *lines(shape[1], "[:, {}]"),
        ]
    )


def _ranks(holders: Sequence[int]) -> str:
    """Return the ranks that hold one shard as a list in words.

    Of more than four ranks only the first three and the last are named.
    """
    if len(holders) == 1:
        return f"rank {holders[0]}"
    shown = [str(rank) for rank in holders]
    return f"ranks {', '.join(shown if len(shown) <= 4 else [*shown[:3], '..', shown[-1]])}"
