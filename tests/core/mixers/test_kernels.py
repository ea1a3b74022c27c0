"""Arguments of package kernels, tested with stand-ins of the same signatures on the CPU.

Each stand-in loops over tokens, checks its arguments as the package does, and is compared in
float64 with ISP's torch code: results, final states, and the gradients of both.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.mixers import kernels
from isp.core.mixers.convolution import convolve_alone
from tests.core.mixers import reference

LENGTHS = (3, 1, 5)
calls: list[str] = []


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    """Stand in for fla.ops.gated_delta_rule: [1, T, ..], states [N, HV, K, V]; with g [.., K] for
    chunk_kda.
    """
    assert not kwargs
    assert q.shape[0] == 1
    assert q.dtype == k.dtype == v.dtype
    assert cu_seqlens.dtype == torch.int64
    assert cu_seqlens.equal(cu_seqlens_cpu)
    assert output_final_state
    calls.append("delta")
    assert initial_state is None or len(initial_state) == len(cu_seqlens) - 1
    outs, states = [], []
    for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        out, state = reference.delta_rule(
            *(x[0, a:b] for x in (v, g, beta, q, k)),
            None if initial_state is None else initial_state[n],
            normalise=use_qk_l2norm_in_kernel,
        )
        outs.append(out)
        states.append(state)
    return torch.cat(outs)[None], torch.stack(states)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
    return_varlen_states=False, state_dtype=None,
):  # fmt: skip
    """Stand in for mamba_ssm.ops.triton.ssd_combined: x [B, T, H, P], states [B, H, P, N], seq_idx
    [B, T].
    """
    assert x.dtype == B.dtype == C.dtype
    assert x.shape[0] == 1
    calls.append("mamba2")
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    assert seq_idx is None or seq_idx.dtype == torch.int32
    ends = [0, x.shape[1]]
    if seq_idx is not None:
        ends[1:1] = (seq_idx[0].diff().nonzero().flatten() + 1).tolist()
    state, outs = None if initial_states is None else initial_states[0], []
    for a, b in pairwise(ends):
        out, behind = reference.mamba2(*(t[0, a:b] for t in (x, dt, B, C)), A, D, state)
        outs.append(out)
    out = torch.cat(outs)[None]
    return (out, behind[None]) if return_final_states else out


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
    return_last_state=False,
):  # fmt: skip
    """Stand in for mamba_ssm.ops.selective_scan_interface: u and delta [B, D, L], B and C [B, N,
    L].
    """
    assert u.dtype == delta.dtype == A.dtype == B.dtype == C.dtype
    calls.append("selective")
    return reference.selective(*(x[0].T for x in (u, delta, B, C)), A).T[None]


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
    final_states_out=None, activation=None,
):  # fmt: skip
    """Stand in for causal_conv1d: x [B, C, T] with channels last and C divisible by 8."""
    assert x.stride(1) == 1
    assert not any(size % 8 for size in (x.shape[1], x.stride(0), x.stride(2)))
    calls.append("convolution")
    padded = F.pad(x, (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))


PACKAGES: dict[str, Callable[..., Any] | None] = {
    "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
    "fla.ops.kda": chunk_gated_delta_rule,
    "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
    "mamba_ssm.ops.selective_scan_interface": selective_scan_fn,
    "selective_scan_cuda": None,
    "causal_conv1d": causal_conv1d_fn,
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install stand-ins of all packages, which accept float64 on the CPU."""
    for name, function in PACKAGES.items():
        module = ModuleType(name)
        if function is not None:
            kept = "chunk_kda" if name.endswith("kda") else function.__name__
            setattr(module, kept, function)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernels, "_DEVICES", ("cpu",))
    monkeypatch.setattr(kernels, "_DTYPES", (torch.float64,))
    kernels._imported.cache_clear()
    kernels._report.cache_clear()
    calls.clear()


def kind(name: str, key: int, value: int) -> reference.Kind:
    """Return a recurrence with these sizes of keys (or states) and values."""
    sizes = {"key": key, "value": value}
    if name == "delta":
        return reference.delta_kind(4, 2, **sizes)
    if name == "kda":
        return reference.delta_kind(2, 2, **sizes, per_feature=True, normalise=False)
    if name == "mamba2":
        return reference.mamba2_kind(4, 2, **sizes)
    return reference.selective_kind(value, key=key)


def computed(
    kind: reference.Kind,
    lengths: tuple[int, ...],
    *,
    way: str,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> list[Tensor]:
    """Return results, final states, and every gradient; `dtype`: the dtype of the token tensors."""
    wide = torch.promote_types(dtype, torch.float32)
    initial = torch.Generator().manual_seed(8)
    xs = kind.tensors(sum(lengths), 7)
    xs.append(torch.randn(len(lengths), *kind.state, generator=initial, dtype=torch.float64))
    types = [dtype] * kind.number + [wide] * (len(xs) - kind.number)
    xs = [x.detach().to(device, at).requires_grad_() for x, at in zip(xs, types, strict=True)]
    inputs = kind.inputs(xs[:-1])
    if way == "summary":
        outs: tuple[Tensor, ...] = (kind.recurrence.summary(inputs, lengths),)
    else:
        outs = kind.recurrence.scan(inputs, lengths, xs[-1] if way == "from states" else None)
    seeds = [
        torch.linspace(-1, 2, x.numel(), device=device).view(x.shape).to(x.dtype) for x in outs
    ]
    return [*outs, *torch.autograd.grad(outs, xs, seeds, materialize_grads=True)]


WAYS = ("from zero", "from states", "summary", "alone")
NAMES = ("delta", "kda", "mamba2", "selective")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_scan_kernels_get_the_layout_they_expect(
    name: str, way: str, request: pytest.FixtureRequest
) -> None:
    """Catches a layout, an order of arguments, or a state that differs from the package's."""
    lengths = (9,) if way == "alone" else LENGTHS
    own = computed(kind(name, 5, 3), lengths, way=way)
    request.getfixturevalue("installed")
    by_kernel = computed(kind(name, 5, 3), lengths, way=way)
    assert bool(calls) == (name != "mamba2" or way != "summary")  # its summary is one product
    for x, y in zip(by_kernel, own, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_the_convolution_kernel_gets_channels_last(request: pytest.FixtureRequest) -> None:
    """Catches a halo cut off at the wrong end, and sizes that the kernel refuses."""
    cases = [(8, 4, 1), (8, 4, 3), (6, 4, 1), (8, 5, 1)]
    draw = torch.Generator().manual_seed(7)
    xs = [
        [torch.randn(s, generator=draw, dtype=torch.float64) for s in ((2, 7, c), (c, k), (c,))]
        for c, k, _ in cases
    ]
    own = [convolve_alone(*x, dilation) for x, (*_, dilation) in zip(xs, cases, strict=True)]
    request.getfixturevalue("installed")
    for x, (*_, dilation), expected in zip(xs, cases, own, strict=True):
        torch.testing.assert_close(convolve_alone(*x, dilation), expected, rtol=0, atol=1e-12)
    assert calls == ["convolution"]


def test_the_choice_is_logged_once(
    installed: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a choice of kernel or torch code that is not logged, and a package that is
    too old.
    """
    caplog.set_level(logging.INFO, logger=kernels.__name__)
    for _ in range(2):
        computed(kind("delta", 5, 3), LENGTHS, way="from zero")
    monkeypatch.delitem(sys.modules, "selective_scan_cuda")
    computed(kind("selective", 5, 3), LENGTHS, way="from zero")
    old = ModuleType("fla.ops.kda")
    old.chunk_kda = lambda q, k, v, g, beta: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.kda", old)
    computed(kind("kda", 5, 3), LENGTHS, way="from zero")
    monkeypatch.setattr(kernels, "_DTYPES", (torch.bfloat16,))
    computed(kind("mamba2", 5, 3), LENGTHS, way="from zero")
    said = [record.getMessage().removeprefix("mixers: ") for record in caplog.records]
    own = "using ISP's torch code; "
    assert said == [
        "chunk_gated_delta_rule",
        f"{own}selective_scan_fn is unavailable: cannot be imported: No module named"
        " 'selective_scan_cuda'",
        f"{own}chunk_kda is unavailable: too old, it takes no cu_seqlens, cu_seqlens_cpu",
        f"{own}mamba_chunk_scan_combined is unavailable: torch.float64",
    ]
