"""Ring attention: kernels with log-sum-exp, merged results, and the number of blocks in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.backends.explicit import ExplicitAttention
from isp.core.attention.backends.flash import FlashAttention, VarlenAttention
from isp.core.attention.backends.lse import FlashKernel
from isp.core.attention.backends.sdpa import SdpaAttention
from isp.core.attention.context_parallel.attention import ContextAttention, lse_kernel
from isp.core.attention.context_parallel.ring import Ring
from isp.core.attention.context_parallel.route import KeyExchange, gather_route, ring_routes
from isp.core.attention.local import AttentionByRows
from isp.core.attention.mask import AttentionMask
from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel
from isp.core.comm.channel import DryChannel
from isp.core.comm.tag import UNNAMED
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh import ContextExchange, Mode
from isp.core.mesh.sequence_split import SequenceSplit, Slice
from isp.core.weights.wp_communicator import LocalWeights
from tests.core.attention.cases import STRADDLING, Case, error_of, random_plan
from tests.core.attention.reference import random_inputs, visible
from tests.ranks import run_ranks

TOLERANCE = 1e-12  # float64, sums in another order
LENGTH = sum(STRADDLING)


def _lse(q: Tensor, k: Tensor, lengths: list[int]) -> Tensor:
    """Return the log-sum-exp [S, H] of packed causal documents: q [S, H, d], k [S, K, d]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    seen = torch.block_diag(*(visible(n, n, True, None).double() for n in lengths)).bool()
    return logits.masked_fill(~seen, -torch.inf).logsumexp(-1).T


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    """Catches an lse of scaled or shifted logits, and gradients computed with the lse of a part."""
    kernel = CpuAttention()
    (q, k, v), dout = random_inputs(1, 300, 4, 2)
    expected = CpuAttention()(q, k, v, mask=AttentionMask())
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    q, k, v, dout, expected = (x.detach()[0] for x in (q, k, v, dout, expected))
    halves = AttentionMask.of_documents([150, 150])
    before = AttentionMask.of_documents([150], [150], causal=False)
    own, lse = kernel.with_lse(q, k, v, halves)
    late, late_lse = kernel.with_lse(q[150:], k[:150], v[:150], before)
    total = lse.clone()
    total[150:] = torch.logaddexp(lse[150:], late_lse)
    out = own * (lse - total).exp().unsqueeze(-1)
    out[150:] += late * (late_lse - total[150:]).exp().unsqueeze(-1)
    assert error_of([out, total], [expected, _lse(q, k, [300])]) < TOLERANCE * 300
    found = kernel.gradients(dout, q, k, v, out, total, halves)
    more = kernel.gradients(dout[150:], q[150:], k[:150], v[:150], out[150:], total[150:], before)
    found[0][150:] += more[0]
    for whole, part in zip(found[1:], more[1:], strict=True):
        whole[:150] += part
    assert error_of(found, [x[0] for x in gradients]) < TOLERANCE * 300


@pytest.mark.parametrize(
    ("size", "dtype", "merges"),
    [
        (64, torch.bfloat16, True),
        (256, torch.float16, True),
        (20, torch.bfloat16, False),
        (264, torch.bfloat16, False),
        (64, torch.float32, False),
    ],
)
def test_flash_attention_gets_only_shapes_and_dtypes_it_supports(
    size: int,
    dtype: torch.dtype,
    merges: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a head size or dtype at which a ring on CUDA would end with an error, and a scale or
    softcap that is lost in a ring.
    """
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, size, dtype=dtype, device="cuda")
    kinds = SdpaAttention(scale=0.3), VarlenAttention(scale=0.3)
    for local in (*kinds, AttentionByRows(*kinds, scale=0.3)):
        found = lse_kernel(local, q)
        assert isinstance(found, FlashKernel) is merges
        assert found is None or found.scale == 0.3
    assert ("keys are gathered" in caplog.text) is not merges
    cpu = CpuAttention(scale=0.3)
    assert lse_kernel(cpu, q) is cpu
    assert lse_kernel(ExplicitAttention(softcap=3.0), q) is None
    monkeypatch.setattr("isp.core.attention.backends.flash._imported", lambda *_: None)
    assert lse_kernel(FlashAttention("flash_attn", softcap=3.0), q) is None


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_layers_with_a_soft_cap_gather_instead_of_a_ring(softcap: float | None) -> None:
    """Catches a plan that assumes a ring, which the stand-in kernels accept, where the run
    gathers.
    """
    context = DryChannel("context", 2, 0)
    ranks = SequenceRanks(head=Channel.solo(), context=context, exchange=ContextExchange.RING)
    layers = RankLayers(
        mode=Mode.ISP,
        tensor=context,
        weight=Channel.solo(),
        communicator=LocalWeights(),
        device=torch.device("meta"),
        dtype=torch.bfloat16,
        sequence=ranks,
    )
    local = layers.attention(CpuAttention(), softcap=softcap).local_attention
    assert isinstance(local, ContextAttention)
    assert local.ring is (softcap is None)


def test_calls_match_the_flash_kernels_of_torch() -> None:
    """Catches an argument too many or too few, and an lse with transposed dims."""
    q, kv = torch.empty(7, 4, 64, device="meta"), torch.empty(9, 2, 64, device="meta")
    q, kv = q.bfloat16(), kv.bfloat16()
    mask = AttentionMask.of_documents([3, 4], [3, 6])
    out, lse = FlashKernel(0.5).with_lse(q, kv, kv, mask)
    assert (out.shape, lse.shape) == (q.shape, (7, 4))
    grads = FlashKernel(0.5).gradients(out, q, kv, kv, out, lse, mask)
    assert [x.shape for x in grads] == [q.shape, kv.shape, kv.shape]


@pytest.mark.gpu
def test_the_flash_kernel_on_a_gpu_follows_the_definition() -> None:
    """Catches an lse of another base or layout, and gradients not computed with the given lse."""
    (q, k, v), dout = random_inputs(1, 300, 4, 2, 64)
    mask = AttentionMask.of_documents([200, 100], [200, 100])
    plain, lse = CpuAttention().with_lse(*(x.detach()[0] for x in (q, k, v)), mask)
    lse = lse + 0.5  # as if other ranks had more keys
    wide = dout[0], *(x.detach()[0] for x in (q, k, v)), plain, lse
    expected = [plain, lse - 0.5, *CpuAttention().gradients(*wide, mask)]
    narrow = [x.to("cuda", torch.bfloat16) for x in wide[:-1]]
    found = [
        *FlashKernel(None).with_lse(*narrow[1:4], mask),
        *FlashKernel(None).gradients(*narrow, lse.float().cuda(), mask),
    ]
    for a, b in zip(found, expected, strict=True):
        assert float((a.double().cpu() - b).norm() / b.norm()) < 0.02  # bfloat16 keeps 8 bits


def _merged(rank: int, dtype: torch.dtype) -> tuple[float, bool]:
    channel = Channel(dist.group.WORLD, name="context")
    plan = random_plan(STRADDLING, (20, 0, 9, 19), seed=5)
    inputs, _ = random_inputs(1, LENGTH, 4, 2)
    q, k, v = (x.detach()[0].to(dtype) for x in inputs)
    wide = [x[None].to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v)]
    out = CpuAttention()(*wide, mask=AttentionMask.of_documents(STRADDLING))[0]
    lse = _lse(wide[0][0], wide[1][0], STRADDLING)
    starts = [sum(STRADDLING[:i]) for i in range(len(STRADDLING))]
    own = [t for d, a, b in plan.slices[rank] for t in range(starts[d] + a, starts[d] + b)]
    ring = Ring(channel, ring_routes(plan, rank, causal=True), CpuAttention(), q.device)
    found = ring.attend(q[own], torch.stack((k, v), 1)[own])
    return error_of(found, [out[own], lse[own]]), found[0].dtype == wide[0].dtype


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-4)])
def test_out_and_lse_are_merged_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    """Catches sums of partial results rounded to the dtype of the activations."""
    for error, is_wide in run_ranks(4, _merged, dtype):
        assert error < tolerance
        assert is_wide


class _Counting:
    """A kernel that records how many transfers are in flight while it computes."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.cpu = CpuAttention()
        self.under_way: list[int] = []

    def with_lse(self, *args: Any) -> tuple[Tensor, Tensor]:
        self.under_way.append(sum(not t.waited for t in self.channel.log.transfers))
        return self.cpu.with_lse(*args)

    def gradients(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.under_way.append(sum(not t.waited for t in self.channel.log.transfers))
        return self.cpu.gradients(*args)


def _under_way(rank: int) -> list[int]:
    channel = Channel(dist.group.WORLD, name="context")
    channel.log.collect()
    slices = [(Slice(0, 4 * i, 4 * i + 4), Slice(0, 28 - 4 * i, 32 - 4 * i)) for i in range(4)]
    plan = SequenceSplit((32,), tuple(slices))
    kernel = _Counting(channel)
    ring = Ring(channel, ring_routes(plan, rank, causal=True), kernel, torch.device("cpu"))
    q, kv = torch.randn(8, 2, 4), torch.randn(8, 2, 2, 4)
    out, lse = ring.attend(q, kv)
    ring.gradients(out, q, kv, out, lse)
    return kernel.under_way


def test_one_block_is_in_flight_while_another_is_computed() -> None:
    """Catches a block that is waited for at once, and all blocks in flight together."""
    for under_way in run_ranks(4, _under_way):
        assert under_way == [1, 1, 1, 0, 1, 1, 2, 1]


def _summed(rank: int, values: list[list[float]]) -> float:
    channel = Channel(dist.group.WORLD, name="context")
    slices = [(0, 0), (1, 1), (0, 2), (2, 3), (0, 4)]  # one token each, in turn
    plan = SequenceSplit(
        (5,), tuple(tuple(Slice(0, t, t + 1) for r, t in slices if r == rank) for rank in range(3))
    )
    route = gather_route(plan, rank, causal=True, window=None)
    first = route.mask.key_bounds[:-1]  # where the document's first key is laid out
    grad = torch.zeros(len(route.layout), 1, dtype=torch.bfloat16)
    grad[list(first), 0] = torch.tensor(values[rank], dtype=torch.bfloat16)
    (total,) = KeyExchange(channel, route, UNNAMED).go_back((grad,))()
    return float(total[0]) if rank == 0 else 258.0


@pytest.mark.parametrize("values", [[[256, 1, 1], [0], [0]], [[256, 0, 0], [1], [1]]])
def test_gradients_of_keys_are_summed_in_float32(values: list[list[float]]) -> None:
    """Catches a sum over copies, or over ranks, that rounds to bfloat16 at each of 256 steps."""
    assert run_ranks(3, _summed, values) == [258.0] * 3


def _other_layers(rank: int) -> list[str]:
    channel = Channel(dist.group.WORLD, name="context")
    channel.log.collect()
    cases = (Case(STRADDLING, window=4), Case(STRADDLING, sinks=True))
    for case in cases:
        local = ExplicitAttention() if case.sinks else CpuAttention()
        attention = ContextAttention(local, channel, (), ring=True)
        (q, k, v), _ = random_inputs(1, LENGTH // 2, 2, 1)
        sinks = {"sinks": torch.zeros(2)} if case.sinks else {}
        attention(q, k, v, mask=case.mask, **sinks)
    return [t.label for t in channel.log.take()]


def test_layers_with_windows_or_sinks_gather_instead_of_a_ring() -> None:
    """Catches a ring for layers whose partial results it cannot merge."""
    assert run_ranks(2, _other_layers) == [["attention.kv.0"] * 2] * 2
