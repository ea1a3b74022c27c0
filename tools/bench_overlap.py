"""Measure how much communication of weights and gradients ISP and fully_shard hide.

    python tools/bench_overlap.py                     # over a modelled link, anywhere
    python tools/bench_overlap.py --link real         # over veth and tc tbf, root only
    python tools/bench_overlap.py --paced 40          # compute sleeps: ranks need few cores
    python tools/bench_overlap.py --trace wo          # also timelines of rows with wo in the name

A step is forward, backward and the reduction of gradients of the same decoder with the same weights
and tokens. Losses and gradients of all rows are compared before anything is timed. The rows take
turns, a step each, and each round another one begins; a time is that of the slowest rank. A step
during which other programs were busy is repeated, and the least disturbed of `--tries` counts. The
speed of the link is chosen so that the transfers of a step, when nothing else runs, take `--ratios`
times as long as compute alone.

With `--paced`, each matmul with a weight runs on 16 tokens and then sleeps for the time that a core
of that speed needs for all tokens. This measures the schedule and the cost of the runtime itself,
and lets four ranks run on two cores.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from netns import Wires
from overlap_rows import (
    Compute,
    Row,
    compare,
    compute_alone,
    mesh_of,
    move,
    ours,
    theirs,
    traffic,
)
from paced import Link
from table_parser import table_parser

from isp.core.comm import Channel, CommLog, TimedTransfer
from isp.core.mesh import Axis
from isp.core.mesh.config import LaunchPoint, OverlapUnit
from model.config import ModelConfig

COLUMNS = """\
step ms      median time of a step
of compute   step / the step of `compute alone`
comm. ms     time of the row's bytes at the speed of the link, with latencies
excess ms    step minus compute alone, with what it costs the cores to move bytes; %: of comm.
of bound     excess / the bound's
blocked ms   time for which waits for transfers blocked; %: of comm.
peak         most bytes gathered at one time, divided by the bytes of a block's weights
rows         compute alone: whole weights on each rank, no transfers; traffic beside it: the same
             while a thread moves the same bytes; one rank a group: the runtime without transfers;
             the bound: what no schedule can hide: the gathers before the first matmul, the last
             reduce-scatter, and transfers of forward or backward that take longer than its compute
Differences and ratios are medians over rounds of the differences and ratios in a round.
"""
STAY = ", weights stay"
UNLIMITED = 1e15
"""Bytes per second of a link that takes no time."""
QUIET = 0.1
"""Largest share of the machine that other programs may use in a step that is not repeated."""


class Sample(NamedTuple):
    """Measures of one step of one row: each the largest over the ranks."""

    step: float
    """Seconds that the whole step took."""
    forward: float
    """Seconds from the start of the step to the end of its forward."""
    blocked: float
    """Seconds for which the step was blocked by waits for transfers."""
    sent_bytes: float
    num_transfers: float
    foreign: float
    """Processor time of other programs during the step, as a share of the machine's."""


class Bench:
    """Measures on one rank to make the tables for one number of ranks.

    Every rank makes one and calls `run`; rank 0 prints the tables.
    """

    def __init__(self, rank: int, world: int, options: argparse.Namespace, wires: Wires | None):
        self.rank, self.world, self.options, self.wires = rank, world, options, wires
        self.compute = compute_of(options)
        self.log = CommLog()
        self.latency = 0.0 if wires else options.latency_us * 1e-6
        self.link = None if wires else Link(UNLIMITED, 0.0)
        self.mesh = mesh_of(world, rank, log=self.log)
        self.channel = self.mesh[Axis.WEIGHT]
        self.alone = compute_alone(self.compute)
        self.rows = [self.alone, *self._size_one(), *self._ours(), *self._theirs()]
        if self.link is not None:
            self.link.slow(self.mesh.opened)
        self.traces: dict[str, tuple[float, float, float, list[TimedTransfer]]] = {}

    def run(self) -> None:
        """Check that all rows compute the same, then print a table for each ratio.

        A ratio is the time of communication / the time of compute, set by the speed of the link.
        """
        self._check()
        reference = next(row for row in self.rows if row.name == "ours, per layer, wo")
        self._timed(reference)
        moves = [t for t in self.log.take() if t.channel == Axis.WEIGHT]
        self.rows.insert(1, traffic(self.alone, moves, self.channel))
        for ratio in self.options.ratios:
            alone = statistics.median(
                s.step for s in self._rounds([self.alone], 5)[self.alone.name]
            )
            speed = self._calibrate(moves, ratio * alone)
            samples = self._rounds(self.rows, self.options.rounds)
            if self.rank == 0:
                print(f"\n### {self.world} ranks, communication {ratio:g} of compute", end="")
                foreign = statistics.median(s.foreign for own in samples.values() for s in own)
                print(f" ({speed / 1e6:.0f} MB/s; other programs took {max(0.0, foreign):.0%})\n")
                self._print_table(samples, moves, speed)
                self._print_traces()

    # -- rows of the table -------------------------------------------------------------------

    def _size_one(self) -> Iterator[Row]:
        """Yield the rows of ISP without any transfer: they show the cost of its runtime."""
        solo = mesh_of(1, 0)
        yield ours("one rank a group, overlap off", self.compute, solo, overlap=False)
        yield ours("one rank a group, overlap on", self.compute, solo)

    def _ours(self) -> Iterator[Row]:
        """Yield the rows of ISP with weights sharded over all ranks."""
        yield ours("ours, no overlap", self.compute, self.mesh, overlap=False)
        for launch in LaunchPoint:
            yield ours(f"ours, per layer, {launch}", self.compute, self.mesh, launch=launch)
        yield ours("ours, per module", self.compute, self.mesh, unit=OverlapUnit.MODULE)
        yield ours("ours" + STAY, self.compute, self.mesh, reshard_after_forward=False)

    def _theirs(self) -> Iterator[Row]:
        """Yield the rows of fully_shard."""
        default = self.channel
        # Reduce by torch's own reduce-scatter, which over gloo sends twice as many bytes as the
        # channel's.
        if self.wires:
            default = Channel(self.channel.group, name="weight", log=self.log, sum_locally=False)
        yield theirs("fully_shard, default", self.compute, default, prefetch=False)
        name = "fully_shard, async prefetch"
        yield theirs(name, self.compute, self.channel, prefetch=True)
        name += ", reduce deferred"
        yield theirs(name, self.compute, self.channel, prefetch=True, defer_reduce=True)
        yield theirs(
            f"{name}{STAY}",
            self.compute,
            self.channel,
            prefetch=True,
            defer_reduce=True,
            reshard_after_forward=False,
        )

    # -- measuring ---------------------------------------------------------------------------

    def _check(self) -> None:
        """Check that every row computes the loss and the gradients of compute alone."""
        compare(self.alone, [row for row in self.rows[1:] if "one rank" not in row.name], 1e-5)

    def _calibrate(self, moves: list[TimedTransfer], expected: float) -> float:
        """Set the link so that `moves`, with nothing else, take `expected` seconds.

        Returns its speed in bytes per second.
        """
        sent = sum(t.sent_bytes for t in moves)
        speed = sent / max(0.1 * expected, expected - self.latency * len(moves))
        if self.link is not None:
            self.link.bytes_per_second, self.link.latency_seconds = speed, self.latency
            return speed
        assert self.wires is not None
        # A real link also carries headers, and the token bucket lets the first megabyte pass at
        # once: correct the speed twice by the measured time.
        for _ in range(2):
            self.wires.limit(self.rank, speed)
            seconds = [self._clock(lambda: move(moves, self.channel)) for _ in range(3)]
            speed *= statistics.median(seconds) / expected
        self.wires.limit(self.rank, speed)
        return sent / expected

    def _clock(self, act: Callable[[], object]) -> float:
        """Return the seconds of `act` on the slowest rank."""
        dist.barrier()
        begin = time.perf_counter()
        act()
        return self._slowest([time.perf_counter() - begin])[0]

    def _slowest(self, values: list[float]) -> list[float]:
        """Return the largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        result: list[float] = tensor.tolist()
        return result

    def _rounds(self, rows: list[Row], rounds: int) -> dict[str, list[Sample]]:
        """Time `rows` in turn; return their samples by name, without those of a warm-up round."""
        samples: dict[str, list[Sample]] = {row.name: [] for row in rows}
        for i in range(rounds + 1):
            for row in rows[i % len(rows) :] + rows[: i % len(rows)]:
                sample = self._undisturbed(row)
                if i > 0:
                    samples[row.name].append(sample)
        return samples

    def _undisturbed(self, row: Row) -> Sample:
        """Repeat a step while other programs are busy; return the least disturbed one.

        All ranks make the same decision, since `foreign` is the same on all of them.
        """
        tries: list[Sample] = []
        while len(tries) < self.options.tries and not any(s.foreign < QUIET for s in tries):
            tries.append(self._timed(row))
        return min(tries, key=lambda s: s.foreign)

    def _timed(self, row: Row) -> Sample:
        """Make a step of `row` on all ranks, and return its measures; `traces` keeps transfers."""
        if row.pool is not None:
            # Begin from what is leased now, so that the peak is that of this step.
            row.pool.peak_leased_bytes = row.pool.leased_bytes
        self.log.collect()
        dist.barrier()
        begin, used, busy = time.perf_counter(), time.process_time(), _busy_seconds()
        result = row.step()
        end, used, busy = time.perf_counter(), time.process_time() - used, _busy_seconds() - busy
        # This is the row of compute alone beside traffic (`overlap_rows.traffic`).
        if row.name.startswith("compute alone, "):
            # In that row `forward_ended` is the end of compute: transfers after it do not count.
            end = result.forward_ended
            # Drop the transfers from the log: no compute waits for them.
            self.log.collect()
        transfers = list(self.log.transfers)
        self.traces[row.name] = (begin, result.forward_ended, end, transfers)
        totals = CommLog.totals(transfers)
        sample = Sample(
            end - begin,
            result.forward_ended - begin,
            totals.exposed_seconds,
            totals.sent_bytes,
            totals.num_transfers,
            busy / (end - begin) / (os.cpu_count() or 1),
        )
        own = torch.tensor(used / (end - begin) / (os.cpu_count() or 1), dtype=torch.float64)
        dist.all_reduce(own)
        slowest = Sample(*self._slowest(list(sample)))
        return slowest._replace(foreign=slowest.foreign - own.item())

    # -- printing ----------------------------------------------------------------------------

    def _print_table(
        self, samples: dict[str, list[Sample]], moves: list[TimedTransfer], speed: float
    ) -> None:
        alone = samples[self.alone.name]
        forward = statistics.median(s.forward for s in alone)
        backward = statistics.median(s.step - s.forward for s in alone)
        bound = self._bound(moves, forward, backward, speed)
        print(
            "| | step ms | of compute | comm. ms | excess ms | % | of bound | blocked ms | % ",
            end="",
        )
        print("| peak |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
        for row in self.rows:
            own = samples[row.name]
            step = statistics.median(s.step for s in own)
            factor = statistics.median(s.step / a.step for s, a in zip(own, alone, strict=True))
            cells = [row.name, f"{step * 1e3:.0f}", f"{factor:.3f}"]
            comm = own[0].sent_bytes / speed + own[0].num_transfers * self.latency
            if own[0].num_transfers:
                late = statistics.median(s.step - a.step for s, a in zip(own, alone, strict=True))
                blocked = statistics.median(s.blocked for s in own)
                cells += [f"{comm * 1e3:.0f}", f"{late * 1e3:.0f}", f"{late / comm:.0%}"]
                cells += [f"{late / bound:.2f}", f"{blocked * 1e3:.0f}", f"{blocked / comm:.0%}"]
            cells += [""] * (9 - len(cells)) + [self._peak(row)]
            print(f"| {' | '.join(cells)} |")
        step = statistics.median(s.step for s in alone) + bound
        comm = sum(t.sent_bytes for t in moves) / speed + len(moves) * self.latency
        cells = [
            "the bound",
            f"{step * 1e3:.0f}",
            f"{step / (step - bound):.3f}",
            f"{comm * 1e3:.0f}",
        ]
        cells += [f"{bound * 1e3:.0f}", f"{bound / comm:.0%}", "1.00", "", "", ""]
        print(f"| {' | '.join(cells)} |")

    def _peak(self, row: Row) -> str:
        """Return the peak of gathered bytes / the bytes of a block's weights, as text.

        It is empty for rows without a memory pool.
        """
        if row.pool is None or not row.pool.allocations:
            return ""
        peak = row.pool.peak_leased_bytes
        return f"{peak / unit_bytes(self.compute.model):.2f}"

    def _bound(
        self, moves: list[TimedTransfer], forward: float, backward: float, speed: float
    ) -> float:
        """Return the seconds of transfers that no schedule could hide.

        `forward` and `backward` are seconds of compute alone.
        """

        def seconds(transfers: list[TimedTransfer]) -> float:
            return sum(t.sent_bytes / speed + self.latency for t in transfers)

        gathers = [t for t in moves if t.kind == "all_gather"]
        labels = [t.label for t in gathers]
        again = [t for i, t in enumerate(gathers) if t.label in labels[:i]]
        # The gathers of the embedding and the first linear have no matmul before them to hide
        # behind.
        first = gathers[:2]
        going_forward = [t for i, t in enumerate(gathers) if t.label not in labels[:i]][2:]
        reduces = [t for t in moves if t.kind == "reduce_scatter"]
        return (
            seconds(first)
            + seconds(reduces[-1:])
            + max(0.0, seconds(going_forward) - forward)
            + max(0.0, seconds(again) + seconds(reduces[:-1]) - backward)
        )

    def _print_traces(self) -> None:
        for name, (begin, forward_ended, end, transfers) in self.traces.items():
            if self.options.trace is None or self.options.trace not in name or not transfers:
                continue
            print(f"\n{name}: forward until {(forward_ended - begin) * 1e3:.1f} ms", end="")
            print(f", step {(end - begin) * 1e3:.1f} ms (rank 0, last round)\n")
            print(f"{'launched':>9} {'ended':>9} {'blocked':>8} ms   (# while in flight)")
            for t in transfers:
                times = (t.launched - begin, t.ended - begin, t.exposed)
                bar = _bar(times[0], times[1], end - begin)
                numbers = " ".join(
                    f"{x * 1e3:{w}.1f}" for x, w in zip(times, (9, 9, 8), strict=True)
                )
                print(f"{numbers}  |{bar}| {t.kind} {t.label}")


def _busy_seconds() -> float:
    """Return the processor time that all programs used since boot, summed over cores.

    `steal`, which other virtual machines on the same hardware used, counts as well.
    """
    with open("/proc/stat") as stat:
        user, nice, system, _, _, _, _, steal = (int(n) for n in stat.readline().split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def _bar(begin: float, end: float, whole: float, width: int = 60) -> str:
    """Return a line of `width` characters for [0, whole], with # from `begin` to `end`."""
    first = min(width - 1, int(begin / whole * width))
    last = min(width - 1, max(first, int(end / whole * width)))
    return " " * first + "#" * (last - first + 1) + " " * (width - 1 - last)


def unit_bytes(config: ModelConfig) -> int:
    """Return the bytes of a block's float32 weights, without its norms."""
    q, kv = config.num_heads * config.head_size, config.kv_heads * config.head_size
    return 4 * config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)


def compute_of(options: argparse.Namespace) -> Compute:
    """Return the sizes of the model and of its input on each rank, by `options`.

    With --paced, the input is one row of 16 tokens, and matmuls sleep for the time that the tokens
    of all rows would take.
    """
    model = ModelConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=max(1, options.hidden // 32),
        intermediate_size=-(-options.hidden * 8 // 3 // 32) * 32,
    )
    if options.paced:
        tokens = options.batch * options.tokens
        return Compute(model, 1, 16, paced_gflops=options.paced, paced_tokens=tokens)
    return Compute(model, options.batch, options.tokens)


def rank_main(
    rank: int,
    world: int,
    folder: str,
    options: argparse.Namespace,
    wires: Wires | None,
    bench: type[Bench],
) -> None:
    """Run `bench` as one forked rank, and end the process."""
    # Never collect objects of the parent: their destructors may wait for threads, which a fork
    # does not copy.
    gc.freeze()
    if wires:
        wires.enter(rank)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    bench(rank, world, options, wires).run()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def run_ranks(world: int, options: argparse.Namespace, *, bench: type[Bench] = Bench) -> None:
    """Fork `world` ranks that run `bench`, and wait for them; if one fails, all are ended."""
    wires = Wires(world) if options.link == "real" else None
    context = mp.get_context("fork")
    with wires or nullcontext(), tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=rank_main, args=(r, world, folder, options, wires, bench), daemon=True
            )
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            while any(process.is_alive() for process in ranks):
                if any(process.exitcode for process in ranks):
                    break
                time.sleep(0.1)
            if failed := {r: p.exitcode for r, p in enumerate(ranks) if p.exitcode}:
                raise SystemExit(
                    f"error: ranks failed (exit codes by rank: {failed}): see their errors above"
                )
        finally:
            for process in ranks:
                process.kill()


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--link", choices=("modelled", "real"), default="modelled")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="CPU ranks")
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75, 1.0],
        help="time of a step's transfers / time of compute alone",
    )
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each row")
    parser.add_argument("--tries", type=int, default=4, help="most tries for an undisturbed step")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of a modelled transfer")
    parser.add_argument(
        "--paced",
        type=float,
        metavar="GFLOPS",
        default=0.0,
        help="let matmuls sleep as on a core of this speed (0: compute them)",
    )
    parser.add_argument("--trace", metavar="TEXT", help="print timelines of rows with TEXT in them")
    parser.add_argument("--quick", action="store_true", help="tiny, to see whether it runs")
    return parser


def main() -> None:
    options = options_parser().parse_args()
    if options.quick:
        options.ratios, options.rounds, options.tries = [0.5], 2, 1
        options.hidden, options.layers, options.vocab = 32, 2, 64
        options.batch, options.tokens = 1, 64
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch", end=" ")
    print(f"{torch.__version__}, gloo over a {options.link} link, one thread a rank")
    print(f"{compute_of(options)}\n")
    print(COLUMNS, end="", flush=True)
    for world in options.ranks:
        run_ranks(world, options)


if __name__ == "__main__":
    main()
