"""Local attention by `scaled_dot_product_attention`, document by document; any device.

B batch, S sequence, T tokens = B * S, H query heads, K KV heads, d head size
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from isp.core.attention.backends.mask_blocks import (
    EVERYTHING,
    TRIANGLE,
    Visible,
    document_blocks,
    document_lengths,
)
from isp.core.attention.mask import AttentionMask

__all__ = ["CUDNN_ALONE", "SdpaAttention"]


CUDNN_ALONE = (SDPBackend.CUDNN_ATTENTION,)
"""Kernels for a trial of cuDNN, without others that would compute where cuDNN cannot."""
_FUSED = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
"""All of torch's kernels except MATH, which forms S x S scores."""


class SdpaAttention:
    """Local attention by torch's fused kernels, exact for packed documents and windows.

    torch runs the first of `kernels` that supports a call: in the given order if `in_order`, else
    in the order that torch prefers on the device. cuDNN's kernel does not support a single key,
    deterministic algorithms and, in some versions, band masks or fewer queries than keys (as
    context ranks have). The other kernels are deterministic if torch's deterministic mode is on.
    """

    def __init__(
        self,
        kernels: Sequence[SDPBackend] = _FUSED,
        *,
        in_order: bool = False,
        scale: float | None = None,
    ) -> None:
        self._kernels = list(kernels)
        self._in_order = in_order
        self.scale = scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """Attend with q [B, Sq, H, d] to k and v [B, Sk, K, d] -> [B, Sq, H, d]."""
        # No fused kernel on CUDA takes float64, which only tests and comparisons use.
        kernels = self._kernels + [SDPBackend.MATH] * (q.dtype is torch.float64)
        with sdpa_kernel(kernels, set_priority=self._in_order):
            if mask.cu_seqlens is None and mask.window is None and q.shape[1] == k.shape[1]:
                return self._attend(q, k, v, TRIANGLE if mask.causal else EVERYTHING)
            lengths = document_lengths(mask, q.shape[0], q.shape[1], k.shape[1])
            query_sizes, key_sizes = ([pair[i] for pair in lengths] for i in (0, 1))
            # `split` has one concatenation as its gradient. With slices, each document would get a
            # gradient as large as the whole row.
            documents = zip(
                q.flatten(0, 1).split(query_sizes),
                k.flatten(0, 1).split(key_sizes),
                v.flatten(0, 1).split(key_sizes),
                strict=True,
            )  # [tokens, H, d] each
            return torch.cat([self._attend_document(*each, mask) for each in documents]).view(
                q.shape
            )

    def _attend_document(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Attend in one document: q [Sq, H, d], k and v [Sk, K, d] -> [Sq, H, d]."""
        blocks = document_blocks(q.shape[0], k.shape[0], causal=mask.causal, window=mask.window)
        num_blind = blocks[0].query.start if blocks else q.shape[0]
        outs = [q[:num_blind] * 0]  # queries that see no key: zeros that are part of the graph
        for query, key, visible, _ in blocks:
            rows = q[query.start : query.stop].unsqueeze(0)  # [1, rows, H, d]
            keys, values = (x[key.start : key.stop].unsqueeze(0) for x in (k, v))
            outs.append(self._attend(rows, keys, values, visible).squeeze(0))
        return torch.cat(outs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
        """Attend with q [B, Sq, H, d] to k and v [B, Sk, K, d] under one band -> [B, Sq, H, d]."""
        causal = visible == TRIANGLE and q.shape[1] == k.shape[1]
        bare = causal or visible == EVERYTHING
        group = q.shape[2] // k.shape[2]
        if group > 1 and not (bare and q.dtype in (torch.bfloat16, torch.float16)):
            # Only the kernels for 16 bit without a mask support shared KV heads.
            k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        out = scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=None if bare else visible.band(q.shape[1], k.shape[1], q.device),
            is_causal=causal,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)
