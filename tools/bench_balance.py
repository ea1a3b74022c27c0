"""Measure how evenly splits of a sequence balance attention over context ranks.

    python tools/bench_balance.py                # 10,000 rows, some minutes
    python tools/bench_balance.py --rows 100

A row is packed with documents of log-normal lengths until it is full; the last one is cut there.
Each plan splits the row over c ranks; nothing is computed. The cost of a rank is the number of
pairs of one of its queries and a key that this query attends to.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from table_parser import table_parser

from isp.core.mesh.sequence_split import SequenceSplit, Slice

__all__ = ["PLANS", "Row", "log_normal_row", "measure"]

COLUMNS = """\
plan: ours              `SequenceSplit` of ISP
      zig-zag, row      the row in 2c equal pieces, documents ignored: rank r has r and 2c - 1 - r
      zig-zag, padded   each document split in this way, padded to a multiple of 2c
                        (a padding token costs as much as any other)
      contiguous        the row in c equal pieces
imbalance               largest cost of a rank / mean cost of the ranks - 1: the mean over the rows,
                        and the worst row
travels                 keys that the ranks receive, as a share of all keys that they do not hold
padding                 tokens added, as a share of the row
ms a plan               median time to compute the split of a row
"""


def log_normal_row(draw: random.Random, tokens: int, median: float, sigma: float) -> list[int]:
    """Draw lengths of documents that fill a row of `tokens`; the last document is cut."""
    lengths: list[int] = []
    left = tokens
    while left:
        length = math.ceil(draw.lognormvariate(math.log(median), sigma))
        lengths.append(min(left, length))
        left -= lengths[-1]
    return lengths


def contiguous(lengths: Sequence[int], num_ranks: int) -> SequenceSplit:
    """Split the row into c equal pieces, one for each rank."""
    return _pieces(lengths, list(range(num_ranks)))


def zigzag(lengths: Sequence[int], num_ranks: int) -> SequenceSplit:
    """Split the row into 2c equal pieces: rank r has pieces r and 2c - 1 - r."""
    ranks = list(range(num_ranks))
    return _pieces(lengths, ranks + ranks[::-1])


def padded(lengths: Sequence[int], num_ranks: int) -> SequenceSplit:
    """Split every document by zig-zag, after padding it to a multiple of 2c tokens."""
    whole = [-(-length // (2 * num_ranks)) * 2 * num_ranks for length in lengths]
    slices: list[list[Slice]] = [[] for _ in range(num_ranks)]
    for document, length in enumerate(whole):
        piece = length // (2 * num_ranks)
        for i in range(2 * num_ranks):
            rank = min(i, 2 * num_ranks - 1 - i)
            slices[rank].append(Slice(document, i * piece, (i + 1) * piece))
    return SequenceSplit(tuple(whole), tuple(map(tuple, slices)))


def _pieces(lengths: Sequence[int], ranks: list[int]) -> SequenceSplit:
    """Cut the row into `len(ranks)` equal pieces; piece i belongs to `ranks[i]`.

    A piece that spans documents becomes several slices. Adjacent slices of one document on the same
    rank are joined, as a kernel sees them as one.
    """
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
    """The measurements of one way to split one row over ranks."""

    imbalance: float
    travels: float
    padding: float
    seconds: float


def measure(
    plan_of: Callable[[Sequence[int], int], SequenceSplit], lengths: Sequence[int], num_ranks: int
) -> Row:
    """Split one row by `plan_of`, and measure the result."""
    begin = time.perf_counter()
    plan = plan_of(lengths, num_ranks)
    seconds = time.perf_counter() - begin
    tokens, laid = sum(lengths), sum(plan.lengths)
    travels = received(plan) / ((num_ranks - 1) * laid)
    return Row(plan.imbalance, travels, laid / tokens - 1, seconds)


def received(plan: SequenceSplit) -> int:
    """Return how many keys all ranks together receive.

    A rank receives each key that one of its queries sees and that another rank holds.
    """
    total = 0
    for held in plan.slices:
        # Slices are in order, so the last one of a document has its largest end: the causal mask
        # lets the rank's queries see all keys before that.
        seen = {document: end for document, _, end in held}
        total += sum(seen.values()) - sum(end - begin for _, begin, end in held)
    return total


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--rows", type=int, default=10_000, help="number of rows drawn")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="context ranks")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a row")
    parser.add_argument("--median", type=float, default=600.0, help="median length of a document")
    parser.add_argument("--sigma", type=float, default=1.3, help="of the log-normal lengths")
    parser.add_argument("--seed", type=int, default=0, help="of the rows")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    rows = [
        log_normal_row(draw, options.tokens, options.median, options.sigma)
        for _ in range(options.rows)
    ]
    documents = statistics.median(map(len, rows))
    print(
        f"{options.rows} rows of {options.tokens} tokens, median {documents:.0f} documents a row\n"
    )
    print(COLUMNS, end="")
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
