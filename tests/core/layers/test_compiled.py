"""Rotations and SwiGLU: compiled against uncompiled, on the CPU by inductor's C++."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from isp.core.layers import compiled
from isp.core.layers.rotary import RotaryEmbedding, apply_rotary
from isp.core.layers.swiglu import swiglu
from tests.saved import saving

CPU = torch.device("cpu")
LENGTHS = (3, 16, 50)
HEADS, SIZE = 4, 16


def _draw(length: int, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(2, length, *shape, generator=generator)
        return x.to(device, dtype).requires_grad_()

    return draw


Outcome = tuple[list[Tensor], list[Tensor]]
"""Results with their gradients, and the tensors saved in between."""


def _run(
    layer: str, length: int, dtype: torch.dtype, device: torch.device, *, compiled: bool
) -> Outcome:
    draw = _draw(length, dtype, device)
    if layer == "rotation":  # x is a slice of a fused tensor, as in a model
        angles = RotaryEmbedding(SIZE)(
            torch.arange(2 * length, device=device).view(2, length), dtype=dtype
        )
        inputs = [draw(3 * HEADS, SIZE)]
        turn = partial(apply_rotary, compiled=compiled)
        compute: Callable[..., Tensor] = lambda x: turn(x[:, :, :HEADS], *angles)  # noqa: E731
    else:
        inputs = [draw(SIZE), draw(SIZE)]
        compute = partial(swiglu, compiled=compiled)
    with saving() as kept:
        out = compute(*inputs)
    return [out, *torch.autograd.grad(out, inputs, out.detach().roll(1))], kept


def _check(layer: str, length: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
    (found, kept), (expected, _) = (
        _run(layer, length, dtype, device, compiled=compiled) for compiled in (True, False)
    )
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == dtype
        # one rounding, where the plain ones have up to four, of 2^-9 each in bfloat16
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-2)
        a, b = a.detach().double(), b.detach().double()
        assert float((a - b).norm() / b.norm()) < tolerance
    rows = [x.numel() for x in kept if x.shape[:2] == (2, length)]
    row = 2 * length
    assert rows == {"rotation": [row * SIZE // 2] * 2, "swiglu": [row * SIZE] * 2}[layer]


LAYERS = ("rotation", "swiglu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_formulas_and_saved_tensors_match_the_plain_ones(layer: str, dtype: torch.dtype) -> None:
    """Catches another formula, a gradient of the wrong input, and more saved tensors."""
    with torch.compiler.set_stance("force_eager"):
        _check(layer, LENGTHS[-1], dtype)


@pytest.mark.slow
@pytest.mark.timeout(600)  # compilers are slow on a busy machine
@pytest.mark.parametrize(
    ("layer", "dtype"), [("rotation", torch.float32), ("swiglu", torch.bfloat16)]
)
def test_one_kernel_serves_all_lengths(layer: str, dtype: torch.dtype) -> None:
    """Catches a kernel that computes something else, and one compiled for each length."""
    _check_lengths(layer, dtype, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_kernels_match_on_a_gpu(layer: str) -> None:
    """Catches triton kernels that compute something else, or that are compiled for each length."""
    _check_lengths(layer, torch.bfloat16, torch.device("cuda"))


def _check_lengths(layer: str, dtype: torch.dtype, device: torch.device) -> None:
    before, graphs = counters["stats"]["unique_graphs"], []
    for length in LENGTHS:
        _check(layer, length, dtype, device)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [2] * len(graphs)  # one forward, one backward
    assert not counters["graph_break"]


def test_a_run_without_a_compiler_continues_and_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a run that ends because a mere optimization fails, and a fallback that is not
    logged.
    """

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("no C++ compiler\nits output")

    monkeypatch.setattr(compiled, "_probe", fail)
    fault = compiled._fault_on.__wrapped__(CPU)
    assert fault == "RuntimeError: no C++ compiler"
    monkeypatch.setattr(compiled, "_fault_on", lambda device: fault)
    with pytest.raises(ValueError, match=r"model.compile=true: .*no C\+\+ compiler\).*=false$"):
        compiled.compiles.__wrapped__(True, CPU)
    with caplog.at_level(logging.WARNING):
        assert not compiled.compiles.__wrapped__("auto", torch.device("cuda"))
    (record,) = caplog.records
    assert "RuntimeError: no C++ compiler): install triton" in record.message


def test_kernels_are_compiled_on_request_or_on_cuda() -> None:
    """Catches kernels compiled although the key says no, or for tensors on meta."""
    with torch.compiler.set_stance("force_eager"):
        assert compiled.compiles.__wrapped__(True, CPU)
    for when, device in (("auto", "cpu"), (False, "cuda"), (True, "meta"), ("auto", "meta")):
        assert not compiled.compiles.__wrapped__(when, torch.device(device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [7, 64, 100])
def test_swiglu_equals_the_gradients_of_autograd(dtype: torch.dtype, features: int) -> None:
    """Catches gradients of gate and up that are swapped, and one written before it was read."""
    gate, up = (torch.randn(2, 33, features, dtype=dtype, requires_grad=True) for _ in range(2))
    dy = torch.randn(2, 33, features, dtype=dtype)
    expected, found = F.silu(gate) * up, swiglu(gate, up)
    assert torch.equal(found, expected)
    gradients = (torch.autograd.grad(y, (gate, up), dy) for y in (found, expected))
    for of_found, of_expected in zip(*gradients, strict=True):
        assert torch.equal(of_found, of_expected)


def test_swiglu_saves_only_its_inputs() -> None:
    """Catches silu(gate) saved in addition."""
    inputs = torch.randn(2, 3, 4, requires_grad=True).unbind()
    with saving() as kept:
        swiglu(*inputs)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs]
