"""SwiGLU's product against autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from isp.layers.swiglu import silu_and_multiply


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [7, 64, 100])
def test_it_is_what_autograd_makes_of_it(dtype: torch.dtype, features: int) -> None:
    """Catches a gradient given to the other half, or written before it was read."""
    fused = torch.randn(2, 33, 2 * features, dtype=dtype, requires_grad=True)
    dy = torch.randn(2, 33, features, dtype=dtype)
    gate, up = fused.chunk(2, dim=-1)
    expected, found = F.silu(gate) * up, silu_and_multiply(fused)
    assert torch.equal(found, expected)
    (of_wanted,), (of_found,) = (torch.autograd.grad(y, fused, dy) for y in (expected, found))
    assert torch.equal(of_found, of_wanted)


def test_its_input_is_all_that_is_kept() -> None:
    """Catches silu(gate), or a half, kept beside it."""
    fused, kept = torch.randn(3, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        silu_and_multiply(fused)
    assert [x.data_ptr() for x in kept] == [fused.data_ptr()]
