"""Attention with sinks by kernels that return the log-sum-exp, against the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.backends.explicit import ExplicitAttention
from isp.core.attention.backends.lse import FlashKernel
from isp.core.attention.backends.sinks import SinkAttention
from isp.core.attention.mask import AttentionMask
from tests.core.attention.cases import Case, error_of, wrong_on_ranks
from tests.core.attention.reference import attend, make_mask, random_inputs
from tests.ranks import run_ranks

TOLERANCE = 1e-12  # float64, sums of a few dozen terms in another order
DOCUMENTS = [5, 8, 2, 6, 3]


class _FlashSums(CpuAttention):
    """A kernel whose lse is inf where a query sees no key, as in flash attention."""

    def with_lse(self, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().with_lse(*args)
        return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def _results(
    attention: Any, qkv: Sequence[Tensor], dout: Tensor, mask: AttentionMask, shift: float = 0.0
) -> list[Tensor]:
    """Return the output and all gradients, with sinks around `shift`."""
    sinks = (torch.linspace(-2, 2, qkv[0].shape[2]) + shift).to(qkv[0]).requires_grad_()
    leaves = [*(x.detach().requires_grad_() for x in qkv), sinks]
    out = attention(*leaves[:3], mask=mask, sinks=sinks)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize(
    ("mask", "queries", "keys"),
    [
        (AttentionMask(), 24, 24),
        (AttentionMask(causal=False), 24, 24),
        (AttentionMask(window=5), 24, 24),
        (AttentionMask(window=5, causal=False), 24, 24),
        (make_mask(DOCUMENTS, batch=2), 24, 24),
        (make_mask(DOCUMENTS, window=3, batch=2), 24, 24),
        (make_mask(DOCUMENTS, window=3, causal=False, batch=2), 24, 24),
        (AttentionMask(), 9, 24),
        (AttentionMask(window=7), 9, 24),
        (AttentionMask(), 24, 9),
        (AttentionMask(window=2), 24, 9),
        (AttentionMask.of_documents([3, 6], [13, 6]), 9, 19),
        (AttentionMask.of_documents([3, 6], [13, 6], window=4), 9, 19),
    ],
)
def test_sinks_follow_the_definition(
    mask: AttentionMask, queries: int, keys: int, heads: tuple[int, int]
) -> None:
    """Catches a sink missing in the output or in a gradient, and queries without keys."""
    batch = 2 if mask.cu_seqlens_k is None else 1
    qkv, dout = random_inputs(batch, queries, *heads, keys=keys)
    expected = _results(lambda *args, **kwargs: attend(*args, **kwargs), qkv, dout, mask)
    assert error_of(_results(ExplicitAttention(), qkv, dout, mask), expected) < TOLERANCE
    for kernel in (CpuAttention(), _FlashSums()):
        assert error_of(_results(SinkAttention(kernel), qkv, dout, mask), expected) < TOLERANCE
    assert all(x.abs().max() > 0.01 for x in expected)


@pytest.mark.parametrize("shift", [-1e3, 0.0, 1e3])
def test_sinks_of_any_size_do_not_overflow(shift: float) -> None:
    """Catches an exponential that overflows, for sinks far above and far below all logits."""
    qkv, dout = random_inputs(1, 700, 2, 1)
    mask = AttentionMask(window=300)
    expected = _results(ExplicitAttention(), qkv, dout, mask, shift)
    found = _results(SinkAttention(CpuAttention()), qkv, dout, mask, shift)
    assert error_of(found, expected) < TOLERANCE * 300  # as many terms
    assert (float(expected[0].abs().max()) == 0) is (shift > 0)


def test_sink_gradients_are_summed_over_chunks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a chunk of queries that is missing, or counted twice, in the gradient of sinks."""
    qkv, dout = random_inputs(1, 24, 4, 2)
    mask = make_mask(DOCUMENTS)
    whole = _results(SinkAttention(CpuAttention()), qkv, dout, mask)
    monkeypatch.setattr("isp.core.attention.backends.sinks._ROWS", 7)
    pieces = _results(SinkAttention(CpuAttention()), qkv, dout, mask)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_bfloat16_is_summed_in_float32() -> None:
    """Catches gradients of another dtype than the tensors, and rounded intermediate results."""
    qkv, dout = random_inputs(1, 24, 4, 2)
    expected = _results(ExplicitAttention(), qkv, dout, make_mask(DOCUMENTS))
    narrow = [x.detach().bfloat16() for x in qkv]
    attention = SinkAttention(CpuAttention())
    found = _results(attention, narrow, dout.bfloat16(), make_mask(DOCUMENTS))
    assert [x.dtype for x in found] == [torch.bfloat16] * 5
    assert (
        max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)) < 0.02
    )


def test_row_masks_cached_in_inference_mode_work_in_training() -> None:
    """Catches a cached mask that autograd refuses."""
    qkv, dout = random_inputs(1, 23, 2, 1)
    with torch.inference_mode():
        SinkAttention(CpuAttention())(*qkv, mask=AttentionMask(), sinks=torch.zeros(2).double())
    assert all(
        x.isfinite().all()
        for x in _results(SinkAttention(CpuAttention()), qkv, dout, AttentionMask())
    )


class _SinkCase(Case):
    @property
    def attention(self) -> Any:
        return SinkAttention(CpuAttention())


def test_ranks_compute_the_attention_of_one_process() -> None:
    """Catches the sink of another rank's head or stripe, and slices with more keys than queries."""
    cases = {
        "documents": _SinkCase(DOCUMENTS, heads=(6, 2), sinks=True, value_size=3),
        "window": _SinkCase([13, 11], sinks=True, window=4, stripes=2),
        "one document": _SinkCase(heads=(3, 1), sinks=True, seed=None),
    }
    plans = [((1, 2), cases), ((2, 2), cases)]
    for wrong in run_ranks(4, wrong_on_ranks, plans, TOLERANCE):
        assert not wrong


@pytest.mark.parametrize("window", [None, 4])
def test_calls_match_the_window_arguments_of_torch(window: int | None) -> None:
    """Catches a keyword that torch's flash attention lacks."""
    q, kv = torch.empty(7, 4, 64, device="meta"), torch.empty(9, 2, 64, device="meta")
    q, kv = q.bfloat16(), kv.bfloat16()
    mask = AttentionMask.of_documents([3, 4], [3, 6], window=window)
    out, lse = FlashKernel(0.5).with_lse(q, kv, kv, mask)
    assert (out.shape, lse.shape) == (q.shape, (7, 4))
    grads = FlashKernel(0.5).gradients(out, q, kv, kv, out, lse, mask)
    assert [x.shape for x in grads] == [q.shape, kv.shape, kv.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("documents", "keys"), [(None, 1024), ([300, 1, 211, 512], 1024), ([300, 724], 1600)]
)
def test_sinks_on_a_gpu_follow_the_definition(
    heads: tuple[int, int], window: int | None, documents: list[int] | None, keys: int
) -> None:
    """Catches a kernel whose backward ignores the lse that includes the sink, and a lost window."""
    qkv, dout = random_inputs(1, 1024, *heads, 64, keys=keys, device="cuda")
    mask = AttentionMask(window=window)
    if documents is not None:
        of_keys = [*documents[:-1], documents[-1] + keys - 1024]
        mask = AttentionMask.of_documents(documents, of_keys, window=window)
    expected = _results(ExplicitAttention(), qkv, dout, mask)
    narrow = [x.detach().bfloat16() for x in qkv]
    found = _results(SinkAttention(FlashKernel(None)), narrow, dout.bfloat16(), mask)
    for a, b in zip(found, expected, strict=True):
        # bfloat16 keeps 8 bits; inputs, weights and outputs are each rounded once or twice
        assert float((a.double() - b).norm() / b.norm()) < 0.03
