"""SwiGLU's product of gate and up, which keeps nothing but its input.

Source: Shazeer 2020 (GLU Variants Improve Transformer).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.autograd import Function, once_differentiable
from isp.layers.compiled import lazily_compiled, widened

__all__ = ["silu_and_multiply", "swiglu"]


def swiglu(gate: Tensor, up: Tensor, *, compiled: bool = False) -> Tensor:
    """silu(gate) * up, each [.., F], of which nothing else is kept for backward.

    `compiled`: one kernel each, [Note: Compiled] in `isp.layers.compiled`.
    """
    if not (compiled or torch.is_grad_enabled()):
        return F.silu(gate).mul_(up)
    out: Tensor = _SwiGLU.apply(gate, up, compiled)
    return out


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.compiled = compiled
        return _product_of(gate, up) if compiled else F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if ctx.compiled:
            return *_gradients(gate, up, dy), None
        d_gate = dy * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, F.silu(gate).mul_(dy), None


def silu_and_multiply(fused: Tensor, *, compiled: bool = False) -> Tensor:
    """silu(gate) * up: fused [.., 2F], gate before up -> [.., F].

    Keeps `fused` alone. Backward writes both gradients into one tensor, which is all that it makes.
    `compiled`: one kernel each, [Note: Compiled] in `isp.layers.compiled`.
    """
    if not (compiled or torch.is_grad_enabled()):
        gate, up = fused.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    out: Tensor = _SiluAndMultiply.apply(fused, compiled)
    return out


class _SiluAndMultiply(Function):
    @staticmethod
    def forward(ctx: Any, fused: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(fused)
        ctx.compiled = compiled
        if compiled:
            return _product(fused)
        gate, up = fused.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (fused,) = ctx.saved_tensors
        if ctx.compiled:
            return _gradient(fused, dy), None
        gate, up = fused.chunk(2, dim=-1)
        gradient = torch.empty_like(fused)
        d_gate, d_up = gradient.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=d_up).mul_(dy)
        torch.mul(dy, up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return gradient, None


@lazily_compiled
def _product(fused: Tensor) -> Tensor:
    gate, up = widened(fused).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(fused.dtype)


@lazily_compiled
def _gradient(fused: Tensor, dy: Tensor) -> Tensor:
    gate, up = widened(fused).chunk(2, dim=-1)
    sigmoid, dy = gate.sigmoid(), widened(dy)
    d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((d_gate, dy * gate * sigmoid), -1).to(fused.dtype)


@lazily_compiled
def _product_of(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(widened(gate)) * widened(up)).to(gate.dtype)


@lazily_compiled
def _gradients(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    dtype, gate, up, dy = gate.dtype, widened(gate), widened(up), widened(dy)
    sigmoid = gate.sigmoid()
    d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return d_gate.to(dtype), (dy * gate * sigmoid).to(dtype)
