"""Compare Muon's update by home ranks with AdamW's and with a gather of all matrices.

    python tools/bench_optimizer.py            # 4 ranks, the quickstart's weights; a minute

Only the update is measured, on 4 ranks that each have a quarter of each weight, over a modelled
link. Newton-Schulz does not compute but sleeps, so that ranks do not compete for cores; it sleeps
for its FLOPs at the speed at which a rank computes a training step in `--step-ms`. The speed of the
link is chosen so that the transfers of weights and gradients of a step take `--ratio` times that.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from paced import Link
from table_parser import table_parser
from torch import Tensor, nn

import isp.core.optim.matrices
from isp.core.comm import Mesh
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh import Axis, ParallelConfig, Topology, WeightConfig
from isp.core.mesh.layout import Matrices, ParameterLayout
from isp.core.optim.buckets import grouped
from isp.core.optim.config import MuonConfig, OptimizerConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.matrices import Matrix, MatrixUpdates
from isp.core.optim.zero1 import Zero1Optimizer
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.parity.forked import run_ranks

COLUMNS = """\
ratio        transfers of weights and gradients of a step, as a share of its compute
adamw        each rank updates its rows
homes        the rows of each matrix are sent to its home rank and back, as `optimizer.name: muon`
gathered     every rank gathers every matrix, one layer ahead, and orthogonalizes it
update       median time of the update, on the slowest rank
exposed      median time for which the slowest rank waited for transfers
of a step    exposed / `--step-ms`
sent         MiB that rank 0 sent
"""
RANKS, LAYERS, HIDDEN, INSIDE, KEYS, TOKENS = 4, 4, 160, 432, 80, 1024
SHAPES = [(HIDDEN, HIDDEN)] * 2 + [(KEYS, HIDDEN)] * 2 + [(INSIDE, HIDDEN)] * 2 + [(HIDDEN, INSIDE)]
ELEMENTS = LAYERS * sum(a * b for a, b in SHAPES)
UNLIMITED = 1e15
WAYS = ("adamw", "homes", "gathered")


class Gathered:
    """Replaces `MatrixUpdates`: every rank gathers and updates all matrices."""

    def __init__(self, updates: MatrixUpdates, mesh: Mesh, pace: Callable[[int], None]) -> None:
        self._updates, self._channel, self._pace = updates, mesh[Axis.STAGE], pace
        self.members = updates.members
        self._layer_flops = sum(bucket.all_flops for bucket in updates.buckets) / LAYERS

    def run(self, average: Any, step: Any, meanwhile: Callable[[], None]) -> Iterator[Any]:
        """Update all matrices, with the arguments of `MatrixUpdates.run`.

        A layer's gradients are gathered while the layer before it is updated (which sleeps here).
        """
        tag, parts = Tag(Purpose.MATRIX, tensor="gathered"), self._updates._parts
        # Let each group have the buckets of one layer, as it is full with the FLOPs of a layer.
        parts = grouped(parts, lambda _: 0, lambda part: part[0].all_flops, self._layer_flops)

        def launch(number: int) -> list[Any]:
            for _, moments, _ in parts[number]:
                self._updates._stream.pass_through(average, moments)
            grads = (grad for bucket, *_ in parts[number] for grad in bucket._grads)
            return [self._channel.all_gather(grad, tag=tag) for grad in grads]

        coming = launch(0)
        # Update the other parameters while the first gathers are in flight.
        meanwhile()
        for number, of_layer in enumerate(parts):
            here, coming = coming, launch(number + 1) if number + 1 < len(parts) else []
            for pending in here:
                pending.wait()
            for bucket, _, masters in of_layer:
                self._pace(bucket.all_flops)
                self._updates._stream.pass_through(step, masters)
                yield bucket.members


def _optimizer(mesh: Mesh, name: str, bucket_bytes: int) -> tuple[MainGradients, Zero1Optimizer]:
    items = []
    for layer in range(LAYERS):
        for number, shape in enumerate(SHAPES):
            layout = ParameterLayout(
                global_shape=shape,
                reduce_over=Axis.WEIGHT_DATA,
                parts=RANKS,
                index=mesh[Axis.WEIGHT].rank,
                matrices=Matrices(),
            )
            shard = nn.Parameter(torch.randn(layout.local_shape))
            items.append(ShardedParameter(f"{layer}.{number}", shard, layout))
    gradients = MainGradients(items, mesh, rows_of=mesh[Axis.ZERO1])
    config = OptimizerConfig(name="adamw" if name == "adamw" else "muon")
    return gradients, Zero1Optimizer(gradients, mesh, config, bucket_bytes=bucket_bytes)


def _measure(rank: int, options: argparse.Namespace) -> dict[str, list[tuple[float, float, int]]]:
    """Time all ways to update matrices.

    Returns for each way a tuple a round: milliseconds of the update, milliseconds of it that wait
    for transfers, and bytes sent.
    """
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    link = Link(UNLIMITED, 0.0)
    parallel = ParallelConfig(weight=WeightConfig(size=RANKS))
    mesh = Mesh(Topology.create(RANKS, parallel), rank)
    seconds, flops = options.step_ms / 1e3, 6 * ELEMENTS * TOKENS / RANKS
    # A step moves the float32 weights twice (gathered in forward and in backward) and the gradients
    # once.
    moved = 3 * 4 * ELEMENTS * (RANKS - 1) / RANKS

    def pace(number: int) -> None:
        time.sleep(number / flops * seconds)

    def sleep(xs: Sequence[Tensor], keys: MuonConfig) -> None:
        for x in xs:
            pace(Matrix((0, 0), tuple(x.shape)).flops(keys))

    # In the way `homes`, sleep instead of computing Newton-Schulz.
    isp.core.optim.matrices.make_orthogonal = sleep
    made = {way: _optimizer(mesh, way, options.bucket_kib * 1024) for way in WAYS}
    gathers = Gathered(made["gathered"][1].matrices, mesh, pace)
    made["gathered"][1].matrices = gathers  # type: ignore[assignment]
    link.slow(mesh.opened)
    found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    # Round 0 warms up over an unlimited link, and is not counted.
    for number in range(options.rounds + 1):
        link.bytes_per_second = moved / (seconds * options.ratio) if number else UNLIMITED
        for way, (gradients, optimizer) in made.items():
            gradients.zero()
            for item in gradients.parameters:
                gradients.grad(item.parameter).normal_()
            # Reduce gradients here, before the timed part. The norm is passed to the timed `step`
            # below, so that it is not computed there.
            gradients.reduce()
            mesh.host.all_reduce(torch.zeros(1)).wait()
            mesh.log.collect()
            began = time.perf_counter()
            optimizer.step(1e-3, norm=1.0)
            took = time.perf_counter() - began
            totals = mesh.log.totals(mesh.log.take())
            slowest = torch.tensor([took, totals.exposed_seconds], dtype=torch.float64)
            took, exposed = mesh.host.all_reduce(slowest, op="max").wait().tolist()
            if number:
                found[way].append((took * 1e3, exposed * 1e3, totals.sent_bytes))
    return found


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--step-ms", type=float, default=400, help="compute of a step on a rank")
    parser.add_argument(
        "--ratio",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 1.0],
        help="transfers of a step / its compute",
    )
    parser.add_argument("--bucket-kib", type=int, default=64, help="KiB of gradients in a bucket")
    parser.add_argument("--rounds", type=int, default=5, help="timed updates of each way")
    options = parser.parse_args()
    print(
        f"{RANKS} ranks, {LAYERS} layers of hidden {HIDDEN}, {TOKENS} tokens a step of"
        f" {options.step_ms:g} ms, buckets of {options.bucket_kib} KiB a rank"
    )
    print(COLUMNS)
    print(f"{'ratio':>6}{'':>10}{'update':>10}{'exposed':>10}{'of a step':>11}{'sent':>10}")
    for ratio in options.ratio:
        options.ratio = ratio
        found = run_ranks(RANKS, _measure, options, timeout_seconds=300)[0]
        for way, rounds in found.items():
            took, exposed, sent = (statistics.median(of) for of in zip(*rounds, strict=True))
            share = exposed / options.step_ms
            print(
                f"{ratio:>6g}{way:>10}{took:>7.0f} ms{exposed:>7.1f} ms{share:>10.1%}"
                f"{sent / 2**20:>6.2f} MiB"
            )


if __name__ == "__main__":
    main()
