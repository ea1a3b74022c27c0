"""SwiGLU's product of gate and up, which saves nothing but its inputs for backward.

Source: Shazeer 2020 (GLU Variants Improve Transformer).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.autograd import Function, once_differentiable
from isp.core.layers.compiled import lazily_compiled, widened

__all__ = ["swiglu"]


def swiglu(gate: Tensor, up: Tensor, *, compiled: bool = False) -> Tensor:
    """Return silu(gate) * up, of [.., F] each; backward computes silu(gate) again.

    `compiled`: forward and backward are one kernel each ([Note: Compiled] in
    `isp.core.layers.compiled`).
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
        return _product(gate, up) if compiled else F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if ctx.compiled:
            return *_gradients(gate, up, dy), None
        d_gate = dy * up
        # In place, so that no third tensor of this size is allocated.
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, F.silu(gate).mul_(dy), None


@lazily_compiled
def _product(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(widened(gate)) * widened(up)).to(gate.dtype)


@lazily_compiled
def _gradients(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    dtype, gate, up, dy = gate.dtype, widened(gate), widened(up), widened(dy)
    sigmoid = gate.sigmoid()
    d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return d_gate.to(dtype), (dy * gate * sigmoid).to(dtype)
