"""Kernels of the installed packages on a GPU against ISP's torch code on that GPU."""

from __future__ import annotations

import pytest
import torch

from isp.core.mixers import kernels
from isp.core.mixers.convolution import convolve_alone
from tests.core.mixers.test_kernels import NAMES, PACKAGES, WAYS, computed, kind

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 6e-2}
"""Relative to the largest value: products are TF32 or bfloat16."""


def _same(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    far = (found.float() - expected.float()).abs().max()
    return bool(far <= TOLERANCE[dtype] * expected.float().abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_scan_kernels_equal_the_torch_code(
    name: str, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a kernel that interprets its arguments differently."""
    module = dict(zip(NAMES, PACKAGES, strict=False))[name]
    pytest.importorskip(module, exc_type=ImportError)
    if name == "selective":
        pytest.importorskip("selective_scan_cuda", exc_type=ImportError)
    of, lengths = kind(name, 64, 64), (401,) if way == "alone" else (100, 1, 300)
    found = computed(of, lengths, way=way, dtype=dtype, device="cuda")
    monkeypatch.setattr(kernels, "_DEVICES", ())
    expected = computed(of, lengths, way=way, dtype=dtype, device="cuda")
    wrong = [
        i for i, (x, y) in enumerate(zip(found, expected, strict=True)) if not _same(x, y, dtype)
    ]
    assert wrong == []


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_convolution_kernel_equals_the_torch_code(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a shifted result, and a layout that the kernel refuses in backward."""
    pytest.importorskip("causal_conv1d", exc_type=ImportError)

    def found() -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(7)
        shapes = (2, 100, 64), (64, 4), (64,)
        xs = [torch.randn(s, generator=draw).to("cuda", dtype).requires_grad_() for s in shapes]
        out = convolve_alone(*xs)
        return [out, *torch.autograd.grad(out, xs, torch.ones_like(out))]

    by_kernel = found()
    monkeypatch.setattr(kernels, "_DEVICES", ())
    assert all(_same(x, y, dtype) for x, y in zip(by_kernel, found(), strict=True))
