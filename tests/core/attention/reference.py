"""Attention written out in full for each document: the reference for all other attention."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isp.core.attention.mask import AttentionMask

Result = tuple[Tensor, Tensor, Tensor, Tensor]
"""Output and the gradients of q, k and v."""


def make_mask(
    documents: list[int] | None, causal: bool = True, window: int | None = None, batch: int = 1
) -> AttentionMask:
    """Return a mask with the same documents in each row; None: each row is one document."""
    if documents is None:
        return AttentionMask(causal=causal, window=window)
    return AttentionMask.of_documents(documents * batch, causal=causal, window=window)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention by its definition: q [B, Sq, H, d], k [B, Sk, K, d], v [B, Sk, K, e] -> [B,
    Sq, H, e].
    """
    query_sizes, key_sizes = ([x.shape[1]] * x.shape[0] for x in (q, k))
    if mask.cu_seqlens is not None:
        query_sizes = key_sizes = mask.cu_seqlens.diff().tolist()
    if mask.cu_seqlens_k is not None:
        key_sizes = mask.cu_seqlens_k.diff().tolist()
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    sizes = query_sizes, key_sizes, key_sizes
    parts = (x.flatten(0, 1).split(size) for x, size in zip((q, k, v), sizes, strict=True))
    outs = []
    for of_q, of_k, of_v in zip(*parts, strict=True):  # [tokens, H, d] of each document
        seen = visible(len(of_q), len(of_k), mask.causal, mask.window)
        logits = torch.einsum("ihd,jhd->hij", of_q, of_k) * (scale or q.shape[-1] ** -0.5)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~seen, -torch.inf)
        logits = logits.masked_fill(~seen.any(1)[:, None], 0)  # softmax of nothing is not a number
        column = (
            q.new_full((q.shape[2], 1, 1), -torch.inf) if sinks is None else sinks[:, None, None]
        )
        logits = torch.cat([logits, column.expand(-1, len(of_q), -1)], 2)
        weights = logits.softmax(-1)[..., :-1].masked_fill(~seen, 0)
        outs.append(torch.einsum("hij,jhd->ihd", weights, of_v))
    return torch.cat(outs).view(*q.shape[:-1], v.shape[-1])


@lru_cache
def visible(num_queries: int, num_keys: int, causal: bool, window: int | None) -> Tensor:
    """Return [queries, keys], True where a query sees a key; the last query aligns with the last
    key.
    """
    i, j = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    distance = i + num_keys - num_queries - j  # how far back the key is
    near = distance.abs() < (num_queries + num_keys if window is None else window)
    return near & (distance >= 0) if causal else near


def with_gradients(out: Tensor, inputs: list[Tensor], dout: Tensor) -> Result:
    """Return the detached output and the gradients of the three inputs."""
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
    device: str = "cpu",
) -> tuple[list[Tensor], Tensor]:
    """Return q, k and v as leaves, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, length, heads, head_dim),
        (batch, keys or length, kv_heads, head_dim),
        (batch, keys or length, kv_heads, head_dim),
    ]
    q, k, v = (torch.randn(s, generator=generator, dtype=dtype) for s in shapes)
    dout = torch.randn(shapes[0], generator=generator, dtype=dtype)
    return [x.to(device).requires_grad_() for x in (q, k, v)], dout.to(device)


def largest_error(attention: Any, inputs: list[Tensor], dout: Tensor, mask: Any) -> float:
    """Return the largest error of the output and of all gradients against the written-out
    attention.
    """
    expected = with_gradients(attend(*inputs, mask), inputs, dout)
    result = with_gradients(attention(*inputs, mask=mask), inputs, dout)
    assert all(torch.isfinite(x).all() for x in result)
    return max(float((a - b).abs().max()) for a, b in zip(result, expected, strict=True))
