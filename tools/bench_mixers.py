"""Compare ways to scan a sequence over ranks (Mamba, delta rules), over a modelled link.

    python tools/bench_mixers.py                  # 2 and 4 ranks, over a modelled link
    python tools/bench_mixers.py --ms 5           # over a fast link, where compute counts
    python tools/bench_mixers.py --local          # one process, compared with transformers
    python tools/bench_mixers.py --quick          # tiny, to see whether it runs

A step is the scan of one document that is split over all ranks, forward and backward:

    heads       each rank scans the whole document for its share of the heads (all-to-all)
    state       each rank scans its tokens, and ranks exchange states of the recurrence
    gather      each rank gathers the whole input, scans it, and keeps the output of its tokens

The bytes of `heads` grow with the length of the document, those of `state` do not. The crossing is
the length at which both receive the same number of bytes; the lengths are chosen around it. The
speed of the link is chosen so that the states alone take `--ms` in each direction. Before anything
is timed, each way is compared with a scan in one process in float64, and its bytes with the plan's
formula, for one document and for packed documents.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from bench_balance import log_normal_row
from bench_overlap import UNLIMITED, Bench, run_ranks
from context_rows import BothWaysChannel, BothWaysLink
from netns import Wires
from overlap_rows import Row, StepResult
from torch import Tensor

from isp.core.comm import CommLog
from isp.core.megatron.mappings import gather_from_sequence_parallel_region
from isp.core.mesh.config import SequenceScan
from isp.core.mesh.sequence_split import SequenceSplit, Slice
from isp.core.mixers.convolution import convolve
from isp.core.mixers.delta_rule import DeltaRule
from isp.core.mixers.placement import Placement
from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.core.mixers.scan import cheaper_way, received_bytes, scan_by_heads, scan_by_state
from isp.core.mixers.state_space import Mamba2, SelectiveScan

COLUMNS = """\
states, MB      MB of states that the rank which receives most receives in a forward by `state`
planned         tokens of the crossing by the plan, from the bytes
measured        tokens at which `heads` and `state` take the same time: where the line through the
                differences of a round's times is zero; the median over rounds
off             measured / planned - 1
0.5, 1, 2       median ms of a step by heads, state and gather, on the slowest rank, for documents
                of 0.5, 1 and 2 times the planned crossing
auto loses      how much longer the way takes that `parallel.sequence_scan: auto` chooses than the
                fastest of heads and state, at the worst length
"""
LOCAL_COLUMNS = """\
theirs, ms      median processor time of the function of transformers, forward and backward
ours            median ratio of the time of ISP's scan to that, for one document, then for packed
                documents
"""
AROUND = 0.5, 0.75, 1.0, 1.5, 2.0
"""Lengths of the document, divided by the planned crossing."""


class Kind(NamedTuple):
    """A recurrence, and the shapes of its inputs for one token."""

    recurrence: Recurrence
    of_heads: tuple[tuple[int, ...], ...]
    """Shapes of the inputs that each head has of its own."""
    of_groups: tuple[tuple[int, ...], ...]
    """Shapes of the inputs that several heads share."""
    constants: tuple[tuple[int, ...], ...] = ()
    """Shapes of the inputs that do not depend on the token."""

    def inputs(self, tokens: int, dtype: torch.dtype = torch.float32) -> Inputs:
        """Draw inputs for `tokens` tokens, the same on all ranks."""
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=dtype)
        heads, groups = ([draw(tokens, *s) for s in x] for x in (self.of_heads, self.of_groups))
        constants = [draw(*s) for s in self.constants]
        # Move the constants and gates into their ranges: log decays and A are below 0, beta is
        # between 0 and 1.
        if isinstance(self.recurrence, DeltaRule):
            heads[1], heads[2] = -heads[1].abs(), heads[2].sigmoid()
        else:
            constants[0] = -constants[0].abs()
        return Inputs(tuple(heads), tuple(groups), tuple(constants))


def kinds(heads: int, size: int) -> dict[str, Kind]:
    """Return the measured recurrences, by name, with `heads` heads of this size.

    The selective scan has heads * size channels instead, with 16 states each.
    """
    rule, half = DeltaRule(normalise=True), max(1, heads // 2)
    return {
        "gated delta rule": Kind(rule, ((heads, size), (heads,), (heads,)), ((half, size),) * 2),
        "KDA": Kind(rule, ((heads, size), (heads, size), (heads,)), ((heads, size),) * 2),
        "Mamba2": Kind(
            Mamba2(dt_softplus=True), ((heads, size), (heads,)), ((1, size),) * 2, ((heads,),) * 3
        ),
        "selective scan": Kind(
            SelectiveScan(dt_softplus=True),
            ((heads * size,),) * 2,
            ((1, 16),) * 2,
            ((heads * size, 16), (heads * size,), (heads * size,)),
        ),
    }


Scan = Callable[[Recurrence, Inputs, Placement], Tensor]


def by_gather(recurrence: Recurrence, inputs: Inputs, placement: Placement) -> Tensor:
    """Scan the whole sequence on every rank, and return the output of this rank's tokens.

    This is what a model without a scan by heads or by state has to do.
    """
    of_tokens = (*inputs.of_heads, *inputs.of_groups)
    flat = torch.cat([x.flatten(1) for x in of_tokens], 1)
    whole = gather_from_sequence_parallel_region(flat, placement.channel)
    parts = whole.split([x[0].numel() for x in of_tokens], 1)
    found = [y.unflatten(1, x.shape[1:]) for x, y in zip(of_tokens, parts, strict=True)]
    cut = len(inputs.of_heads)
    everything = Inputs(tuple(found[:cut]), tuple(found[cut:]), inputs.constants)
    out = recurrence.scan(everything, placement.split.lengths, None)[0]
    return out.split(placement.sizes)[placement.channel.rank]


WAYS: dict[str, Scan] = {"heads": scan_by_heads, "state": scan_by_state, "gather": by_gather}


class MixersBench(Bench):
    """Measures on one rank to make the table for one number of ranks.

    Every rank makes one and calls `run`; rank 0 prints the table.
    """

    def __init__(self, rank: int, world: int, options: argparse.Namespace, wires: Wires | None):
        self.rank, self.world, self.options, self.wires = rank, world, options, wires
        self.log, self.latency, self.traces = CommLog(), 0.0, {}
        self.link = BothWaysLink(UNLIMITED, options.latency_us * 1e-6)
        self.channel = BothWaysChannel(
            dist.group.WORLD, name="tensor", log=self.log, link=self.link
        )

    def run(self) -> None:
        """Check each recurrence, then print its line of the table."""
        for name, kind in kinds(self.options.heads, self.options.head_size).items():
            self._check(kind)
            self._compare(name, kind)

    def _placement(self, lengths: tuple[int, ...]) -> Placement:
        """Split packed documents over the ranks: contiguous tokens, the same number on each."""
        ends = np.cumsum((0, *lengths))
        share = int(ends[-1]) // self.world
        # Rank r has tokens [r * share, (r + 1) * share): a slice for each document [a, b) there.
        held = tuple(
            tuple(
                Slice(i, max(0, r * share - a), min(b, (r + 1) * share) - a)
                for i, (a, b) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
                if max(a, r * share) < min(b, (r + 1) * share)
            )
            for r in range(self.world)
        )
        return Placement(self.channel, SequenceSplit(lengths, held))

    def _check(self, kind: Kind) -> None:
        """Check outputs, gradients and bytes of all ways, and the bytes of a convolution's halo.

        Raises AssertionError or SystemExit.
        """
        tokens = 64 * self.world
        packed = log_normal_row(random.Random(1), tokens, tokens / 12, 1.0)
        for lengths in ((tokens,), tuple(packed)):
            placement = self._placement(lengths)
            inputs = kind.inputs(tokens, torch.float64)
            expected, wanted = _with_gradients(
                inputs, lambda x, n=lengths: kind.recurrence.scan(x, n, None)[0]
            )
            own = slice(self.rank * tokens // self.world, (self.rank + 1) * tokens // self.world)
            mine = inputs.of_tokens(itemgetter(own))
            planned = received_bytes(kind.recurrence, mine, placement)
            for way, scan in WAYS.items():
                self.log.collect()
                out, gradients = _with_gradients(
                    mine, partial(_given, scan, kind.recurrence, placement), own=own
                )
                same = partial(torch.testing.assert_close, rtol=0, atol=1e-9, msg=way)
                same(out, expected[own])
                for x, y in zip(gradients, wanted, strict=True):
                    same(x, y[own])
                if way == "gather":
                    continue
                received, expected_bytes = self._received(), planned[SequenceScan(way)]
                if received != expected_bytes:
                    raise SystemExit(
                        f"error: a scan split by {way} received {received} bytes, but the formula"
                        f" of `received_bytes` gives {expected_bytes}: one of them is wrong"
                    )
            self._check_halo(placement, own)

    def _check_halo(self, placement: Placement, own: slice) -> None:
        """Check the bytes of a convolution over 4 tokens, which needs 3 of earlier ranks."""
        x = torch.zeros(own.stop - own.start, 8, requires_grad=True)
        self.log.collect()
        convolve(x, torch.zeros(8, 4), None, placement).sum().backward()
        planned = placement.halo(3).most_received * 8 * x.element_size()
        received = self._received()
        if received != planned:
            raise SystemExit(
                f"error: the halo had {received} bytes, but `most_received` gives {planned}: one of"
                " them is wrong"
            )

    def _received(self) -> int:
        """Return the bytes received in a forward by the rank that receives most.

        The log counts only bytes sent. A backward sends back what its forward received, and its
        transfers are the second half of the log, since each transfer has a transposed one.
        """
        transfers = self.log.take()
        return int(self._slowest([sum(t.sent_bytes for t in transfers[len(transfers) // 2 :])])[0])

    def _compare(self, name: str, kind: Kind) -> None:
        """Time all ways at all lengths; rank 0 prints the line of the table."""
        sample = kind.inputs(1)
        # If the scan is split by heads, the bytes are proportional to the tokens, so a short
        # document shows where they cross those of a scan by state.
        unit = 2 * self.world
        planned = received_bytes(kind.recurrence, sample, self._placement((unit,)))
        by_state = planned[SequenceScan.STATE]
        crossing = unit * by_state / planned[SequenceScan.HEADS]
        lengths = [max(1, round(crossing * f / unit)) * unit for f in AROUND]
        rows = {(n, way): self._row(kind, n, way) for n in lengths for way in WAYS}
        self.link.bytes_per_second = by_state / (self.options.ms / 1e3)
        samples = self._rounds(list(rows.values()), self.options.rounds)
        self.link.bytes_per_second = UNLIMITED
        seconds = {key: [s.step for s in samples[row.name]] for key, row in rows.items()}
        measured = statistics.median(
            _zero(lengths, [seconds[n, "heads"][i] - seconds[n, "state"][i] for n in lengths])
            for i in range(self.options.rounds)
        )
        if self.rank == 0:
            ms = {key: 1e3 * statistics.median(own) for key, own in seconds.items()}
            cells = [name, str(self.world), f"{by_state / 1e6:.2f}"]
            cells += [f"{crossing:.0f}", f"{measured:.0f}", f"{measured / crossing - 1:+.0%}"]
            for n in (lengths[0], lengths[2], lengths[-1]):
                cells.append(" · ".join(f"{ms[n, way]:.0f}" for way in WAYS))
            lost = []
            for n in lengths:
                way = cheaper_way(kind.recurrence, sample, self._placement((n,)))
                lost.append(ms[n, way] / min(ms[n, "heads"], ms[n, "state"]) - 1)
            print(f"| {' | '.join(cells)} | {max(lost):.0%} |", flush=True)

    def _row(self, kind: Kind, tokens: int, way: str) -> Row:
        placement, share = self._placement((tokens,)), tokens // self.world
        own = slice(self.rank * share, (self.rank + 1) * share)
        inputs = kind.inputs(tokens).of_tokens(itemgetter(own))
        leaves, inputs = _leaves(inputs)

        def step() -> StepResult:
            out = WAYS[way](kind.recurrence, inputs, placement)
            forward_ended = time.perf_counter()
            torch.autograd.grad(out, leaves, torch.ones_like(out))
            return StepResult(torch.zeros(()), forward_ended)

        return Row(f"{way} {tokens}", step, dict)


def _leaves(inputs: Inputs) -> tuple[list[Tensor], Inputs]:
    """Copy the inputs that depend on the token, as leaves of autograd.

    Returns the leaves, and `inputs` with them in the place of the originals.
    """
    of_heads, of_groups = (
        tuple(x.detach().clone().requires_grad_() for x in xs) for xs in inputs[:2]
    )
    return [*of_heads, *of_groups], Inputs(of_heads, of_groups, inputs.constants)


def _given(scan: Scan, recurrence: Recurrence, placement: Placement, inputs: Inputs) -> Tensor:
    """Call `scan` with its arguments in another order.

    `inputs` are the last argument, so `partial` can set all others.
    """
    return scan(recurrence, inputs, placement)


def _with_gradients(
    inputs: Inputs, run: Callable[[Inputs], Tensor], own: slice = slice(None)
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of `run`, and the gradients of the inputs that depend on the token."""
    leaves, inputs = _leaves(inputs)
    out = run(inputs)
    # The same output gradient for each token, so that ranks and one process have the same.
    seed = torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view(out[0].shape)
    return out.detach(), list(torch.autograd.grad(out, leaves, seed.expand_as(out)))


def _zero(lengths: list[int], differences: list[float]) -> float:
    """Return the length at which two ways take the same time.

    `differences` has the difference of their times for each of `lengths`; the result is where the
    least-squares line through them is zero.
    """
    slope, start = np.polyfit(lengths, differences, 1)
    return float(-start / slope)


def compare_locally(options: argparse.Namespace) -> None:
    """Print the table of one process: ISP's scans compared with the torch code of transformers.

    transformers runs these functions if no kernel is installed. They ignore document boundaries.
    """
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def delta(function: Callable[..., Any], inputs: Inputs) -> Any:
        v, g, beta, q, k = (x.unsqueeze(0) for xs in inputs[:2] for x in xs)
        return function(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)

    def mamba2(inputs: Inputs) -> Any:
        x, dt, B, C = (x.unsqueeze(0) for xs in inputs[:2] for x in xs)
        A, D, bias = inputs.constants
        return mamba2_chunk_scan(x, dt, A, B, C, 128, D=D, dt_bias=bias, dt_softplus=True)

    def selective(inputs: Inputs) -> Any:
        x, dt, B, C = (x.flatten(1).T.unsqueeze(0) for xs in inputs[:2] for x in xs)
        A, D, bias = inputs.constants
        out = mamba_selective_scan(x, dt, A, B, C, D=D, delta_bias=bias, delta_softplus=True)
        return out.transpose(1, 2)

    theirs = {
        "gated delta rule": partial(delta, torch_chunk_gated_delta_rule),
        "KDA": partial(delta, chunk_kimi_delta_attention),
        "Mamba2": mamba2,
        "selective scan": selective,
    }
    torch.set_num_threads(1)
    tokens, draw = options.tokens, random.Random(0)
    packed = log_normal_row(draw, tokens, tokens / 40, 1.0)
    print(LOCAL_COLUMNS)
    print(f"| | theirs, ms | ours | ours, {len(packed)} documents |\n|---|---:|---:|---:|")
    for name, kind in kinds(options.heads, options.head_size).items():
        leaves, inputs = _leaves(kind.inputs(tokens))
        runs: list[Callable[[], Tensor]] = [
            partial(_first, theirs[name], inputs),
            *(partial(_first, kind.recurrence.scan, inputs, n, None) for n in ([tokens], packed)),
        ]
        torch.testing.assert_close(
            runs[1](), runs[0]().reshape(runs[1]().shape), rtol=1e-3, atol=1e-3
        )
        times: list[list[float]] = [[], [], []]
        for _ in range(options.rounds):
            for own, run in zip(times, runs, strict=True):
                begin = time.process_time()
                out = run()
                torch.autograd.grad(out, leaves, torch.ones_like(out))
                own.append(time.process_time() - begin)
        ratios = [
            statistics.median(x / y for x, y in zip(own, times[0], strict=True)) for own in times
        ]
        print(f"| {name} | {1e3 * statistics.median(times[0]):.0f} |", end="")
        print(f" {ratios[1]:.2f} | {ratios[2]:.2f} |", flush=True)


def _first(function: Callable[..., Any], *args: Any) -> Tensor:
    """Call `function` and return the tensor it returns, or the first element of a tuple."""
    found = function(*args)
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"columns:\n{COLUMNS}\ncolumns of --local:\n{LOCAL_COLUMNS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="CPU ranks")
    parser.add_argument(
        "--ms", type=float, default=200.0, help="time of the states over the link, in one direction"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each way and length")
    parser.add_argument("--tries", type=int, default=4, help="most tries for an undisturbed step")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help="length, with --local")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of a modelled transfer")
    parser.add_argument(
        "--local", action="store_true", help="compare with transformers in one process"
    )
    parser.add_argument("--quick", action="store_true", help="tiny, to see whether it runs")
    options = parser.parse_args()
    options.link = "modelled"
    if options.quick:
        options.rounds, options.tries, options.ms = 1, 1, 5.0
        options.heads, options.head_size, options.tokens = 2, 8, 64
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch", end=" ")
    print(f"{torch.__version__}, one thread a rank\n")
    if options.local:
        compare_locally(options)
        return
    print(COLUMNS)
    print(
        "| | ranks | states, MB | planned | measured | off | 0.5: heads · state · gather, ms",
        end="",
    )
    print(" | 1 | 2 | auto loses |\n|---|" + "---:|" * 9, flush=True)
    for world in options.ranks:
        run_ranks(world, options, bench=MixersBench)


if __name__ == "__main__":
    main()
