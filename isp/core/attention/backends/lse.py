"""Kernels that return the log-sum-exp, by which results for parts of the keys can be merged.

T queries, L keys, H query heads, K KV heads, d head size
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from isp.core.attention.mask import AttentionMask
from isp.core.torch_private import flash_attention, flash_attention_backward

__all__ = ["FlashKernel", "LseKernel"]


@runtime_checkable
class LseKernel(Protocol):
    """Attention to some of the keys, with the log-sum-exp that merging with other keys needs."""

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """Attend with q [T, H, d] to k and v [L, K, d] -> the output [T, H, d] and lse [T, H].

        The lse is float32 or wider; the output is in the dtype that the kernel returns. If a query
        sees no key, its output is 0 and its lse -inf, or inf on CUDA.
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
        """Return the gradients of q, k and v for these keys.

        `out` and `lse` are the merged results over all keys, not only over these.
        """
        ...


class FlashKernel:
    """torch's flash attention on CUDA: `aten::_flash_attention_forward` as in torch 2.11 to 2.15.

    Torch returns lse as [H, T] for packed documents. Source: torch/nn/attention/varlen.py.
    """

    def __init__(self, scale: float | None) -> None:
        self.scale = scale

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        ends, longest = mask.cu_seqlens_on(q.device), mask.max_lengths
        # 0.0: no dropout. False: no mask of the dropout for debugging.
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
        unused = (q.new_zeros(2, dtype=torch.uint64), q.new_empty(0))  # random state of dropout
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
