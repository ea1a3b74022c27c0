"""SwiGLU's product against autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from isp.layers.swiglu import swiglu
from tests.saved import saving


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [7, 64, 100])
def test_it_is_what_autograd_makes_of_it(dtype: torch.dtype, features: int) -> None:
    """Catches a gradient given to the other one, or written before it was read."""
    gate, up = (torch.randn(2, 33, features, dtype=dtype, requires_grad=True) for _ in range(2))
    dy = torch.randn(2, 33, features, dtype=dtype)
    expected, found = F.silu(gate) * up, swiglu(gate, up)
    assert torch.equal(found, expected)
    gradients = (torch.autograd.grad(y, (gate, up), dy) for y in (found, expected))
    for of_found, of_expected in zip(*gradients, strict=True):
        assert torch.equal(of_found, of_expected)


def test_its_input_is_all_that_is_kept() -> None:
    """Catches silu(gate) kept beside it."""
    inputs = torch.randn(2, 3, 4, requires_grad=True).unbind()
    with saving() as kept:
        swiglu(*inputs)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs]
