"""`ContextAttention` inside `DistributedAttention`, on 2 to 8 ranks, against whole rows on one
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.backends.sdpa import SdpaAttention
from isp.core.attention.context_parallel.attention import ContextAttention
from isp.core.attention.mask import AttentionMask
from isp.core.comm import Channel
from isp.core.comm.tag import UNNAMED
from tests.core.attention.cases import (
    LENGTH,
    STRADDLING,
    Case,
    Channels,
    error_of,
    leaves_of,
    make_attention,
    wrong_on_ranks,
)
from tests.core.attention.reference import random_inputs
from tests.ranks import run_ranks
from tests.saved import saved_bytes

TOLERANCE = 1e-9  # float64, sums in another order

EVERYWHERE = {
    "straddling": Case(STRADDLING, stripes=2),
    "straddling, window": Case(STRADDLING, window=5, seed=3),
    "one document, one KV head": Case([LENGTH], heads=(6, 1), seed=1),
    "balanced": Case(STRADDLING, seed=None),
    "in a ring": Case(STRADDLING, ring=True),
}
"""Cases for every split of 2 to 8 ranks."""

SPLITS = [(h, n // h) for n in (2, 4, 6, 8) for h in (1, 2, 3, 4) if n % h == 0 and n // h > 1]

FEW = {
    "single tokens": Case([1] * LENGTH, window=5),
    "fewer than ranks": Case([31, 17], seed=2),
    "documents of nothing": Case([0, 16, 0, 32], window=9),
    "a window of one": Case([30, 18], window=1),
    "as many KV heads": Case(STRADDLING, heads=(4, 4), window=9),
    "heads that ranks lack": Case(STRADDLING, heads=(1, 1)),
    "rows": Case(batch=3),
    "rows, window": Case(batch=2, window=7),
    "sinks": Case(STRADDLING, sinks=True, window=6, stripes=2),
    "not causal": Case(STRADDLING, causal=False),
    "stripes": Case(STRADDLING, heads=(8, 4), stripes=4),
    "uneven stripes": Case([31, 17], heads=(6, 3), stripes=2),
}
"""Cases for 2 x 4 ranks."""

UNEVEN = {
    "uneven": Case(STRADDLING, sizes=(7, 20, 1, 20), stripes=2),
    "an empty rank": Case(STRADDLING, sizes=(7, 0, 21, 20), window=8),
    "an empty rank, other kernels": Case(STRADDLING, sizes=(7, 0, 21, 20), local=SdpaAttention),
    "all on one rank": Case(STRADDLING, sizes=(0, 48, 0, 0)),
    "an empty rank with sinks": Case([30, 18], sinks=True, sizes=(0, 30, 17, 1)),
    **{
        f"random, {seed}": Case(
            [3 + seed, 17, 1, 12],
            heads=(2, 1),
            window=(None, 4, 20)[seed % 3],
            seed=seed,
            sizes=(12, 3 + seed, 18, 0),
        )
        for seed in range(1, 13)
    },
}
"""Cases for 4 context ranks."""


def _in_a_ring(cases: dict[str, Case]) -> dict[str, Case]:
    return {
        f"{name}, ring": replace(case, ring=True)
        for name, case in cases.items()
        if not (case.window or case.sinks or case.stripes) and case.local is CpuAttention
    }


def test_every_split_computes_the_attention_of_one_process() -> None:
    """Catches a key that is missing, or seen twice or by an earlier query; keys sent without need;
    a lost gradient; sums in the order of arrival; and a rank that waits for one without tokens.
    """
    plans = [
        *((split, EVERYWHERE) for split in SPLITS),
        ((2, 4), FEW | _in_a_ring(FEW)),
        ((1, 4), UNEVEN | _in_a_ring(UNEVEN)),
    ]
    for case in {**EVERYWHERE, **plans[-1][1], **plans[-2][1]}.values():
        assert all(x.isfinite().all() for x in case.solved[2])
    for wrong in run_ranks(8, wrong_on_ranks, plans, TOLERANCE, timeout_seconds=100):
        assert not wrong


class _Inside(torch.autograd.Function):
    """Attention whose backward recomputes it and differentiates inside of that backward."""

    @staticmethod
    def forward(ctx: Any, attend: Any, *inputs: Tensor) -> Tensor:
        ctx.attend = attend
        ctx.save_for_backward(*inputs)
        return attend(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.attend(*leaves)
        return None, *torch.autograd.grad(out, leaves, dout)


def _on_other_ways(rank: int, case: Case) -> dict[str, bool]:
    channels = Channels.of(2, 2)
    assert channels is not None
    attention = make_attention(case, channels)
    leaves, dout, _ = leaves_of(case, channels)

    def attend(*inputs: Tensor) -> Tensor:
        return attention(*inputs, mask=case.mask)

    def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    results = {"again": same(torch.autograd.grad(out, leaves, dout), grads)}
    with torch.no_grad():
        results["without gradients"] = same([attend(*leaves)], [out])
    for i, name in enumerate("qkv"):
        alone = torch.autograd.grad(attend(*leaves), leaves[i], dout)
        results[f"of {name} alone"] = same(alone, [grads[i]])
        frozen = [x if j == i else x.detach() for j, x in enumerate(leaves)]
        results[f"{name} alone has any"] = same(
            torch.autograd.grad(attend(*frozen), leaves[i], dout), [grads[i]]
        )
    recomputed = checkpoint(attend, *leaves, use_reentrant=False)
    results["recomputed"] = same(torch.autograd.grad(recomputed, leaves, dout), grads)
    inside = _Inside.apply(attend, *leaves)
    results["inside of a backward"] = same(torch.autograd.grad(inside, leaves, dout), grads)
    narrow = [x.detach().bfloat16().requires_grad_() for x in leaves]
    rounded = torch.autograd.grad(attend(*narrow), narrow, dout.bfloat16())
    results["narrow"] = error_of([x.double() for x in rounded], grads) < 0.02 * len(dout[0])
    return results


@pytest.mark.parametrize("ring", [False, True])
def test_every_kind_of_backward_gives_the_same_gradients(ring: bool) -> None:
    """Catches a transfer that some backward passes skip and for which other ranks then wait."""
    case = Case(STRADDLING, heads=(8, 4), stripes=2, ring=ring)
    for results in run_ranks(4, _on_other_ways, case):
        assert results == dict.fromkeys(results, True)


def _launches(rank: int) -> dict[str, list[str]]:
    channel = Channel(dist.group.WORLD, name="context")
    channel.log.collect()
    (q, k, v), dout = random_inputs(1, 24, 4, 4)
    seen: dict[str, list[str]] = {}

    def local(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        channel.log.transfers[-1].block += " attend"
        return CpuAttention()(q, k, v, mask=mask)

    for name, documents, stripes in (("stripes", [48], 3), ("whole documents", [24, 24], None)):
        attention = ContextAttention(local, channel, ((None, 1),), stripes=stripes)
        channel.log.start("nothing", "", UNNAMED, 0)
        out = attention(q, k, v, mask=AttentionMask.of_documents(documents))
        torch.autograd.grad(out, (q, k, v), dout)
        seen[name] = [t.label + t.block for t in channel.log.take()[1:]]
    return seen


def test_the_next_stripe_is_gathered_during_the_attention_of_one() -> None:
    """Catches a stripe that is sent only after the previous one is computed, and transfers for a
    row whose documents are whole on each rank.
    """
    for seen in run_ranks(2, _launches):
        kv = [f"attention.kv.{i}" for i in range(3)]
        assert seen["stripes"] == [kv[0], kv[1] + " attend", kv[2] + " attend" * 2, *kv[::-1]]
        assert seen["whole documents"] == []


def _kept(rank: int) -> list[int]:
    channel = Channel(dist.group.WORLD, name="context")
    (q, k, v), _ = random_inputs(1, 24, 4, 2)
    mask, found = AttentionMask.of_documents([48]), []
    for ring in (False, True):
        attention = ContextAttention(CpuAttention(), channel, ((None, 1),), ring=ring)
        for queries, keys in ((q, k), torch.cat((q, k), 2).split((4, 2), 2)):
            attend = partial(attention, queries, keys, v, mask=mask)
            found.append(saved_bytes(attend)[1])
    return found


def test_views_of_a_projection_keep_no_more_than_separate_tensors() -> None:
    """Catches q and k saved as views of one projection, which keep its whole memory alive."""
    for gather, gather_views, ring, ring_views in run_ranks(2, _kept):
        assert (gather, ring) == (gather_views, ring_views)


def _refusals(rank: int) -> list[str]:
    channel = Channel(dist.group.WORLD, name="context")
    attention = ContextAttention(CpuAttention(), channel, ((None, 1),))
    (q, k, v), _ = random_inputs(1, 6, 2, 1)
    messages = []
    for mask in (AttentionMask.of_documents([3, 6]), AttentionMask(causal=False, window=3)):
        with pytest.raises(ValueError, match="context") as caught:
            attention(q, k, v, mask=mask)
        messages.append(str(caught.value))
    return messages


def test_tokens_that_do_not_fit_the_split_are_refused() -> None:
    """Catches tokens in the order of the row, and a two-sided window, whose far side would
    be cut.
    """
    tokens, window = run_ranks(2, _refusals)[0]
    assert "context rank 0 of 2 has 5 tokens by the split, got 1 x 6" in tokens
    assert "window=3 without causal order" in window


def test_one_context_rank_only_calls_local_attention() -> None:
    """Catches a route, a copy or a transfer on a rank that has all keys."""
    (q, k, v), _ = random_inputs(2, 6, 2, 1)
    given = []

    def local(*tensors: Tensor, mask: AttentionMask, **options: Any) -> Tensor:
        given.append((*tensors, mask, options))
        return tensors[0]

    mask = AttentionMask(window=2)
    attention = ContextAttention(local, Channel.solo(), ((2, 1),))
    assert attention(q, k, v, mask=mask) is q
    assert all(a is b for a, b in zip(given[0][:4], (q, k, v, mask), strict=True))
    assert given[0][4] == {}
