"""How even attention's cost is on context ranks, and how many keys travel for it.

    python tools/bench_balance.py                # 10,000 rows, some minutes
    python tools/bench_balance.py --rows 100

Rows of documents whose lengths are log-normal, packed until a row is full and cut there. Cost is
the number of keys that queries see.

    ours              `SequenceSplit`
    zig-zag, row      the row, documents ignored, in 2c equal pieces: ranks have one and its mirror
    zig-zag, padded   each document so, padded to a multiple of 2c (padding costs as tokens do)
    contiguous        the row in c equal pieces

    imbalance         greatest cost of a rank over the mean cost, less 1
    travels           keys that a rank receives, as a share of those of the row that it has not
    padding           tokens added, as a share of the row
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from isp.core.mesh.sequence_split import SequenceSplit, Slice

__all__ = ["PLANS", "Row", "log_normal_row", "measure"]


def log_normal_row(draw: random.Random, tokens: int, median: float, sigma: float) -> list[int]:
    """Lengths of documents that fill a row, the last one cut off."""
    lengths: list[int] = []
    left = tokens
    while left:
        length = math.ceil(draw.lognormvariate(math.log(median), sigma))
        lengths.append(min(left, length))
        left -= lengths[-1]
    return lengths


def contiguous(lengths: Sequence[int], num_ranks: int) -> SequenceSplit:
    """The row in c equal pieces."""
    return _pieces(lengths, list(range(num_ranks)))


def zigzag(lengths: Sequence[int], num_ranks: int) -> SequenceSplit:
    """The row in 2c equal pieces, of which a rank has one and its mirror."""
    ranks = list(range(num_ranks))
    return _pieces(lengths, ranks + ranks[::-1])


def padded(lengths: Sequence[int], num_ranks: int) -> SequenceSplit:
    """Every document, padded to a multiple of 2c, in zig-zag."""
    whole = [-(-length // (2 * num_ranks)) * 2 * num_ranks for length in lengths]
    slices: list[list[Slice]] = [[] for _ in range(num_ranks)]
    for document, length in enumerate(whole):
        piece = length // (2 * num_ranks)
        for i in range(2 * num_ranks):
            rank = min(i, 2 * num_ranks - 1 - i)
            slices[rank].append(Slice(document, i * piece, (i + 1) * piece))
    return SequenceSplit(tuple(whole), tuple(map(tuple, slices)))


def _pieces(lengths: Sequence[int], ranks: list[int]) -> SequenceSplit:
    """The row in equal pieces, of these ranks in turn; touching ones of a document are joined."""
    ends = list(accumulate(lengths, initial=0))
    edges = [ends[-1] * i // len(ranks) for i in range(len(ranks) + 1)]
    slices: list[list[Slice]] = [[] for _ in set(ranks)]
    for rank, (begin, end) in zip(ranks, pairwise(edges), strict=True):
        while begin < end:
            document = bisect_right(ends, begin) - 1
            until = min(end, ends[document + 1])
            first = begin - ends[document]
            held = slices[rank]
            if held and held[-1].document == document and held[-1].end == first:
                first = held.pop().begin
            held.append(Slice(document, first, until - ends[document]))
            begin = until
    return SequenceSplit(tuple(lengths), tuple(map(tuple, slices)))


PLANS: dict[str, Callable[[Sequence[int], int], SequenceSplit]] = {
    "ours": SequenceSplit.of,
    "zig-zag, row": zigzag,
    "zig-zag, padded": padded,
    "contiguous": contiguous,
}


class Row(NamedTuple):
    """What a plan is for a row."""

    imbalance: float
    travels: float
    padding: float
    seconds: float


def measure(
    plan_of: Callable[[Sequence[int], int], SequenceSplit], lengths: Sequence[int], num_ranks: int
) -> Row:
    """One plan of one row."""
    begin = time.perf_counter()
    plan = plan_of(lengths, num_ranks)
    seconds = time.perf_counter() - begin
    tokens, laid = sum(lengths), sum(plan.lengths)
    travels = received(plan) / ((num_ranks - 1) * laid)
    return Row(plan.imbalance, travels, laid / tokens - 1, seconds)


def received(plan: SequenceSplit) -> int:
    """Keys that travel to all ranks together: those that their tokens see and they do not hold."""
    total = 0
    for held in plan.slices:
        seen = {document: end for document, _, end in held}  # up to the last slice of each
        total += sum(seen.values()) - sum(end - begin for _, begin, end in held)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=65536, help="of a row")
    parser.add_argument("--median", type=float, default=600.0, help="length of a document")
    parser.add_argument("--sigma", type=float, default=1.3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    rows = [
        log_normal_row(draw, options.tokens, options.median, options.sigma)
        for _ in range(options.rows)
    ]
    documents = statistics.median(map(len, rows))
    print(
        f"{options.rows} rows of {options.tokens} tokens, {documents:.0f} documents in the median"
    )
    print("\n| ranks | plan | imbalance: mean | worst | travels | padding | ms a plan |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for num_ranks in options.ranks:
        for name, plan_of in PLANS.items():
            found = [measure(plan_of, row, num_ranks) for row in rows]
            mean = Row(*(statistics.fmean(values) for values in zip(*found, strict=True)))
            cells = [
                f"{mean.imbalance:.2%}",
                f"{max(row.imbalance for row in found):.2%}",
                f"{mean.travels:.1%}",
                f"{mean.padding:.2%}",
                f"{1e3 * statistics.median(row.seconds for row in found):.2f}",
            ]
            print(f"| {num_ranks} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
