"""Local attention by every backend that runs on this machine, against attention written out in
full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from isp.core.attention.backend import AttentionBackend
from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.backends.explicit import ExplicitAttention
from isp.core.attention.backends.sdpa import SdpaAttention
from isp.core.attention.local import LocalAttention, make_local_attention
from isp.core.attention.mask import AttentionMask
from tests.core.attention.reference import (
    attend,
    largest_error,
    make_mask,
    random_inputs,
    with_gradients,
)
from tests.toolkit import Operations

TOLERANCE = 1e-12
BACKENDS: list[Callable[..., LocalAttention]] = [CpuAttention, SdpaAttention]


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(
    "documents", [None, [7, 16, 1, 1, 1, 9, 5], [20, 20], [1] * 40, [13, 13, 13, 1], [0, 40, 0]]
)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 5), (False, 5)])
def test_documents_and_windows_limit_attention(
    make: Callable[..., LocalAttention],
    documents: list[int] | None,
    causal: bool,
    window: int | None,
) -> None:
    """Catches attention across documents, and an ignored window."""
    inputs, dout = random_inputs(2, 40, 4, 2)
    mask = make_mask(documents, causal, window, batch=2)
    assert largest_error(make(), inputs, dout, mask) < TOLERANCE


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 4), (3, 1)])
@pytest.mark.parametrize("documents", [None, [7, 16, 1, 1, 1, 9, 5]])
def test_query_heads_use_the_kv_head_of_their_group(
    make: Callable[..., LocalAttention], heads: tuple[int, int], documents: list[int] | None
) -> None:
    """Catches query heads paired with the wrong KV heads."""
    inputs, dout = random_inputs(2, 40, *heads)
    for window in (None, 5):
        assert (
            largest_error(make(), inputs, dout, make_mask(documents, True, window, batch=2))
            < TOLERANCE
        )


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(("queries", "keys"), [(3, 7), (7, 3), (1, 5), (5, 1), (300, 700)])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 2), (False, 2)])
def test_unequal_lengths_align_at_the_end(
    make: Callable[..., LocalAttention], queries: int, keys: int, causal: bool, window: int | None
) -> None:
    """Catches torch's alignment, at the first query and key, and wrong results for rows without
    keys.
    """
    inputs, dout = random_inputs(1, queries, 2, 1, keys=keys)
    mask = AttentionMask(causal=causal, window=window)
    assert largest_error(make(), inputs, dout, mask) < TOLERANCE


@pytest.mark.parametrize("make", [*BACKENDS, ExplicitAttention])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 2), (True, 90)])
def test_packed_documents_may_have_other_key_lengths(
    make: Callable[..., LocalAttention], causal: bool, window: int | None
) -> None:
    """Catches keys of the neighbor, alignment at the first key, and documents without keys."""
    lengths, keys = [3, 0, 5, 4, 2, 2, 250, 70], [7, 4, 0, 2, 2, 2, 300, 670]
    inputs, dout = random_inputs(1, sum(lengths), 4, 2, keys=sum(keys))
    mask = AttentionMask.of_documents(lengths, keys, causal=causal, window=window)
    assert largest_error(make(), inputs, dout, mask) < TOLERANCE
    assert torch.equal(make()(*inputs, mask=mask)[:, 3:8], torch.zeros(1, 5, 4, 4).double())


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(
    ("length", "window"),
    [(255, None), (256, None), (257, None), (257, 100), (1024, 100), (1025, None), (1025, 700)],
)
def test_long_documents_in_blocks_follow_the_definition(
    make: Callable[..., LocalAttention], length: int, window: int | None
) -> None:
    """Catches errors at block boundaries, just below and above the sizes where the cut changes."""
    inputs, dout = random_inputs(1, length, 2, 1)
    assert largest_error(make(), inputs, dout, AttentionMask(window=window)) < TOLERANCE


def test_masks_cached_in_inference_mode_work_in_training() -> None:
    """Catches a cached mask that autograd refuses."""
    inputs, _ = random_inputs(1, 77, 2, 1)
    mask = AttentionMask(window=13)
    with torch.inference_mode():
        CpuAttention()(*inputs, mask=mask)
    q, k, v = (x[0].detach().requires_grad_() for x in inputs)
    out, _ = CpuAttention().with_lse(q, k, v, mask)
    out.sum().backward()
    assert all(x.grad is not None for x in (q, k, v))


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("magnitude", [1e3, 1e-3])
def test_large_logits_do_not_overflow(
    make: Callable[..., LocalAttention], magnitude: float
) -> None:
    """Catches an exponential that overflows, and a mask value that is not low enough."""
    inputs, dout = random_inputs(1, 600, 2, 1)
    with torch.no_grad():
        inputs[0] *= magnitude
    for mask in (AttentionMask(), AttentionMask(window=70), make_mask([1, 299, 300])):
        # A logit of 1e3 is known to 1e-13, and so are the weights; k's gradient has a factor q.
        assert largest_error(make(), inputs, dout, mask) < TOLERANCE * max(1.0, magnitude)


@pytest.mark.parametrize("make", BACKENDS)
def test_large_negative_logits_stay_above_masked_ones(make: Callable[..., LocalAttention]) -> None:
    """Catches a masked key with logit +1e3 that outweighs visible keys with -1e3."""
    inputs, dout = random_inputs(1, 700, 1, 1, dtype=torch.float32)
    with torch.no_grad():
        inputs[0].fill_(1.0)
        inputs[1][:, :350].fill_(-500.0)  # logit -1e3
        inputs[1][:, 350:].fill_(500.0)  # +1e3, hidden from the first half
    for mask in (AttentionMask(), AttentionMask(window=9)):
        wide = [x.detach().double().requires_grad_() for x in inputs]
        expected = attend(*wide, mask)
        out = make()(*inputs, mask=mask)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out, inputs, dout))


@pytest.mark.parametrize("make", BACKENDS)
def test_queries_without_keys_give_zeros(make: Callable[..., LocalAttention]) -> None:
    """Catches NaN from a softmax over no keys; zeros without gradient are right."""
    inputs, dout = random_inputs(1, 6, 2, 2, keys=2)
    out, *grads = with_gradients(make()(*inputs, mask=AttentionMask()), inputs, dout)
    assert torch.equal(out[:, :4], torch.zeros(1, 4, 2, 4, dtype=torch.float64))
    assert torch.equal(grads[0][:, :4], torch.zeros(1, 4, 2, 4, dtype=torch.float64))
    assert out[:, 4:].abs().min() > 0
    (q, k, v), _ = random_inputs(1, 1, 2, 1)
    expected = v.expand(1, 1, 2, 4)
    torch.testing.assert_close(make()(q, k, v, mask=AttentionMask()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """Catches a CPU kernel that rounds between the two matrix products."""
    inputs, dout = random_inputs(1, 50, 4, 2)
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    wide = [x.detach().float().requires_grad_() for x in inputs]
    mask = make_mask([20, 30])
    narrow = with_gradients(CpuAttention()(*inputs, mask=mask), inputs, dout.to(dtype))
    exact = with_gradients(CpuAttention()(*wide, mask=mask), wide, dout.to(dtype).float())
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(narrow, exact, strict=True))


def test_scale_multiplies_the_logits() -> None:
    """Catches an ignored scale: queries scaled by hand must give the same."""
    for make in BACKENDS:
        (q, k, v), _ = random_inputs(1, 9, 2, 2)
        scaled = make(scale=0.25)(q * 2, k, v, mask=AttentionMask())  # d = 4: 1 / sqrt(d) = 0.5
        torch.testing.assert_close(scaled, make()(q, k, v, mask=AttentionMask()))


@pytest.mark.parametrize(
    "mask", [AttentionMask(), make_mask([1000, 3096]), AttentionMask(window=64)]
)
def test_no_tensor_has_all_queries_by_all_keys(mask: AttentionMask) -> None:
    """Catches S x S scores or masks, forward or backward, whether packed, windowed or neither."""
    length, heads, head_dim = 4096, 2, 4
    inputs, dout = random_inputs(1, length, heads, 1, head_dim, dtype=torch.float32)
    sizes = []

    def note(_: str, __: Any, out: Any) -> None:
        sizes.extend(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))

    with Operations(note):
        torch.autograd.grad(CpuAttention()(*inputs, mask=mask), inputs, dout)
    assert length * heads * head_dim <= max(sizes) < length * length / 16


def test_many_documents_make_one_autograd_node() -> None:
    """Catches a graph with a slice for each document, whose gradients are each as long as the
    sequence.
    """
    inputs, dout = random_inputs(1, 512, 2, 1)
    mask = make_mask([5, 6] * 46 + [6])
    made = []
    with Operations(lambda name, *_: made.append(name)):
        torch.autograd.grad(CpuAttention()(*inputs, mask=mask), inputs, dout)
    assert made.count("new_zeros") == 4  # the result, and the gradients of q, k and v


# -- on a GPU ------------------------------------------------------------------------------------

GPU_BACKENDS = [b for b in AttentionBackend if b is not AttentionBackend.AUTO]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize(
    ("documents", "keys"),
    [
        (None, None),
        ([300, 1, 211, 512], None),
        (None, [1500]),
        ([300, 1, 211, 512], [300, 90, 800, 600]),
    ],
)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 100)])
def test_gpu_backends_follow_the_definition(
    backend: AttentionBackend,
    heads: tuple[int, int],
    documents: list[int] | None,
    keys: list[int] | None,
    causal: bool,
    window: int | None,
) -> None:
    """Catches a kernel called with the wrong alignment, window, scale or documents."""
    device = torch.device("cuda")
    try:
        attention = make_local_attention(backend, device=device, dtype=torch.bfloat16)
    except ValueError as error:
        pytest.skip(str(error))
    inputs, dout = random_inputs(1, 1024, *heads, 64, keys=keys and sum(keys))
    mask = make_mask(documents, causal, window)
    if documents is not None:
        mask = AttentionMask.of_documents(documents, keys, causal=causal, window=window)
    expected = with_gradients(attend(*inputs, mask), inputs, dout)
    narrow = [x.detach().to(device, torch.bfloat16).requires_grad_() for x in inputs]
    out = attention(*narrow, mask=mask)
    result = with_gradients(out, narrow, dout.to(device, torch.bfloat16))
    for a, b in zip(result, expected, strict=True):
        # bfloat16 keeps 8 bits; inputs, weights and outputs are each rounded once
        assert float((a.double().cpu() - b).norm() / b.norm()) < 0.02
