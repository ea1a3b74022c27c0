"""Kernels whose results over parts of the keys can be merged: they tell each softmax's sum.

T queries, L keys, H query heads, K KV heads, d head size
"""

from __future__ import annotations

import logging
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from isp.core.attention.backends.flash import FlashAttention, VarlenAttention
from isp.core.attention.backends.sdpa import SdpaAttention
from isp.core.attention.local import AttentionByRows, LocalAttention
from isp.core.attention.mask import AttentionMask
from isp.core.torch_private import flash_attention, flash_attention_backward

__all__ = ["FlashKernel", "LseKernel", "lse_kernel"]

logger = logging.getLogger(__name__)


@runtime_checkable
class LseKernel(Protocol):
    """Attention to a part of the keys, with the log-sum-exp by which such parts are merged."""

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """q [T, H, d], k and v [L, K, d] -> the output [T, H, d], and lse [T, H].

        Both in float32 at least, but for what kernels round. If a query sees no key, its output is
        0, and its lse -inf, or inf on CUDA.
        """
        ...

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Those of q, k and v by way of these keys; `out` and `lse` are those of all keys."""
        ...


def lse_kernel(local: LocalAttention, q: Tensor) -> LseKernel | None:
    """The kernel that does what `local` does for such queries; None: it cannot be merged."""
    if isinstance(local, LseKernel):
        return local
    if not isinstance(local, SdpaAttention | VarlenAttention | FlashAttention | AttentionByRows):
        return None
    if isinstance(local, FlashAttention) and local.softcap is not None:
        return None
    is_narrow, size = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    if q.is_cuda and is_narrow and size % 8 == 0 and size <= 256:  # what flash attention takes
        return FlashKernel(local.scale)
    logger.warning(
        "attention: keys are gathered, not sent in a ring: flash attention, which merges blocks,"
        " takes 16 bits and heads of up to 256 features, a multiple of 8, not %s and %d on %s",
        *(q.dtype, size, q.device.type),
    )
    return None


class FlashKernel:
    """Torch's flash attention on CUDA: `aten::_flash_attention_forward` as in torch 2.11 to 2.15.

    Its lse is [H, T] for packed documents. Source: torch/nn/attention/varlen.py.
    """

    def __init__(self, scale: float | None) -> None:
        self.scale = scale

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        ends, longest = mask.cu_seqlens_on(q.device), mask.max_lengths
        out, lse, *_ = flash_attention(
            q, k, v, *ends, *longest, 0.0, mask.causal, False, **self._options(mask)
        )
        return out, lse.T

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ends, longest = mask.cu_seqlens_on(q.device), mask.max_lengths
        unused = (q.new_zeros(2, dtype=torch.uint64), q.new_empty(0))  # state of dropout
        dq, dk, dv = flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.T.contiguous(),
            *ends,
            *longest,
            0.0,
            mask.causal,
            *unused,
            **self._options(mask),
        )
        return dq, dk, dv

    def _options(self, mask: AttentionMask) -> dict[str, Any]:
        if mask.window is None:
            return {"scale": self.scale}
        left, right = mask.window - 1, 0 if mask.causal else mask.window - 1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": right}
