"""Attention written out in full, document by document: what everything else is compared with."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isp.attention import AttentionMask

Result = tuple[Tensor, Tensor, Tensor, Tensor]
"""Output and the gradients of q, k and v."""


def make_mask(
    documents: list[int] | None, causal: bool = True, window: int | None = None, batch: int = 1
) -> AttentionMask:
    """A mask of the same documents in each row; None: every row is one document."""
    if documents is None:
        return AttentionMask(causal=causal, window=window)
    return AttentionMask.of_documents(documents * batch, causal=causal, window=window)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """q [B, Sq, H, d], k and v [B, Sk, K, d] -> [B, Sq, H, d], by loops over the definition."""
    group = q.shape[2] // k.shape[2]
    if mask.cu_seqlens is None:
        rows = [
            _attend_document(q[b], k[b], v[b], group, mask.causal, mask.window)
            for b in range(q.shape[0])
        ]
        return torch.stack(rows)
    query_sizes = mask.cu_seqlens.diff().tolist()
    of_keys = mask.cu_seqlens_k
    key_sizes = query_sizes if of_keys is None else of_keys.diff().tolist()
    sizes = query_sizes, key_sizes, key_sizes
    parts = (x.flatten(0, 1).split(size) for x, size in zip((q, k, v), sizes, strict=True))
    documents = zip(*parts, strict=True)
    outs = [_attend_document(*each, group, mask.causal, mask.window) for each in documents]
    return torch.cat(outs).view(q.shape)


def _attend_document(
    q: Tensor, k: Tensor, v: Tensor, group: int, causal: bool, window: int | None
) -> Tensor:
    """One document: q [Sq, H, d], k and v [Sk, K, d]; rows without a visible key give zeros."""
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = visible(q.shape[0], k.shape[0], causal, window)
    logits = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    logits = logits.masked_fill(~seen, -torch.inf)
    logits = logits.masked_fill(~seen.any(1)[:, None], 0)  # softmax of nothing is not a number
    weights = logits.softmax(-1).masked_fill(~seen, 0)
    return torch.einsum("hij,jhd->ihd", weights, v)


@lru_cache
def visible(num_queries: int, num_keys: int, causal: bool, window: int | None) -> Tensor:
    """[queries, keys], True where seen, the last query aligned with the last key."""
    i, j = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    distance = i + num_keys - num_queries - j  # how far back the key is
    near = distance.abs() < (num_queries + num_keys if window is None else window)
    return near & (distance >= 0) if causal else near


def with_gradients(out: Tensor, inputs: list[Tensor], dout: Tensor) -> Result:
    """The output, detached, and the gradients of the three inputs."""
    grads = torch.autograd.grad(out, inputs, dout)
    return out.detach(), *grads


def random_inputs(
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 4,
    *,
    keys: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[list[Tensor], Tensor]:
    """q, k and v as leaves, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, length, heads, head_dim),
        (batch, keys or length, kv_heads, head_dim),
        (batch, keys or length, kv_heads, head_dim),
    ]
    q, k, v = (torch.randn(s, generator=generator, dtype=dtype) for s in shapes)
    dout = torch.randn(shapes[0], generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v)], dout


def largest_error(attention: Any, inputs: list[Tensor], dout: Tensor, mask: Any) -> float:
    """Of the output and of every gradient, against attention written out in full."""
    expected = with_gradients(attend(*inputs, mask), inputs, dout)
    result = with_gradients(attention(*inputs, mask=mask), inputs, dout)
    assert all(torch.isfinite(x).all() for x in result)
    return max(float((a - b).abs().max()) for a, b in zip(result, expected, strict=True))
