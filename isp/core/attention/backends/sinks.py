"""Attention with sinks, by a kernel that returns the log-sum-exp.

T queries, L keys, H query heads, K KV heads, d head size

    forward   out, lse = kernel(q, k, v);  all = log(e^lse + e^sink);  out *= e^(lse - all)
    backward  dq, dk, dv = kernel'(dout, .., out, all), whose weights e^(logit - all) are those of
              the softmax with the sink;  d_sink = -sum over T of e^(sink - all) (dout . out)

A sink has no value, so its only effect is to reduce the weights of the keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isp.core.attention.backends.lse import LseKernel
from isp.core.attention.mask import AttentionMask
from isp.core.autograd import Function, once_differentiable

__all__ = ["SinkAttention"]

_ROWS = 8192
"""Number of queries whose products out * dout are in memory in float32 at a time."""


class SinkAttention:
    """Softmax attention in which each head has an extra logit without a value (gpt-oss)."""

    def __init__(self, kernel: LseKernel) -> None:
        self.kernel = kernel

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with q [B, Sq, H, d] to k and v [B, Sk, K, d], sinks [H] -> [B, Sq, H, d]."""
        assert sinks is not None
        mask.check_covers(q.shape[0], q.shape[1], k.shape[1])
        if mask.cu_seqlens is None:
            mask = _of_rows(q.shape[0], q.shape[1], k.shape[1], mask.causal, mask.window)
        out: Tensor = _Sinks.apply(*(x.flatten(0, 1) for x in (q, k, v)), sinks, self.kernel, mask)
        return out.view(q.shape).to(q.dtype)


# Cached so that one mask object is reused: it keeps its bounds on the device, which are then copied
# once. Made outside of inference mode, or training could not use a mask that inference made first.
@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _of_rows(rows: int, queries: int, keys: int, causal: bool, window: int | None) -> AttentionMask:
    """Return the mask of equal rows, each of which is a document, joined into one sequence."""
    lengths = [queries] * rows, [keys] * rows
    return AttentionMask.of_documents(*lengths, causal=causal, window=window)


class _Sinks(Function):
    """The autograd function of `SinkAttention`: scales the output of attention without sinks.

    With all = log(e^lse + e^sink), forward multiplies the output by e^(lse - all).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        kernel: LseKernel,
        mask: AttentionMask,
    ) -> Tensor:
        out, lse = kernel.with_lse(q, k, v, mask)
        # Flash attention returns lse = inf (not -inf) and output 0 where a query sees no key.
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        total = torch.logaddexp(lse, sinks.to(lse.dtype))  # [T, H]
        out.mul_((lse - total).exp_().unsqueeze(-1))
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.kernel, ctx.mask = kernel, mask
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        # Given `total` as lse, the kernel computes the weights of the softmax with the sink.
        grads = ctx.kernel.gradients(dout, q, k, v, out, total, ctx.mask)
        # Multiply in pieces: all products in float32 at once would take twice the output's memory.
        parts = zip(dout.split(_ROWS), out.split(_ROWS), strict=True)
        along = torch.cat([(a.to(total.dtype) * b).sum(-1) for a, b in parts])  # [T, H]
        d_sinks = -((sinks.to(total.dtype) - total).exp_() * along).sum(0)
        dq, dk, dv = (grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv, d_sinks.to(sinks.dtype), None, None
