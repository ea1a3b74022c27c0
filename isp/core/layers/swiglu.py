"""The product silu(gate) * up of SwiGLU, which saves only its inputs for backward.

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
    """Return silu(gate) * up; both are [.., F]. Backward computes silu(gate) again.

    With `compiled`, forward and backward are one kernel each. See [Note: Compiled] in
    docs/design/notes/layers.md.
    """
    if not (compiled or torch.is_grad_enabled()):
        return F.silu(gate).mul_(up)
    out: Tensor = _SwiGLU.apply(gate, up, compiled)
    return out


class _SwiGLU(Function):
    """The autograd function of silu(gate) * up."""

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
    """Return silu(gate) * up, computed in float32 or wider and rounded once."""
    return (F.silu(widened(gate)) * widened(up)).to(gate.dtype)


@lazily_compiled
def _gradients(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, computed in float32 or wider and rounded once."""
    dtype, gate, up, dy = gate.dtype, widened(gate), widened(up), widened(dy)
    sigmoid = gate.sigmoid()
    d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return d_gate.to(dtype), (dy * gate * sigmoid).to(dtype)
