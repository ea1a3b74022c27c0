"""`DistributedAttention` on 2 and 4 ranks against whole sequences on one process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp.attention import (
    AttentionMask,
    CpuAttention,
    DistributedAttention,
    HeadPlan,
)
from isp.comm import Channel
from tests.attention.reference import (
    Result,
    attend,
    make_mask,
    random_inputs,
    with_gradients,
)
from tests.ranks import run_ranks

TOLERANCE = 1e-12  # float64, and sums of a few dozen terms in another order
LENGTH = 24
HEADS = [(4, 4), (8, 1), (4, 2), (6, 3), (12, 3), (7, 7), (7, 1), (3, 3), (2, 1), (1, 1)]
PACKINGS = [
    None,
    [5, 8, 2, 6, 3],  # across the ends of shards of 12 and of 6
    [6, 12, 6],  # one is exactly a shard
    [1] * LENGTH,
]
MASKS: list[tuple[bool, int | None]] = [(True, None), (False, None), (True, 3), (False, 3)]


@dataclass(frozen=True)
class Case:
    """What is attended, and what must come out."""

    heads: tuple[int, int]
    batch: int
    mask: AttentionMask
    inputs: list[Tensor]
    dout: Tensor
    expected: Result
    name: str


def _case(
    heads: tuple[int, int],
    batch: int,
    documents: list[int] | None,
    causal: bool = True,
    window: int | None = None,
) -> Case:
    mask = make_mask(documents, causal, window, batch)
    inputs, dout = random_inputs(batch, LENGTH, *heads)
    expected = with_gradients(attend(*inputs, mask), inputs, dout)
    name = f"heads {heads}, batch {batch}, {documents}, causal {causal}, window {window}"
    return Case(heads, batch, mask, inputs, dout, expected, name)


def _channel() -> Channel:
    return Channel(dist.group.WORLD, name="sequence")


def _part(x: Tensor, channel: Channel) -> Tensor:
    return x.chunk(channel.size, dim=1)[channel.rank]


def _shards(inputs: list[Tensor], channel: Channel) -> list[Tensor]:
    return [_part(x.detach(), channel).clone().requires_grad_() for x in inputs]


def _error(result: Result, expected: Result, channel: Channel) -> float:
    errors = [
        (a - _part(b, channel)).abs().max().item() for a, b in zip(result, expected, strict=True)
    ]
    return max(errors)


def _run_cases(rank: int, world: int, cases: list[Case], together: int) -> list[tuple[str, float]]:
    channel = _channel()
    attention = DistributedAttention(CpuAttention(), channel, together_below_bytes=together)
    errors = []
    for case in cases:
        shards = _shards(case.inputs, channel)
        out = attention(*shards, mask=case.mask)
        result = with_gradients(out, shards, _part(case.dout, channel))
        errors.append((case.name, _error(result, case.expected, channel)))
    return errors


@pytest.fixture(scope="module")
def grid() -> list[Case]:
    """All heads with one mask, all masks and packings with heads that a rank lacks or shares."""
    heads = [_case(heads, 2, PACKINGS[1]) for heads in HEADS]
    masks = itertools.product(((7, 7), (6, 3)), (1, 2), PACKINGS, MASKS)
    return [*heads, *(_case(h, batch, documents, *mask) for h, batch, documents, mask in masks)]


@pytest.mark.parametrize("world", [2, 4])
def test_grid_of_heads_packings_and_masks(grid: list[Case], world: int) -> None:
    """Catches a head on the wrong rank, a lost KV gradient, a document that sees its neighbour."""
    assert all(case.expected[i].abs().max() > 0.1 for case in grid for i in (0, 3))
    for errors in run_ranks(world, _run_cases, world, grid, 1 << 40, timeout_seconds=110):
        wrong = [(name, error) for name, error in errors if not error < TOLERANCE]
        assert len(errors) == len(grid)
        assert not wrong


@pytest.mark.parametrize("world", [2, 4])
def test_separate_transfers(grid: list[Case], world: int) -> None:
    """Catches a rank without heads whose backward never joins k's and v's transfer: a hang."""
    for errors in run_ranks(world, _run_cases, world, grid[: len(HEADS) + 4], 0):
        assert not [(name, error) for name, error in errors if not error < TOLERANCE]


def _run_forms(rank: int, world: int, packed: Case, grouped: Case) -> list[bool]:
    channel = _channel()
    attention = DistributedAttention(CpuAttention(), channel)
    same = []
    for case in (packed, grouped):
        q, k, v = _shards(case.inputs, channel)
        dout = _part(case.dout, channel)
        plain = with_gradients(attention(q, k, v, mask=case.mask), [q, k, v], dout)
        kv = torch.stack((k, v), 2)
        forms = [attention.from_kv(q, kv, mask=case.mask)]
        if case is packed:
            forms.append(attention.from_qkv(torch.stack((q, k, v), 2), mask=case.mask))
        for out in forms:
            result = with_gradients(out, [q, k, v], dout)
            same.append(all(torch.equal(a, b) for a, b in zip(result, plain, strict=True)))
        same.append(_error(plain, case.expected, channel) < TOLERANCE)
    return same


@pytest.mark.parametrize("world", [2, 4])
def test_every_form_gives_the_same_bits(world: int) -> None:
    """Catches a form that swaps k and v."""
    documents = [5, 8, 2, 6, 3]
    cases = _case((7, 7), 2, documents), _case((6, 2), 1, documents)
    for same in run_ranks(world, _run_forms, world, *cases):
        assert same == [True] * 5


def _count_transfers(
    rank: int, world: int, case: Case, together: int
) -> list[tuple[str, str, int]]:
    channel = _channel()
    channel.log.collect()
    attention = DistributedAttention(CpuAttention(), channel, together_below_bytes=together)
    shards = _shards(case.inputs, channel)
    out = attention(*shards, mask=case.mask)
    torch.autograd.grad(out, shards, _part(case.dout, channel))
    return [(t.kind, t.label, t.sent_bytes) for t in channel.log.take()]


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
@pytest.mark.parametrize("world", [2, 4])
def test_messages_and_bytes(heads: tuple[int, int], world: int) -> None:
    """Catches more messages than tensors, and KV heads that are sent where nobody looks at them."""
    case = _case(heads, 1, None)
    plan = HeadPlan.of(*heads, world)
    head_bytes = LENGTH // world * 4 * 8  # of a rank's tokens, in float64

    def sent(rank: int, deal: tuple[range, ...]) -> int:
        return head_bytes * sum(len(deal[to]) for to in range(world) if to != rank)

    for rank, transfers in enumerate(run_ranks(world, _count_transfers, world, case, 0)):
        # back, a rank sends what it has of the heads, to every other rank its tokens
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


def test_size_one_calls_local_attention_alone() -> None:
    """Catches a world of one that copies, logs or goes another way."""
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


def _run_bfloat16(rank: int, world: int, case: Case) -> float:
    channel = _channel()
    attention = DistributedAttention(CpuAttention(), channel)
    shards = [x.detach().bfloat16().requires_grad_() for x in _shards(case.inputs, channel)]
    out = attention(*shards, mask=case.mask)
    result = with_gradients(out, shards, _part(case.dout, channel).bfloat16())
    assert all(x.dtype == torch.bfloat16 for x in result)
    return _error(tuple(x.double() for x in result), case.expected, channel)  # type: ignore[arg-type]


def test_replicated_gradients_are_summed_in_float32() -> None:
    """Catches a sum of KV gradients over ranks that rounds to bfloat16 at every step."""
    case = _case((8, 1), 1, None)
    case = replace(case, inputs=[x.detach().bfloat16().double() for x in case.inputs])
    for error in run_ranks(4, _run_bfloat16, 4, case):
        assert error < 0.1  # 8 bits of mantissa on values up to about 4


def _run_again(rank: int, case: Case) -> float:
    channel = _channel()
    attention, shards = DistributedAttention(CpuAttention(), channel), _shards(case.inputs, channel)
    with torch.inference_mode():
        attention(*shards, mask=case.mask)
    result = with_gradients(attention(*shards, mask=case.mask), shards, _part(case.dout, channel))
    return _error(result, case.expected, channel)


def test_trains_after_inference() -> None:
    """Catches an index kept of an evaluation in inference mode, of which there is no backward."""
    for error in run_ranks(2, _run_again, _case((6, 3), 1, [6, 12, 6])):
        assert error < TOLERANCE


def _run_wrong_heads(rank: int, world: int) -> str:
    channel = _channel()
    q, kv = torch.randn(1, 4, 4, 2), torch.randn(1, 4, 3, 2)
    try:
        DistributedAttention(CpuAttention(), channel)(q, kv, kv, mask=AttentionMask())
    except ValueError as error:
        return str(error)
    return ""


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    """Catches a KV head that is shared unevenly, which would attend with the wrong one."""
    for message in run_ranks(2, _run_wrong_heads, 2):
        assert "num_kv_heads=3 must divide num_heads=4" in message
