"""Attention on CPU: torch's flash kernel, document by document, as one autograd node.

B batch, S sequence, T tokens = B * S, H query heads, K KV heads, G = H / K, d head size

forward   for each block: out[rows], lse[rows] = kernel(q[rows], k[rows], v[rows])
backward  for each block: dq[rows] = .., dk[rows] += .., dv[rows] += ..

It is one node because autograd would give every slice a gradient as large as the whole sequence:
quadratic in the number of documents. The kernel never forms S x S scores; the band masks of
windows, and of short causal documents, have at most 256 rows.

bfloat16 and float16 are computed in float32: on processors without bfloat16 arithmetic, torch's
kernel takes ten times as long for a bfloat16 backward, and float32 is more exact.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isp.core.attention.backends.mask_blocks import (
    EVERYTHING,
    MaskBlock,
    Visible,
    blocks_of,
    document_lengths,
)
from isp.core.attention.mask import AttentionMask
from isp.core.autograd import Function
from isp.core.torch_private import cpu_attention, cpu_attention_backward

__all__ = ["CpuAttention"]

_SPLIT_UP_TO = 1024
"""Causal documents of up to this many tokens are cut into blocks: the kernel skips hidden keys only
512 at a time, so it would compute nearly the whole square of a short document."""

_SMALL = 1 << 18
"""Masks of up to this many elements are cached."""


class CpuAttention:
    """Local attention on CPU, exact for packed documents, windows and unequal lengths."""

    def __init__(self, *, scale: float | None = None) -> None:
        self.scale = scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """Attend with q [B, Sq, H, d] to k and v [B, Sk, K, d] -> [B, Sq, H, d]."""
        blocks = _blocks(mask, q, k)
        wide = [x.to(_dtype(q)).flatten(0, 1) for x in (q, k, v)]  # [T, H, d]
        out: Tensor = _Blocks.apply(*wide, blocks, self.scale)
        return out.view(q.shape).to(q.dtype)

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """Return the output [T, H, d] and the log-sum-exp [T, H]; see `LseKernel.with_lse`."""
        blocks = _blocks(mask, q.unsqueeze(0), k.unsqueeze(0))
        return _attend(blocks, self.scale, *(x.to(_dtype(q)) for x in (q, k, v)))

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
        """Return the gradients of q, k and v; see `LseKernel.gradients`."""
        blocks = _blocks(mask, q.unsqueeze(0), k.unsqueeze(0))
        wide = (x.to(_dtype(q)) for x in (dout, q, k, v, out, lse))
        return _gradients(blocks, self.scale, *wide)


def _dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _blocks(mask: AttentionMask, q: Tensor, k: Tensor) -> tuple[MaskBlock, ...]:
    """Return the blocks of q [B, Sq, H, d] against k [B, Sk, K, d] under `mask`."""
    lengths = document_lengths(mask, q.shape[0], q.shape[1], k.shape[1])
    return blocks_of(lengths, causal=mask.causal, window=mask.window, split_up_to=_SPLIT_UP_TO)


def _attend(
    blocks: tuple[MaskBlock, ...], scale: float | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, d] and the log-sum-exp [T, H] of each query's logits."""
    # Queries that see no key are in no block: their output is 0 and their lse -inf.
    out, group = q.new_zeros(q.shape), q.shape[1] // k.shape[1]
    lse = q.new_full((*q.shape[:2], 1), -torch.inf)
    for block in blocks:
        result, logsumexp = cpu_attention(
            *_inputs(block, q, k, v),
            0.0,  # no dropout
            block.is_causal_square,
            attn_mask=_mask(block, q),
            scale=scale,
        )
        _queries(block, out, group).copy_(result)
        _queries(block, lse, group).copy_(logsumexp.unsqueeze(-1))
    return out, lse.squeeze(-1)


def _gradients(
    blocks: tuple[MaskBlock, ...],
    scale: float | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q [T, H, d], k and v [T, K, d], summed over blocks."""
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    # The kernel needs a contiguous last dim, which a gradient from `expand` does not have.
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    for block in blocks:
        of_query, *of_keys = cpu_attention_backward(
            _queries(block, dout, group),
            *_inputs(block, q, k, v),
            _queries(block, out, group),
            _queries(block, lse.unsqueeze(-1), group).squeeze(-1),
            0.0,
            block.is_causal_square,
            attn_mask=_mask(block, q),
            scale=scale,
        )
        # A query is in one block, so its gradient is copied; a key is in several blocks, so the
        # gradients of keys and values are added.
        _queries(block, dq, group).copy_(of_query)
        for total, grad in zip((dk, dv), of_keys, strict=True):
            summed = grad.sum(1) if group > 1 else grad[:, 0]  # [K, rows, d]
            total[block.slices[1]].add_(summed.transpose(0, 1))
    return dq, dk, dv


class _Blocks(Function):
    """The autograd function of `CpuAttention`: one node for all blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: tuple[MaskBlock, ...],
        scale: float | None,
    ) -> Tensor:
        out, lse = _attend(blocks, scale, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx.blocks, ctx.scale, dout, *ctx.saved_tensors), None, None


def _mask(block: MaskBlock, like: Tensor) -> Tensor | None:
    """Return a mask [queries, keys] to add to the logits; None if the kernel needs none."""
    if block.visible == EVERYTHING or block.is_causal_square:
        return None
    rows, width = len(block.query), len(block.key)
    # Cache small masks, but no fake tensor (of a rehearsal): a later step would get it.
    small = rows * width <= _SMALL and type(like) is Tensor
    make = _small_band if small else _band
    return make(rows, width, block.visible, like.dtype, like.device)


@torch.inference_mode(False)  # a mask made in inference mode could not be used in training
def _band(
    rows: int, width: int, visible: Visible, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return [rows, width] with 0 where a key is seen, else a large negative number."""
    # Finite: if one of the kernel's tiles hides all keys of a row, -inf would give inf - inf.
    least = torch.finfo(dtype).min / 2
    mask = torch.zeros(rows, width, dtype=dtype, device=device)
    return mask.masked_fill_(~visible.band(rows, width, device), least)


_small_band = lru_cache(maxsize=16)(_band)
"""`_band`, cached: the same masks recur in all blocks, layers and steps."""


def _inputs(block: MaskBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return views [K, G, rows, d] of q, k and v for a block, each KV head repeated G times."""
    group, keys = q.shape[1] // k.shape[1], block.slices[1]
    seen = (x[keys].transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    return _queries(block, q, group), *seen


def _queries(block: MaskBlock, x: Tensor, group: int) -> Tensor:
    """Return x [T, H, d] at the block's queries, as a view [K, G, queries, d]."""
    heads: Tensor = x[block.slices[0]].unflatten(1, (-1, group))
    return heads.permute(1, 2, 0, 3)
