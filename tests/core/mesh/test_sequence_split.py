"""The split over context ranks: every token once, equal sizes, even costs, few cuts."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import pytest

from isp.core.mesh.sequence_split import SequenceSplit, Slice, Windows

FULL: Windows = ((None, 1),)
WINDOWS: list[Windows] = [FULL, ((3, 1),), ((2, 3), (None, 1)), ((40, 2), (7, 1)), ((1, 5),)]


def log_normal(draw: random.Random, total: int, median: float, sigma: float) -> list[int]:
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, math.ceil(draw.lognormvariate(math.log(median), sigma))))
    return lengths


def token_costs(lengths: Sequence[int], windows: Windows) -> list[int]:
    """Return the number of keys that each token of the row sees, counted one by one."""
    return [
        sum(layers * min(i + 1, window or i + 1) for window, layers in windows)
        for length in lengths
        for i in range(length)
    ]


def check(plan: SequenceSplit, num_ranks: int) -> None:
    total = sum(plan.lengths)
    sizes = [total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks)]
    assert [sum(end - begin for _, begin, end in held) for held in plan.slices] == sizes
    order = plan.order.tolist()
    assert sorted(order) == list(range(total))
    costs, ends = token_costs(plan.lengths, plan.windows), iter(order)
    assert plan.costs == tuple(sum(costs[next(ends)] for _ in range(size)) for size in sizes)
    for held in plan.slices:
        assert all(0 <= begin < end <= plan.lengths[document] for document, begin, end in held)
        assert all(
            a.document < b.document or (a.document == b.document and a.end < b.begin)
            for a, b in pairwise(held)
        )


def test_every_token_is_on_one_rank_and_ranks_have_equal_sizes() -> None:
    """Catches tokens lost or duplicated, a rank with too many tokens, wrong costs and order."""
    draw = random.Random(1)
    for _ in range(2000):
        count, longest = draw.choice([1, 2, 5, 30]), draw.choice([1, 3, 12, 60])
        lengths = [draw.randint(0, longest) for _ in range(count)]
        lengths[draw.randrange(count)] += draw.choice([1, 1, 100])
        num_ranks = draw.randint(1, 9)
        check(SequenceSplit.of(lengths, num_ranks, draw.choice(WINDOWS)), num_ranks)


KINDS: dict[str, Callable[[random.Random], list[int]]] = {
    "log-normal": lambda draw: log_normal(draw, 16384, 600, 1.3),
    "a giant": lambda draw: [9000, *[1] * 1384, *log_normal(draw, 6000, 100, 1)],
    "equal": lambda draw: [1024] * draw.choice([1, 4, 8, 16]),
    "equal, not a multiple": lambda draw: [draw.randint(900, 1100)] * draw.randint(3, 16),
    "two sizes": lambda draw: [3000, 300, 300, 300] * draw.randint(1, 4),
    "one, and single tokens": lambda draw: [draw.randint(1000, 4000), *[1] * 5000],
}


@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_have_even_costs_and_few_cuts(kind: str) -> None:
    """Catches a rank whose cost is too high by more than one token, and unneeded cuts."""
    draw = random.Random(2)
    for num_ranks, windows in product([2, 3, 8, 16], [FULL, ((256, 3), (None, 1)), ((64, 1),)]):
        for _ in range(2):
            lengths = KINDS[kind](draw)
            plan = SequenceSplit.of(lengths, num_ranks, windows)
            check(plan, num_ranks)
            dearest = max(token_costs([max(lengths)], windows))
            mean = sum(plan.costs) / num_ranks
            assert max(plan.costs) - mean <= 2 * dearest
            assert plan.imbalance < 0.05
            cuts = sum(map(len, plan.slices)) - len(lengths)
            assert cuts <= 2 * (num_ranks - 1)


def test_small_splits_match_those_of_the_note() -> None:
    """Catches an order of slices other than that of the design note."""
    (one, other) = SequenceSplit.of([8], 2).slices
    assert one == (Slice(0, 0, 2), Slice(0, 6, 8))
    assert other == (Slice(0, 2, 6),)
    assert SequenceSplit.of([2, 4, 6], 2).slices == (
        (Slice(0, 0, 2), Slice(1, 0, 2), Slice(2, 4, 6)),
        (Slice(1, 2, 4), Slice(2, 0, 4)),
    )
    # four equal documents on two ranks stay whole
    assert SequenceSplit.of([5, 5, 5, 5], 2).slices == (
        (Slice(0, 0, 5), Slice(1, 0, 5)),
        (Slice(2, 0, 5), Slice(3, 0, 5)),
    )
    # with a window of one all tokens cost the same
    assert SequenceSplit.of([8], 2, ((1, 1),)).slices == ((Slice(0, 0, 4),), (Slice(0, 4, 8),))
    # fewer tokens than ranks
    assert SequenceSplit.of([1, 1], 3).slices == ((Slice(0, 0, 1),), (Slice(1, 0, 1),), ())
    # 36 + 3 x 1 keys are 19.5 a rank, of 6 or 5 tokens: 1 + 1 + 1 + 1 + 8 + 7, or 2 + .. + 6
    plan = SequenceSplit.of([1, 8, 1, 1], 2)
    assert plan.slices == (
        (Slice(0, 0, 1), Slice(1, 0, 1), Slice(1, 6, 8), Slice(2, 0, 1), Slice(3, 0, 1)),
        (Slice(1, 1, 6),),
    )
    assert plan.costs == (19, 20)


def test_the_split_is_equal_in_every_process() -> None:
    """Catches an order that depends on hashes, and torch imported for arithmetic."""
    lengths = log_normal(random.Random(4), 20000, 50, 1)
    code = (
        "import sys; from isp.core.mesh.sequence_split import SequenceSplit;"
        f"print(SequenceSplit.of({lengths}, 8).slices, 'torch' in sys.modules)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert said == {f"{SequenceSplit.of(tuple(lengths), 8).slices} False\n"}
    assert SequenceSplit.of(lengths, 8) is SequenceSplit.of(tuple(lengths), 8)
