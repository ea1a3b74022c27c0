"""Compare ISP's attention over head and context ranks with Ulysses, a p2p ring and torch's ring.

    python tools/bench_context.py                 # over a modelled link, 4 and 8 ranks
    python tools/bench_context.py --link real     # over veth and tc tbf, root only
    python tools/bench_context.py --quick         # tiny, to see whether it runs

A step is one layer's attention, forward and backward, of a row that is split over all ranks: one
document, or packed documents of log-normal lengths. First the results of each way are compared with
those of one process, in float64. In the timed steps attention computes nothing: it sleeps for a
time proportional to its pairs of a query and a key, so that ranks do not compete for cores. `--ms`
is the sleep of a rank that has an equal share of the pairs. The speed of the link is chosen so that
the bytes of Ulysses alone take `--ratios` times that.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time

import torch
import torch.distributed as dist
from bench_balance import log_normal_row
from bench_overlap import UNLIMITED, Bench, Sample, run_ranks
from context_rows import BothWaysLink, Heads, PacedAttention, Way, Ways, pairs
from netns import Wires
from overlap_rows import Row, StepResult
from table_parser import table_parser

from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.mask import AttentionMask
from isp.core.comm import CommLog

COLUMNS = """\
rows: h x c           our attention over h head ranks and c context ranks: context ranks send keys
                      and values by all-to-all
      1 x p, ring     the same split, but context ranks send blocks around a ring
      p2p ring        a zig-zag split that ignores documents: every block visits every rank
      torch's ring    the functions of torch's `context_parallel`, called directly: that itself
                      refuses a CPU, and there is none for packed rows
sent MB               MB that the rank which sends most sends in a step
of least              bytes sent by all ranks / the fewest that this split needs: heads that change
                      ranks, and keys that are attended to on another rank
step                  median time of a step on the slowest rank / `--ms`
of best               median over rounds of the step / the fastest row's step
exposed               median time for which the slowest rank waited for transfers / `--ms`
"""


class ContextBench(Bench):
    """Measures on one rank to make the tables for one number of ranks.

    Every rank makes one and calls `run`; rank 0 prints the tables.
    """

    def __init__(self, rank: int, world: int, options: argparse.Namespace, wires: Wires | None):
        self.rank, self.world, self.options, self.wires = rank, world, options, wires
        self.log, self.latency, self.traces = CommLog(), 0.0, {}
        self.link = None if wires else BothWaysLink(UNLIMITED, options.latency_us * 1e-6)
        self.heads = Heads(options.heads, options.kv_heads, options.head_size)

    def run(self) -> None:
        """Check all ways to compute attention, then time them and print the tables.

        There are tables for one document and for packed documents.
        """
        draw = random.Random(self.options.seed)
        tokens = self.options.tokens
        packed = tuple(log_normal_row(draw, tokens, tokens / 50, 1.3))
        for name, lengths in (("one document", (tokens,)), ("packed", packed)):
            self._check_ways(tuple(max(1, n * 32 * self.world // tokens) for n in lengths))
            self._compare(
                f"{name}, {len(lengths)} documents" if len(lengths) > 1 else name, lengths
            )

    def _check_ways(self, lengths: tuple[int, ...]) -> None:
        """Check that every way gives the outputs and gradients of one process, in float64."""
        # A last document fills the row up to a multiple of 2 * world, as zig-zag needs.
        lengths = (*lengths, -sum(lengths) % (2 * self.world) or 2 * self.world)
        if len(lengths) == 2:
            lengths = (sum(lengths),)
        generator = torch.Generator().manual_seed(0)
        counts = (self.heads.query, self.heads.kv, self.heads.kv, self.heads.query)
        q, k, v, dout = (
            torch.randn(
                1, sum(lengths), n, self.heads.size, generator=generator, dtype=torch.float64
            )
            for n in counts
        )
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        out = CpuAttention()(*whole, mask=AttentionMask.of_documents(lengths))
        expected = [out.detach(), *torch.autograd.grad(out, whole, dout)]
        for way in Ways(lengths, self.heads, CpuAttention(), log=self.log, link=self.link)():
            own = [x[:, way.tokens].requires_grad_() for x in (q, k, v)]
            out = way.attend(*own)
            found = [out.detach(), *torch.autograd.grad(out, own, dout[:, way.tokens])]
            for x, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(
                    x, wanted[:, way.tokens], rtol=0, atol=1e-9, msg=way.name
                )

    def _compare(self, name: str, lengths: tuple[int, ...]) -> None:
        """Time all ways at each ratio of communication to compute; rank 0 prints the tables.

        A ratio is reached by the speed of the link.
        """
        share = self.heads.query * pairs(lengths, lengths) / self.world
        even = self.options.ms / 1e3
        # A backward sleeps 2.5 times as long as a forward, so both together are 3.5 forwards.
        local = PacedAttention(even / 3.5 / share)
        ways = Ways(lengths, self.heads, local, log=self.log, link=self.link)()
        rows = [self._row(way) for way in ways]
        sent = {row.name: self._sent(row) for row in rows}
        ulysses = sent["Ulysses alone"][0]
        for ratio in self.options.ratios:
            # Set the speed so that the bytes of Ulysses alone take `ratio` times as long as
            # compute.
            self._limit(ulysses / (ratio * even))
            samples = self._rounds(rows, self.options.rounds)
            if self.rank == 0:
                print(f"\n**{self.world} ranks, {name}, ", end="")
                print(f"communication of Ulysses alone {ratio:g} of compute**\n")
                self._print(ways, sent, samples)
        self._limit(UNLIMITED)

    def _row(self, way: Way) -> Row:
        h = self.heads
        q, k, v = (
            torch.zeros(1, len(way.tokens), n, h.size, requires_grad=True)
            for n in (h.query, h.kv, h.kv)
        )

        def step() -> StepResult:
            out = way.attend(q, k, v)
            forward_ended = time.perf_counter()
            torch.autograd.grad(out, (q, k, v), out.detach())
            return StepResult(torch.zeros(()), forward_ended)

        return Row(way.name, step, dict)

    def _sent(self, row: Row) -> tuple[float, float]:
        """Return the bytes sent in a step: by the rank that sends most, and by all ranks."""
        self.log.collect()
        row.step()
        total = CommLog.totals(self.log.take()).sent_bytes
        sent = torch.tensor(total, dtype=torch.float64)
        most = sent.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(sent)
        return most.item(), sent.item()

    def _limit(self, bytes_per_second: float) -> None:
        if self.link is not None:
            self.link.bytes_per_second = bytes_per_second
        elif self.wires is not None and bytes_per_second < UNLIMITED:
            self.wires.limit(self.rank, bytes_per_second)
        elif self.wires is not None:
            self.wires.unlimit(self.rank)

    def _print(
        self,
        ways: list[Way],
        sent: dict[str, tuple[float, float]],
        samples: dict[str, list[Sample]],
    ) -> None:
        even, width = self.options.ms / 1e3, torch.finfo(torch.float32).bits // 8
        best = [min(own[i].step for own in samples.values()) for i in range(self.options.rounds)]
        print("| | sent MB | of least | step | of best | exposed |\n|---|---:|---:|---:|---:|---:|")
        for way in ways:
            own, (most, total) = samples[way.name], sent[way.name]
            cells = [
                way.name,
                f"{most / 1e6:.1f}",
                f"{total / (width * way.least_elements):.2f}",
                f"{statistics.median(s.step for s in own) / even:.3f}",
                f"{statistics.median(s.step / b for s, b in zip(own, best, strict=True)):.2f}",
                f"{statistics.median(s.blocked for s in own) / even:.0%}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--link", choices=("modelled", "real"), default="modelled")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="CPU ranks")
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 1.0],
        help="times of the transfers of Ulysses alone, divided by --ms",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each row")
    parser.add_argument("--tries", type=int, default=4, help="most tries for an undisturbed step")
    parser.add_argument(
        "--ms", type=float, default=400.0, help="compute of a step on each rank, if balanced"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the row")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="of the packed documents")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of a modelled transfer")
    parser.add_argument("--quick", action="store_true", help="tiny, to see whether it runs")
    options = parser.parse_args()
    if options.quick:
        options.ratios, options.rounds, options.tries, options.ms = [0.5], 2, 1, 20.0
        options.tokens, options.heads, options.kv_heads, options.head_size = 512, 8, 4, 8
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch", end=" ")
    print(f"{torch.__version__}, gloo over a {options.link} link, one thread a rank\n")
    print(COLUMNS, end="", flush=True)
    for world in options.ranks:
        run_ranks(world, options, bench=ContextBench)


if __name__ == "__main__":
    main()
