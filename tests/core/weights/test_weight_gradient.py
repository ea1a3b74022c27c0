"""The product of a weight gradient, in each dtype and destination."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isp.core.weights.gradients import weight_gradient
from isp.planner.record import PeakMemory

N, O, I = 7, 3, 4  # noqa: E741
NARROW = torch.bfloat16


def _factors(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return (torch.randn(N, n, generator=random).to(device, dtype) for n in (O, I))  # type: ignore[return-value]


@pytest.mark.parametrize("factors", [NARROW, torch.float32, torch.float64])
@pytest.mark.parametrize("add", [False, True])
def test_a_product_is_returned_written_or_added(factors: torch.dtype, add: bool) -> None:
    """Catches previous contents that remain or are lost, and a sum rounded to the factors'
    dtype.
    """
    dy, x = _factors(factors)
    own = dy.T @ x
    assert torch.equal(weight_gradient(dy, x), own)
    wide = torch.promote_types(factors, torch.float32)
    assert torch.equal(weight_gradient(dy, x, dtype=wide), own.to(wide))
    before = torch.full((O, I), 1 / 3 if add else torch.nan, dtype=wide)
    into = before.clone()
    assert weight_gradient(dy, x, into=into, add=add) is into
    expected = before + own if add else own.to(wide)
    torch.testing.assert_close(
        into, expected, rtol=1e-6 if wide is torch.float32 else 1e-15, atol=0
    )


def test_bfloat16_factors_are_accumulated_in_float32_by_one_operator() -> None:
    """Catches a separate dW before the sum, and arguments that torch's operators reject.

    Runs on meta, which stands in for CUDA.
    """
    dy, x = _factors(NARROW, "meta")
    into = torch.empty(O, I, device="meta")
    with PeakMemory() as made:
        assert weight_gradient(dy, x, dtype=torch.float32).dtype is torch.float32
    assert made.peak_bytes == 4 * O * I
    with PeakMemory() as made:
        for add in (False, True):
            assert weight_gradient(dy, x, into=into, add=add) is into
    assert made.peak_bytes == 0


@pytest.mark.gpu
def test_float32_sums_on_a_device_equal_those_on_cpu() -> None:
    """Catches sums of bfloat16 factors that are rounded on CUDA, or overwrite the previous
    contents.
    """
    dy, x = _factors(NARROW, "cuda")
    expected = dy.double().T @ x.double()
    into = torch.full((O, I), torch.nan, device="cuda")
    found = [weight_gradient(dy, x, dtype=torch.float32), weight_gradient(dy, x, into=into)]
    for product in found:
        torch.testing.assert_close(product.double(), expected, rtol=1e-6, atol=1e-6)
    weight_gradient(dy, x, into=into, add=True)
    torch.testing.assert_close(into.double(), 2 * expected, rtol=1e-6, atol=1e-6)
