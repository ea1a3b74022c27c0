"""`DistributedAttention` on 2 and 4 ranks against whole sequences in one process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.heads import HeadSplit
from isp.core.attention.mask import AttentionMask
from isp.core.attention.ulysses import DistributedAttention
from isp.core.comm import Channel
from tests.core.attention.cases import Case, wrong_on_ranks
from tests.core.attention.reference import random_inputs
from tests.ranks import run_ranks

TOLERANCE = 1e-12  # float64, and sums of a few dozen terms in another order
LENGTH = 24
HEADS = [(4, 4), (8, 1), (4, 2), (6, 3), (12, 3), (7, 7), (7, 1), (3, 3), (2, 1), (1, 1)]
DOCUMENTS = [5, 8, 2, 6, 3]  # across the ends of shards of 12 and of 6
PACKINGS = [None, DOCUMENTS, [6, 12, 6], [1] * LENGTH]
"""One has a document that is exactly a shard."""
MASKS: list[tuple[bool, int | None]] = [(True, None), (False, None), (True, 3), (False, 3)]

OF_HEADS = {f"heads {heads}": Case(DOCUMENTS, heads, 2) for heads in HEADS}
OF_MASKS = {
    f"heads {heads}, batch {batch}, {documents}, causal {causal}, window {window}": Case(
        documents, heads, batch, window, causal
    )
    for heads, batch, documents, (causal, window) in itertools.product(
        ((7, 7), (6, 3)), (1, 2), PACKINGS, MASKS
    )
}
"""Cases with heads that a rank lacks or shares."""


def _channel() -> Channel:
    return Channel(dist.group.WORLD, name="sequence")


def _part(x: Tensor, channel: Channel) -> Tensor:
    return x.chunk(channel.size, dim=1)[channel.rank]


def _shards(inputs: list[Tensor], channel: Channel) -> list[Tensor]:
    return [_part(x.detach(), channel).clone().requires_grad_() for x in inputs]


def test_ranks_compute_the_attention_of_one_process() -> None:
    """Catches a head on the wrong rank, a lost KV gradient, attention across documents, and a rank
    without heads whose backward never joins the transfers of k and v: a hang.
    """
    grid = OF_HEADS | OF_MASKS
    apart = {name: replace(case, together=0) for name, case in OF_HEADS.items()}
    plans = [((2, 1), grid | apart), ((4, 1), grid), ((4, 1), apart)]
    assert all(x.abs().max() > 0.1 for case in grid.values() for x in case.solved[2][::3])
    for wrong in run_ranks(4, wrong_on_ranks, plans, TOLERANCE, timeout_seconds=110):
        assert not wrong


def _run_forms(rank: int, packed: Case, grouped: Case) -> list[bool]:
    channel = _channel()
    attention = DistributedAttention(CpuAttention(), channel)
    same = []
    for case in (packed, grouped):
        q, k, v = leaves = _shards(case.solved[0], channel)
        dout = _part(case.solved[1], channel)
        plain = case.result(attention, leaves, dout)
        kv = torch.stack((k, v), 2)
        forms = [attention.from_kv(q, kv, mask=case.mask)]
        if case is packed:
            forms.append(attention.from_qkv(torch.stack((q, k, v), 2), mask=case.mask))
        for out in forms:
            result = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
            same.append(all(torch.equal(a, b) for a, b in zip(result, plain, strict=True)))
    return same


def test_every_way_to_pass_q_k_v_gives_the_same_bits() -> None:
    """Catches a call with packed q, k and v that swaps k and v."""
    cases = Case(DOCUMENTS, (7, 7), 2), Case(DOCUMENTS, (6, 2))
    for same in run_ranks(4, _run_forms, *cases):
        assert same == [True] * 3


def _count_transfers(
    rank: int, world: int, case: Case, together: int
) -> list[tuple[str, str, int]]:
    channel = _channel()
    channel.log.collect()
    attention = DistributedAttention(CpuAttention(), channel, together_below_bytes=together)
    inputs, dout, _ = case.solved
    case.result(attention, _shards(inputs, channel), _part(dout, channel))
    return [(t.kind, t.label, t.sent_bytes) for t in channel.log.take()]


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
@pytest.mark.parametrize("world", [2, 4])
def test_each_tensor_is_one_message_of_the_heads_that_are_read(
    heads: tuple[int, int], world: int
) -> None:
    """Catches more messages than tensors, and KV heads sent to ranks that do not read them."""
    case = Case([LENGTH], heads)
    plan = HeadSplit.of(*heads, world)
    head_bytes = LENGTH // world * 4 * 8  # of a rank's tokens, in float64

    def sent(rank: int, deal: tuple[range, ...]) -> int:
        return head_bytes * sum(len(deal[to]) for to in range(world) if to != rank)

    for rank, transfers in enumerate(run_ranks(world, _count_transfers, world, case, 0)):
        # back: a rank sends its heads, to each other rank that rank's tokens
        back_q = head_bytes * len(plan.query[rank]) * (world - 1)
        back_kv = head_bytes * len(plan.kv[rank]) * (world - 1)
        query, kv = sent(rank, plan.query), sent(rank, plan.kv)
        assert transfers == [
            ("all_to_all", "attention.q", query),
            ("all_to_all", "attention.k", kv),
            ("all_to_all", "attention.v", kv),
            ("all_to_all", "attention.out", back_q),
            ("all_to_all", "attention.out", query),
            ("all_to_all", "attention.v", back_kv),
            ("all_to_all", "attention.k", back_kv),
            ("all_to_all", "attention.q", back_q),
        ]
    for rank, transfers in enumerate(run_ranks(world, _count_transfers, world, case, 1 << 40)):
        assert [label for _, label, _ in transfers] == [
            "attention.qkv",
            "attention.out",
            "attention.out",
            "attention.qkv",
        ]
        assert transfers[0][2] == sent(rank, plan.query) + 2 * sent(rank, plan.kv)


def test_a_group_of_one_only_calls_local_attention() -> None:
    """Catches a group of one rank that copies, logs or takes another code path."""
    channel = Channel.solo()
    channel.log.collect()
    seen = []

    def local(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        seen.append((q, k, v, mask))
        return q

    (q, k, v), _ = random_inputs(1, 6, 2, 1)
    mask = AttentionMask()
    assert DistributedAttention(local, channel)(q, k, v, mask=mask) is q
    assert all(a is b for a, b in zip(seen[0], (q, k, v, mask), strict=True))
    assert channel.log.take() == []


def _run_bfloat16(rank: int, case: Case) -> float:
    channel, (inputs, dout, expected) = _channel(), case.solved
    shards = [x.detach().bfloat16().requires_grad_() for x in _shards(inputs, channel)]
    attention = DistributedAttention(CpuAttention(), channel)
    result = case.result(attention, shards, _part(dout, channel).bfloat16())
    assert all(x.dtype == torch.bfloat16 for x in result)
    pairs = zip(result, expected, strict=True)
    return max(float((a - _part(b, channel)).abs().max()) for a, b in pairs)


def test_replicated_gradients_are_summed_in_float32() -> None:
    """Catches a sum of KV gradients over ranks that rounds to bfloat16 at every step."""
    for error in run_ranks(4, _run_bfloat16, Case([LENGTH], (8, 1))):
        assert error < 0.1  # 8 bits of mantissa on values up to about 4


def _run_again(rank: int, case: Case) -> bool:
    channel, (inputs, dout, _) = _channel(), case.solved
    attention, shards = DistributedAttention(CpuAttention(), channel), _shards(inputs, channel)
    with torch.inference_mode():
        attention(*shards, mask=case.mask)
    return all(x.isfinite().all() for x in case.result(attention, shards, _part(dout, channel)))


def test_training_works_after_inference_mode() -> None:
    """Catches a cached index made in inference mode, which has no backward."""
    assert run_ranks(2, _run_again, Case([6, 12, 6], (6, 3))) == [True] * 2


def _run_wrong_heads(rank: int, world: int) -> str:
    channel = _channel()
    q, kv = torch.randn(1, 4, 4, 2), torch.randn(1, 4, 3, 2)
    try:
        DistributedAttention(CpuAttention(), channel)(q, kv, kv, mask=AttentionMask())
    except ValueError as error:
        return str(error)
    return ""


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    """Catches KV heads that are shared unevenly, so that a query would use the wrong one."""
    for message in run_ranks(2, _run_wrong_heads, 2):
        assert "num_kv_heads=3 must divide num_heads=4" in message
