"""Routes of keys, simulated without ranks; a token is identified by its position in the row."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from isp.core.attention.context_parallel.route import Route, gather_route, ring_routes
from isp.core.mesh.sequence_split import SequenceSplit, Slice
from tests.core.attention.cases import random_plan


def _random_plans(number: int) -> list[SequenceSplit]:
    plans = []
    for seed in range(number):
        draw = random.Random(seed)
        lengths = [draw.choice((0, 1, 2, 9, 30)) for _ in range(draw.randrange(1, 6))] + [3]
        left, sizes = sum(lengths), []
        for _ in range(draw.randrange(1, 6)):
            sizes.append(draw.randrange(left + 1))
            left -= sizes[-1]
        plans.append(random_plan(lengths, [*sizes, left], seed))
    return plans


def _own(plan: SequenceSplit) -> list[list[int]]:
    """Return the positions of each rank's tokens, in the order in which it holds them."""
    starts = list(accumulate(plan.lengths, initial=0))
    return [[starts[d] + t for d, a, b in s for t in range(a, b)] for s in plan.slices]


def _laid_out(routes: list[Route], own: list[list[int]], rank: int) -> list[int]:
    """Return the positions of the keys that `rank` receives, in the order of its kernel."""
    received = []
    for by, route in enumerate(routes):
        first = sum(route.sent[:rank])
        rows = route.send.tolist()[first : first + route.sent[rank]]
        assert len(rows) == routes[rank].received[by]
        assert len(set(rows)) == len(rows), "a key would be added to twice at once"
        received += [own[by][row] for row in rows]
    assert len(set(received)) == len(received), "a key travels once"
    return [received[key] for key in routes[rank].layout.tolist()]


def _check_transpose(route: Route) -> None:
    """Check that the transpose adds each row once, to the key from which it was copied."""
    layers = [(range(len(route.first)), route.first.tolist())]
    layers += [(keys.tolist(), rows.tolist()) for keys, rows in route.again]
    pairs = []
    for keys, rows in layers:
        assert len(set(keys)) == len(keys)
        pairs += list(zip(rows, keys, strict=True))
    assert sorted(pairs) == list(enumerate(route.layout.tolist()))


def _expected(plan: SequenceSplit, rank: int, window: int | None, causal: bool) -> list[list[int]]:
    """Return the keys that each of a rank's tokens sees."""
    starts = list(accumulate(plan.lengths, initial=0))
    seen = []
    for d, a, b in plan.slices[rank]:
        for t in range(a, b):
            first = 0 if window is None else max(0, t - window + 1)
            last = t + 1 if causal else plan.lengths[d]
            seen.append(list(range(starts[d] + first, starts[d] + last)))
    return seen


def _seen(route: Route, places: list[int]) -> dict[int, list[int]]:
    """Return the positions of the keys that each token of the rank sees, by the mask of the
    route.
    """
    mask = route.mask
    tokens = range(route.num_tokens) if route.queries is None else route.queries.tolist()
    seen, query = {}, 0
    for i, (length, keys) in enumerate(zip(mask.lengths, mask.key_lengths, strict=True)):
        of_slice = places[mask.key_bounds[i] : mask.key_bounds[i + 1]]
        for j in range(length):
            last = keys - length + j + 1 if mask.causal else keys
            first = 0 if mask.window is None else max(0, last - mask.window)
            seen[tokens[query]] = of_slice[first:last]
            query += 1
    return seen


@pytest.mark.parametrize(("window", "causal"), [(None, True), (1, True), (6, True), (None, False)])
def test_every_token_sees_its_keys(window: int | None, causal: bool) -> None:
    """Catches keys that are missing, extra, out of order, or twice in one message or sum."""
    for plan in _random_plans(150):
        own, ranks = _own(plan), range(len(plan.slices))
        routes = [gather_route(plan, rank, causal=causal, window=window) for rank in ranks]
        for rank, route in enumerate(routes):
            seen = _seen(route, _laid_out(routes, own, rank))
            assert list(seen.values()) == _expected(plan, rank, window, causal)
            _check_transpose(route)
        holders = [{d for d, _, _ in of_rank} for of_rank in plan.slices]
        split = sum(map(len, holders)) > len(set().union(*holders))
        assert {route.is_local for route in routes} == {not split}
        travels = [sum(r.received) - r.received[i] for i, r in enumerate(routes)]
        assert {route.most_received for route in routes} == {max(travels)}


@pytest.mark.parametrize("causal", [True, False])
def test_steps_of_a_ring_cover_all_keys_once(causal: bool) -> None:
    """Catches a key in two steps or in none, and a key of another rank than that of the step."""
    for plan in _random_plans(100):
        own, ranks = _own(plan), range(len(plan.slices))
        steps = [ring_routes(plan, rank, causal=causal) for rank in ranks]
        for rank in ranks:
            found: list[list[int]] = [[] for _ in own[rank]]
            for step, route in enumerate(steps[rank]):
                places = _laid_out([of_rank[step] for of_rank in steps], own, rank)
                by = (rank - step) % len(ranks)
                assert set(places) <= set(own[by])
                _check_transpose(route)
                for token, keys in _seen(route, places).items():
                    assert keys or not step, "a query that sees nothing has no sum to merge"
                    found[token] += keys
            assert [sorted(keys) for keys in found] == _expected(plan, rank, None, causal)


def test_adjacent_slices_are_merged() -> None:
    """Catches keys copied twice for queries that follow each other."""
    slices = ((0, 2), (6, 8)), ((2, 4), (4, 6))
    plan = SequenceSplit((8,), tuple(tuple(Slice(0, *s) for s in of_rank) for of_rank in slices))
    apart, touching = (gather_route(plan, rank, causal=True, window=None) for rank in (0, 1))
    assert (apart.mask.lengths, apart.mask.key_lengths) == ((2, 2), (2, 8))
    assert (touching.mask.lengths, touching.mask.key_lengths) == ((4,), (6,))
