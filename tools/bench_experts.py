"""Compare gathering the weights of experts with sending tokens to experts, over a modelled link.

    python tools/bench_experts.py [--mbit 20] [--rounds 3] [--shared]

A decoder with experts trains on 4 ranks, in float32. With `parallel.expert.size=1` ("gather") every
rank gathers the weights of all experts; with size 4 ("exchange") tokens are sent to the ranks of
their experts, "in 2" with `num_chunks=2`. Exchanging sends fewer bytes with few tokens, gathering
with many; the crossing is the number of tokens at which both send the same. The table has numbers
of tokens around it. All transfers of a rank queue on one link, and the slowest rank counts.

With --shared, tokens are exchanged and the decoder has a shared expert, whose matmuls sleep: a
quarter of an all-to-all of the tokens each, 2 in forward and 4 in backward. It is computed while
tokens are exchanged ("ahead"), or after the routed experts, where the decoder calls it ("after").
Printed are median times, and the median ratio of both in a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import torch
from paced import Link, Paced, linears_of
from table_parser import table_parser
from torch import Tensor

import isp
from isp.config import JobConfig
from isp.config.data import DataConfig
from isp.config.sections import TrainingConfig
from isp.core.mesh import ParallelConfig, WeightConfig
from isp.core.mesh.config import ExpertConfig
from isp.loop.parallel_run import ParallelRun
from isp.models.runtime.weight_holders import WeightHolders
from isp.parity.forked import run_ranks
from isp.planner.experts import PASSES, ExpertLayer, crossing_tokens
from model.config import ModelConfig
from model.decoder import Decoder

COLUMNS = """\
tokens of a rank   in a step
planned            the way that sends fewer bytes, by the planner
gather, exchange   median ms of a step; in a round, that step / the fastest way's step (median over
                   rounds); in parentheses: the step over an unlimited link, as a share of the step
"""
RANKS, ROW, LAYERS = 4, 64, 3
HIDDEN, INSIDE, EXPERTS, USED = 64, 32, 64, 2
WAYS = {
    "gather": ExpertConfig(),
    "exchange": ExpertConfig(size=4),
    "exchange in 2": ExpertConfig(size=4, num_chunks=2),
}
PARTS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""The measured numbers of tokens of a rank, each divided by `planned_crossing()`."""
UNLIMITED = 1e15
"""Bytes per second of a link that takes no time."""


class Times(NamedTuple):
    """Step times, in seconds, of one of `WAYS` at one number of tokens."""

    limited: list[float]
    """Times of steps over the link of limited speed, one for each round."""
    unlimited: float
    """Time of a step over a link that takes no time."""


def planned_crossing() -> float:
    """Return at how many tokens of a rank gathering the experts' weights sends as many bytes as
    exchanging tokens."""
    layer = ExpertLayer(EXPERTS, USED, HIDDEN, 3 * HIDDEN * INSIDE)
    # The last layer's weights stay between forward and backward: it is gathered once less.
    return crossing_tokens([layer], passes=PASSES - 1 / LAYERS)


def _run(way: str, shared: int = 0) -> ParallelRun:
    """Build the run of one of `WAYS`, with a shared expert of `shared` features unless it is 0."""
    sizes = ModelConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=2,
        intermediate_size=INSIDE,
        num_experts=EXPERTS,
        experts_per_token=USED,
        shared_expert_intermediate_size=shared,
    )
    torch.manual_seed(0)
    config = JobConfig(
        model=ModelConfig(loss_chunk_tokens=0),
        data=DataConfig(source="python-stdlib"),
        parallel=ParallelConfig(weight=WeightConfig(size=RANKS), expert=WAYS[way]),
        training=TrainingConfig(dtype="float32"),
    )
    return isp.parallelize(Decoder(sizes), config)


def _limit(run: ParallelRun, bytes_per_second: float) -> None:
    """Let all transfers of this rank queue on one modelled link of this speed."""
    Link(bytes_per_second, 50e-6).slow(run.mesh.opened)


def _seconds(run: ParallelRun, ids: Tensor) -> float:
    """Return the time of a step on the slowest rank. All ranks must call this."""
    run.mesh.host.all_reduce(torch.zeros(1)).wait()
    began = time.perf_counter()
    run.step(run.loss(ids), lr=0.0)
    run.train_step.drain()
    took = torch.tensor([time.perf_counter() - began])
    return run.mesh.host.all_reduce(took, op="max").wait().item()


def _measure_shared(rank: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Time steps with a shared expert; return seconds by name, one for each round.

    In "ahead" the shared expert is computed while tokens are exchanged, in "after" it is computed
    when the routed experts have ended. "an all-to-all" is the time of one exchange of tokens over
    the link.
    """
    torch.set_num_threads(1)
    ids = torch.randint(64, (16, ROW), generator=torch.Generator().manual_seed(rank))
    exchange = ids.numel() * USED * HIDDEN * 4 * (1 - 1 / RANKS) / (options.mbit * 125_000)
    runs, ahead_of = {"ahead": _run("exchange", INSIDE)}, WeightHolders._ahead_of
    # No configuration key turns this off. While `_ahead_of` returns None, a model is built that
    # computes its shared expert where its code calls it.
    WeightHolders._ahead_of = lambda *_: None
    runs["after"] = _run("exchange", INSIDE)
    WeightHolders._ahead_of = ahead_of
    for run in runs.values():
        for layer in linears_of(run.train_step.built):
            if "shared_expert." in layer.name:
                layer.communicator = Paced(layer.communicator, lambda _: exchange / 4)
        # The first step allocates buffers, so it is not timed.
        run.step(run.loss(ids), lr=0.0)
        _limit(run, options.mbit * 125_000)
    found: dict[str, list[float]] = {"an all-to-all": [exchange], "ahead": [], "after": []}
    for _ in range(options.rounds):
        for way, run in runs.items():
            found[way].append(_seconds(run, ids))
    return found


def _measure(rank: int, options: argparse.Namespace) -> dict[str, list[Times]]:
    """Time each of `WAYS`; return its times, one for each number of tokens in `PARTS`."""
    torch.set_num_threads(1)
    found: dict[str, list[Times]] = {way: [] for way in WAYS}
    runs = {way: _run(way) for way in WAYS}
    generator = torch.Generator().manual_seed(rank)
    for part in PARTS:
        rows = round(part * planned_crossing() / ROW)
        ids = torch.randint(64, (rows, ROW), generator=generator)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        alone: dict[str, float] = {}
        # Round 0 warms up and measures the step over an unlimited link.
        for number in range(options.rounds + 1):
            for way, run in runs.items():
                _limit(run, options.mbit * 125_000 if number else UNLIMITED)
                if not number:
                    # The first step allocates buffers, so it is not timed.
                    run.step(run.loss(ids), lr=0.0)
                took = _seconds(run, ids)
                if number:
                    seconds[way].append(took)
                else:
                    alone[way] = took
        for way in WAYS:
            found[way].append(Times(seconds[way], alone[way]))
    return found


def _print_table(found: dict[str, list[Times]]) -> None:
    """Print the times of gathering experts and of exchanging tokens, and where they cross.

    The crossing is the number of tokens at which both take the same time: measured, and planned.
    """
    crossing = planned_crossing()
    tokens = [round(part * crossing / ROW) * ROW for part in PARTS]
    print(COLUMNS)
    print(f"{'tokens of a rank':>16}{'planned':>10}" + "".join(f"{way:>24}" for way in WAYS))
    ratios, chosen = [], list[float]()
    for i, count in enumerate(tokens):
        best = [min(x) for x in zip(*(found[way][i].limited for way in WAYS), strict=True)]
        way = "gather" if count >= crossing else "exchange"
        cells = []
        for name in WAYS:
            times = found[name][i]
            own = statistics.median(times.limited)
            over = statistics.median(a / b for a, b in zip(times.limited, best, strict=True))
            share = times.unlimited / own
            if name == way:
                chosen.append(over)
            cells.append(f"{own * 1e3:6.0f} ms {over:5.2f} ({share:4.0%})")
        pairs = zip(found["gather"][i].limited, found["exchange"][i].limited, strict=True)
        ratios.append(statistics.median(a / b for a, b in pairs))
        print(f"{count:>16,}{way:>10}" + "".join(f"{cell:>24}" for cell in cells))
    print(f"the planned way is at most {max(chosen):.2f} times as long as the better")
    measured = _measured_crossing(tokens, ratios)
    if measured is None:
        print(
            f"equal at no number of tokens in the table, planned at {crossing:,.0f}: gathering"
            f" takes {ratios[0]:.2f} times as long as exchanging at {tokens[0]:,} tokens of a rank,"
            f" and {ratios[-1]:.2f} times at {tokens[-1]:,}"
        )
        return
    print(
        f"equal at {measured:,.0f} tokens of a rank, planned at {crossing:,.0f}:"
        f" {measured / crossing:.2f} of it"
    )


def _measured_crossing(tokens: list[int], ratios: list[float]) -> float | None:
    """Return the number of tokens at which gathering and exchanging take the same time.

    `ratios` has the time of gathering / exchanging for each of `tokens`. The result is interpolated
    between the first two neighbors where the ratio falls below 1; None if it never does.
    """
    for (a, x), (b, y) in zip(
        zip(tokens, ratios, strict=True), zip(tokens[1:], ratios[1:], strict=True), strict=False
    ):
        if x >= 1 > y:
            return a + (b - a) * (x - 1) / (x - y)
    return None


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--mbit", type=float, default=20, help="Mbit/s of the link of each rank")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each way")
    parser.add_argument("--shared", action="store_true", help="time a shared expert instead")
    options = parser.parse_args()
    print(
        f"{RANKS} ranks, link of {options.mbit:g} Mbit/s a rank, modelled; {LAYERS} layers, hidden"
        f" {HIDDEN}, {EXPERTS} experts of {INSIDE}, {USED} of a token, float32"
    )
    if options.shared:
        found = run_ranks(RANKS, _measure_shared, options, timeout_seconds=3000)[0]
        pairs = zip(found["ahead"], found["after"], strict=True)
        medians = (f"{way} {statistics.median(times) * 1e3:.0f} ms" for way, times in found.items())
        ratio = statistics.median(a / b for a, b in pairs)
        print(
            "shared expert computed while tokens are exchanged (ahead) or after the routed experts:"
            f" {', '.join(medians)}; ahead / after {ratio:.2f}"
        )
        return
    _print_table(run_ranks(RANKS, _measure, options, timeout_seconds=3000)[0])


if __name__ == "__main__":
    main()
