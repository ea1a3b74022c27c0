"""Kernels whose results over parts of the keys can be merged: they tell each softmax's sum.

T queries, L keys, H query heads, K KV heads, d head size
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from einops import rearrange
from torch import Tensor

from isp.attention.flash import FlashAttention, VarlenAttention
from isp.attention.local import LocalAttention
from isp.attention.mask import AttentionMask
from isp.attention.pieces import EVERYTHING, MaskBlock, pieces_of
from isp.attention.sdpa import SdpaAttention

__all__ = ["FlashKernel", "LseKernel", "PlainKernel", "lse_kernel"]


@runtime_checkable
class LseKernel(Protocol):
    """Attention to a part of the keys, with the log-sum-exp by which such parts are merged."""

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """q [T, H, d], k and v [L, K, d] -> the output [T, H, d], and lse [T, H].

        Both in float32 at least, but for what kernels round. Every query sees a key.
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
    if not isinstance(local, SdpaAttention | VarlenAttention | FlashAttention):
        return None
    is_narrow, size = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    if q.is_cuda and is_narrow and size % 8 == 0 and size <= 256:  # what flash attention takes
        return FlashKernel(local.scale)
    return PlainKernel(local.scale)


class FlashKernel:
    """Torch's flash attention on CUDA: `aten::_flash_attention_forward` as in torch 2.11 to 2.13.

    Its lse is [H, T] for packed documents. Source: torch/nn/attention/varlen.py.
    """

    def __init__(self, scale: float | None) -> None:
        self.scale = scale

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        ends, longest = mask.cu_seqlens_on(q.device), mask.max_lengths
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ends, *longest, 0.0, mask.causal, False, scale=self.scale
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
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
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
            scale=self.scale,
        )
        return dq, dk, dv


class PlainKernel:
    """Tensor operations, for where there is no fused kernel; a block of [K, G, R, C] at a time."""

    def __init__(self, scale: float | None) -> None:
        self.scale = scale

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=dtype)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=dtype)
        for block in _blocks(mask):
            rows, keys = _rows(block)
            logits = self._logits(q[rows].to(dtype), k[keys].to(dtype), block)
            sums = logits.logsumexp(-1, keepdim=True)
            weights = (logits - sums).exp()
            out[rows] = torch.einsum("kgrc,ckd->rkgd", weights, v[keys].to(dtype)).flatten(1, 2)
            lse[rows] = rearrange(sums, "k g r 1 -> r (k g)")
        return out, lse

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
        dtype = lse.dtype
        q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        delta = (dout * out.to(dtype)).sum(-1, keepdim=True)  # [T, H, 1]
        for block in _blocks(mask):
            rows, keys = _rows(block)
            heads = k.shape[1]
            q_rows, given = (x[rows].unflatten(1, (heads, -1)) for x in (q, dout))  # [R, K, G, d]
            sums, less = (
                rearrange(x[rows], "r (k g) one -> k g r one", k=heads)
                for x in (lse.unsqueeze(-1), delta)
            )
            logits = self._logits(q[rows], k[keys], block)
            weights = (logits - sums).exp()  # [K, G, R, C]
            dv[keys] += torch.einsum("kgrc,rkgd->ckd", weights, given)
            from_v = torch.einsum("rkgd,ckd->kgrc", given, v[keys]) - less
            d_logits = weights * from_v * scale
            dq[rows] = torch.einsum("kgrc,ckd->rkgd", d_logits, k[keys]).flatten(1, 2)
            dk[keys] += torch.einsum("kgrc,rkgd->ckd", d_logits, q_rows)
        return dq, dk, dv

    def _logits(self, q: Tensor, k: Tensor, block: MaskBlock) -> Tensor:
        """[K, G, R, C]."""
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        logits = torch.einsum("rkgd,ckd->kgrc", q.unflatten(1, (k.shape[1], -1)), k) * scale
        if block.visible == EVERYTHING:
            return logits
        seen = block.visible.band(len(block.query), len(block.key), logits.device)
        return logits.masked_fill(~seen, -torch.inf)


def _blocks(mask: AttentionMask) -> list[MaskBlock]:
    lengths = tuple(zip(mask.lengths, mask.key_lengths, strict=True))
    pieces = pieces_of(
        lengths, causal=mask.causal, window=mask.window, split_up_to=mask.max_lengths[0]
    )
    return [piece.block for piece in pieces]


def _rows(block: MaskBlock) -> tuple[slice, slice]:
    query, key, *_ = block
    return slice(query.start, query.stop), slice(key.start, key.stop)
