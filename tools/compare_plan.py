"""Compare step times that `isp plan` predicts with measured ones, over a modelled link.

    python tools/compare_plan.py --paced 40              # about ten minutes, on a quiet machine
    python tools/compare_plan.py --quick                 # tiny, to see whether it runs

The steps are the ISP rows of `bench_overlap`, whose matmuls sleep. The plan is given the same link
and a device of the same speed.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import bench_overlap
from bench_overlap import Bench
from table_parser import table_parser

from isp.core.mesh import Axis, Topology
from isp.core.mesh.config import OverlapUnit, ParallelConfig, TensorConfig, WeightConfig
from isp.planner.case import PlanCase
from isp.planner.fabric import DeviceSpec, Fabric, LinkSpec
from isp.planner.predict import predict

COLUMNS = """\
measured    median of step / step of compute alone
predicted   the same, by the plan
off         predicted / measured - 1; ** marks more than 15%
"""
GOAL = 0.15
"""The largest relative error of a prediction that is not marked."""


def plan_of(bench: Bench, weight: WeightConfig) -> PlanCase:
    """Describe the benchmark's step to `isp plan`: model, layout, tokens and memory settings.

    `weight` are the settings of the weight group; its size is replaced by the number of ranks.
    """
    parallel = ParallelConfig(tensor=TensorConfig(size=1), weight=replace(weight, size=bench.world))
    return PlanCase(
        # The benchmark attends over 16 tokens only: a window of 1 makes attention free in the plan.
        model=replace(bench.compute.model, sliding_window=1),
        parallel=parallel,
        topology=Topology.create(bench.world, parallel),
        rows=1,
        tokens=bench.compute.paced_tokens,
        micro_num=1,
        dtype="float32",
        on_cpu=True,
    )


def fabric_of(bench: Bench, speed: float) -> Fabric:
    """Return a fabric with the modelled link, and a device as fast as the paced compute."""
    # The plan counts a latency for each hop of a ring; the modelled link has one for a transfer.
    hops = bench.world - 1
    teraflops = bench.compute.paced_gflops / 1e3
    device = DeviceSpec(
        name="sleeps",
        kind="cpu",
        memory_gib=64,
        tflops=teraflops,
        wide_tflops=teraflops,
        efficiency=1,
        attention_efficiency=1,
        gb_per_second=1e9,
    )
    link = LinkSpec(gb_per_second=speed / 1e9, latency_us=bench.latency * 1e6 / hops)
    return Fabric(name="modelled link", devices_per_node=bench.world, device=device, inside=link)


def rows_of(bench: Bench) -> dict[str, WeightConfig]:
    """Return the benchmark's rows that the plan can predict, by name, as weight configurations."""
    rows = {"ours, no overlap": WeightConfig(overlap=False)}
    for launch in ("wqkv", "attn", "wo", "w1"):
        rows[f"ours, per layer, {launch}"] = WeightConfig(
            launch_allgather_before=bench_overlap.LaunchPoint(launch)
        )
    rows["ours, per module"] = WeightConfig(forward_overlap_per=OverlapUnit.MODULE)
    return rows


class Comparison(Bench):
    """`bench_overlap` with the rows of ISP only, and a table that compares them with the plan."""

    def run(self) -> None:
        self._check()
        known = rows_of(self)
        self.rows = [self.alone, *(row for row in self.rows if row.name in known)]
        self._timed(next(row for row in self.rows if row.name.endswith("wo")))
        moves = [t for t in self.log.take() if t.channel == Axis.WEIGHT]
        for ratio in self.options.ratios:
            alone = statistics.median(
                s.step for s in self._rounds([self.alone], 3)[self.alone.name]
            )
            speed = self._calibrate(moves, ratio * alone)
            samples = self._rounds(self.rows, self.options.rounds)
            if self.rank == 0:
                self._print(ratio, samples, speed, known)

    def _print(self, ratio, samples, speed, known) -> None:  # type: ignore[no-untyped-def]
        print(f"\n### {self.world} ranks, communication {ratio:g} of compute\n")
        print("| | measured | predicted | off |\n|---|---:|---:|---:|")
        of_compute = samples[self.alone.name]
        for name, weight in known.items():
            pairs = zip(samples[name], of_compute, strict=True)
            measured = statistics.median(s.step / a.step for s, a in pairs)
            found = predict(plan_of(self, weight), fabric_of(self, speed))
            predicted = found.step / (found.step - found.exposed)
            off = predicted / measured - 1
            mark = "" if abs(off) <= GOAL else " **"
            print(f"| {name} | {measured:.3f} | {predicted:.3f} | {off:+.1%}{mark} |")


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="CPU ranks")
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 1.0],
        help="time of a step's transfers / time of compute alone",
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each row")
    parser.add_argument(
        "--paced",
        type=float,
        metavar="GFLOPS",
        default=40.0,
        help="speed of a core for which matmuls sleep",
    )
    parser.add_argument("--quick", action="store_true", help="tiny, to see whether it runs")
    options = parser.parse_args()
    shape = {"hidden": 256, "layers": 8, "vocab": 512, "batch": 4, "tokens": 512}
    if options.quick:
        options.ratios, options.rounds, options.ranks = [0.5], 1, [2]
        shape = {"hidden": 128, "layers": 3, "vocab": 128, "batch": 1, "tokens": 512}
        options.paced = 20.0
    vars(options).update(shape, tries=1, latency_us=50.0, link="modelled", trace=None)
    print(COLUMNS, end="", flush=True)
    for world in options.ranks:
        bench_overlap.run_ranks(world, options, bench=Comparison)


if __name__ == "__main__":
    main()
