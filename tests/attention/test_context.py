"""`ContextAttention` inside `DistributedAttention`, on 2 to 8 ranks, against whole rows on one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isp.attention import CpuAttention, DistributedAttention
from isp.attention.context import ContextAttention
from isp.attention.explicit import ExplicitAttention
from isp.comm import Channel
from isp.parallel.context import ContextPlan, Slice
from tests.attention.reference import attend, make_mask, random_inputs
from tests.attention.test_explicit import written_out
from tests.ranks import run_ranks

TOLERANCE = 1e-9  # float64, sums in another order
SPLITS = [(h, n // h) for n in (2, 4, 6, 8) for h in (1, 2, 3, 4) if n % h == 0 and n // h > 1]
LENGTH = 48  # each of those ranks has equally many tokens
PACKINGS = {
    "straddling": [5, 20, 1, 1, 14, 7],
    "one document": [LENGTH],
    "single tokens": [1] * LENGTH,
    "fewer than ranks": [31, 17],
    "none": [0, 16, 0, 32],
}


def random_plan(lengths: Sequence[int], sizes: Sequence[int], seed: int) -> ContextPlan:
    """Documents cut where it happens, and dealt out until each rank has as many tokens as asked."""
    draw = random.Random(seed)
    whole = []
    for document, length in enumerate(lengths):
        cuts = sorted({0, length, *draw.choices(range(length + 1), k=draw.randrange(6))})
        whole += [Slice(document, a, b) for a, b in pairwise(cuts)]
    draw.shuffle(whole)
    slices: list[list[Slice]] = []
    for size in sizes:
        slices.append([])
        while size:
            document, begin, end = whole.pop()
            middle = min(end, begin + size)
            slices[-1].append(Slice(document, begin, middle))
            size -= middle - begin
            if middle < end:
                whole.append(Slice(document, middle, end))
    assert not whole
    return ContextPlan(tuple(lengths), tuple(tuple(sorted(of_rank)) for of_rank in slices))


@dataclass(frozen=True)
class Case:
    """What is attended, and what must come out; sizes are those of the ranks' parts, in tokens."""

    documents: list[int] | None
    heads: tuple[int, int] = (4, 2)
    batch: int = 1
    window: int | None = None
    causal: bool = True
    sinks: bool = False
    sizes: tuple[int, ...] = ()
    seed: int = 0
    ring: bool = False
    stripes: int | None = None
    splits: list[tuple[int, int]] = field(default_factory=lambda: SPLITS)

    def plan_of(self, lengths: Sequence[int], num_ranks: int, *_: Any) -> ContextPlan:
        sizes = self.sizes or [sum(lengths) // num_ranks] * num_ranks
        return random_plan(lengths, sizes, self.seed)

    @cache  # noqa: B019 - as long as the tests run
    def solved(self) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """q, k, v and perhaps sinks; the gradient of the output; the output and all gradients."""
        length = LENGTH if self.documents is None else sum(self.documents)
        inputs, dout = random_inputs(self.batch, length, *self.heads)
        mask = make_mask(self.documents, self.causal, self.window)
        if self.sinks:
            inputs.append(torch.linspace(-1, 1, self.heads[0]).double().requires_grad_())
            out = written_out(*inputs[:3], mask, None, inputs[3]).view(dout.shape)
        else:
            out = attend(*inputs, mask)
        return inputs, dout, [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    __hash__ = object.__hash__


CASES = {
    **{
        f"{name}, window {window}": Case(documents, window=window, seed=len(name))
        for name, documents in PACKINGS.items()
        for window in (None, 5)
    },
    "stripes": Case(PACKINGS["straddling"], heads=(8, 4), stripes=4),
    "uneven stripes": Case(PACKINGS["fewer than ranks"], heads=(6, 3), stripes=2),
    "one KV head": Case(PACKINGS["straddling"], heads=(6, 1)),
    "as many KV heads": Case(PACKINGS["straddling"], heads=(4, 4), window=9),
    "heads that ranks lack": Case(PACKINGS["straddling"], heads=(3, 1)),
    "rows": Case(None, batch=3),
    "rows, window": Case(None, batch=2, window=7),
    "sinks": Case(PACKINGS["straddling"], sinks=True, window=6, stripes=2),
    "not causal": Case(PACKINGS["straddling"], causal=False),
    "uneven": Case(PACKINGS["straddling"], sizes=(7, 20, 1, 20), splits=[(1, 4)]),
    "an empty rank": Case(PACKINGS["straddling"], sizes=(7, 0, 21, 20), splits=[(1, 4)]),
    "all on one rank": Case(PACKINGS["straddling"], sizes=(0, 48), splits=[(1, 2)]),
    "empty and sinks": Case([30, 18], sinks=True, sizes=(0, 30, 18), splits=[(1, 3), (2, 3)]),
}
CASES |= {
    f"ring, {name}": replace(case, ring=True)
    for name, case in CASES.items()
    if not case.window and not case.sinks and not case.stripes
}


def _channels(h: int, c: int) -> tuple[Channel, Channel] | None:
    """Of the heads and of the contexts, of the first h c ranks: context rank i is i h + j."""
    rank, mine = dist.get_rank(), []
    for name, groups in (
        ("head", [[i * h + j for j in range(h)] for i in range(c)]),
        ("context", [[i * h + j for i in range(c)] for j in range(h)]),
    ):
        for ranks in groups:
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if rank in ranks:
                mine.append(Channel(group, name=name))
    return (mine[0], mine[1]) if mine else None


def _own_tokens(plan: ContextPlan, context: Channel, heads: Channel) -> Tensor:
    starts = [sum(plan.lengths[:i]) for i in range(len(plan.lengths))]
    slices = plan.slices[context.rank]
    tokens = [t for d, a, b in slices for t in range(starts[d] + a, starts[d] + b)]
    return torch.tensor(tokens, dtype=torch.int64).chunk(heads.size)[heads.rank]


def _on_split(case: Case, heads: Channel, context: Channel) -> dict[str, Any]:
    """The largest error, whether it is the same again, and bytes sent beside those planned."""
    inputs, dout, expected = case.solved()
    kinds = {True: ExplicitAttention(scale=0.4), False: CpuAttention()}
    local = kinds[case.sinks]
    options = {"stripes": case.stripes, "ring": case.ring, "plan_of": case.plan_of}
    inner = ContextAttention(local, context, (), **options)
    attention = DistributedAttention(inner, heads)
    lengths = (LENGTH,) if case.documents is None else tuple(case.documents)
    plan = case.plan_of(lengths, context.size)
    tokens = _own_tokens(plan, context, heads)
    mask = make_mask(case.documents, case.causal, case.window)
    found = []
    for _ in range(2):
        leaves = [x.detach()[:, tokens].clone().requires_grad_() for x in inputs[:3]]
        leaves += [x.detach().clone().requires_grad_() for x in inputs[3:]]
        out = attention(*leaves[:3], mask=mask, sinks=leaves[3] if case.sinks else None)
        grads = torch.autograd.grad(out, leaves, dout[:, tokens])
        if case.sinks:
            sinks = heads.all_reduce(context.all_reduce(grads[3]).wait()).wait()
            grads = (*grads[:3], sinks)
        found.append([out.detach(), *grads])
    wanted = [x[:, tokens] for x in expected[:4]] + expected[4:]
    return {
        "error": max(float((a - b).abs().sum()) for a, b in zip(found[0], wanted, strict=True)),
        "same": all(torch.equal(a, b) for a, b in zip(*found, strict=True)),
    }


def _on_ranks(rank: int) -> list[tuple[str, dict[str, Any]]]:
    results = []
    for split in {split: None for case in CASES.values() for split in case.splits}:
        channels = _channels(*split)
        for name, case in CASES.items():
            if channels and split in case.splits:
                results.append((f"{name}, {split}", _on_split(case, *channels)))
    return results


def test_every_split_attends_as_one_process() -> None:
    """Catches a key that is missing, or is seen too often or too soon, and a lost gradient."""
    for case in CASES.values():
        case.solved()
    for results in run_ranks(8, _on_ranks, timeout_seconds=100):
        assert results
        assert not [(name, r) for name, r in results if not (r["error"] < TOLERANCE and r["same"])]
