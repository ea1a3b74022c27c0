"""Local attention in plain tensor operations, for features without a fused kernel; any device.

T tokens, H query heads, K KV heads, G = H / K, d head size, R queries and C keys of a block; r
features of a query that give its bias at each of E distances

forward   for each block: p = softmax(cap(scale q k^T) + bias + mask, with the sink), out = p v
backward  for each block: the forward again, then the gradients of its rows

The logits of one block [K, G, R, C] exist at a time, so memory grows with the length of the longest
document, not with its square. In long documents blocks have fewer queries, so that none exceeds
`MOST_LOGITS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isp.core.attention.backends.mask_blocks import (
    EVERYTHING,
    MaskBlock,
    blocks_of,
    document_lengths,
)
from isp.core.attention.mask import AttentionMask, Chosen, seen_by
from isp.core.autograd import Function, once_differentiable

__all__ = ["MOST_LOGITS", "ExplicitAttention", "block_rows"]

_ROWS = 256
"""Largest number of queries in a block."""
MOST_LOGITS = 1 << 26
"""Largest number of logits in a block, unless one query has more."""


def block_rows(num_heads: int, keys: int) -> int:
    """Return how many queries a block gets if each sees up to `keys` keys."""
    return max(1, min(_ROWS, MOST_LOGITS // (num_heads * max(1, keys))))


class ExplicitAttention:
    """Softmax attention with soft-capped logits, sinks, chosen keys, and a bias by distance.

    `softcap`: logits become softcap * tanh(logits / softcap) (Gemma 2). A head's sink is a logit
    without a value that takes part in the softmax (gpt-oss). Computes in float32 or wider.

    If `sinks` has three dims, it contains profiles [H, r, E] of a bias by distance (Inkling), and
    q has r extra features: their product with the profile of distance e, from 0 to E - 1, is added
    to the logit of the key e tokens before the query. One more feature of q, if there is one, is
    the query's own sink.
    """

    def __init__(self, *, scale: float | None = None, softcap: float | None = None) -> None:
        self.scale = scale
        self.softcap = softcap

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        sinks: Tensor | None = None,
        chosen: Chosen | None = None,
    ) -> Tensor:
        """Attend with q [B, Sq, H, d] to k and v [B, Sk, K, d], sinks [H] -> [B, Sq, H, d].

        If `sinks` are profiles [H, r, E], q has extra features (see the class). If keys are
        `chosen`, the mask must have no window, and k must have each document's keys from its first
        token on.
        """
        # Indices of chosen keys count from the first key of a block, which a window would shift.
        assert chosen is None or mask.window is None
        dtype = torch.promote_types(q.dtype, torch.float32)
        wide = [x.to(dtype).flatten(0, 1) for x in (q, k, v)]  # [T, H, d]
        lengths = document_lengths(mask, q.shape[0], q.shape[1], k.shape[1])
        blocks = blocks_of(
            lengths,
            causal=mask.causal,
            window=mask.window,
            # Split causal squares of every size: the products here have no flag that would skip
            # the hidden half.
            split_up_to=q.shape[1],
            rows=block_rows(q.shape[2], max(keys for _, keys in lengths)),
        )
        if sinks is not None:
            sinks = sinks.to(dtype)
        numbers, run = (None, 1) if chosen is None else (chosen.numbers.flatten(0, 1), chosen.run)
        out: Tensor = _Blocks.apply(*wide, sinks, numbers, run, blocks, self)
        return out.view(*q.shape[:-1], v.shape[-1]).to(q.dtype)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        block: MaskBlock,
        chosen: Tensor | None,
    ) -> Tensor:
        """Attend in a block: q [R, H, d], k, v [C, K, d], chosen [K or 1, 1, R, C] -> [R, H, d].

        `chosen` is a mask, True where the query has chosen the key.
        """
        q, more = q.split((k.shape[-1], q.shape[-1] - k.shape[-1]), -1)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        grouped = q.unflatten(1, (k.shape[1], -1))  # [R, K, G, d]
        logits = torch.einsum("rkgd,ckd->kgrc", grouped, k) * scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if sinks is not None and sinks.dim() == 3:  # `sinks` are profiles of a bias
            states, own_sink = more.split((sinks.shape[1], more.shape[-1] - sinks.shape[1]), -1)
            logits = logits + _by_distance(states, sinks, block).view(logits.shape)
            sinks = own_sink.permute(1, 0, 2) if own_sink.shape[-1] else None
        if block.visible != EVERYTHING:
            seen = block.visible.band(len(block.query), len(block.key), logits.device)
            logits = logits.masked_fill(~seen, -torch.inf)
        if chosen is not None:
            logits = logits.masked_fill(~chosen, -torch.inf)
        if sinks is not None:  # add a column of logits before the softmax, drop it afterwards
            column = sinks.reshape(*logits.shape[:2], -1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, column], -1)
        weights = logits.softmax(-1)[..., : k.shape[0]]
        return torch.einsum("kgrc,ckd->rkgd", weights, v).flatten(1, 2)


def _by_distance(states: Tensor, profiles: Tensor, block: MaskBlock) -> Tensor:
    """Return the bias of logits: states [R, H, r], profiles [H, r, E] -> [H, R, C]."""
    queries, keys = (torch.arange(len(x), device=states.device) for x in (block.query, block.key))
    back = queries.unsqueeze(1) + block.diagonal - keys  # tokens from key to query, [R, C]
    num_distances = profiles.shape[2]
    # Compute the bias of each query at all E distances, then pick each key's distance from these.
    at_each = torch.einsum("rhx,hxe->hre", states, profiles)
    places = back.clamp(0, num_distances - 1).expand(len(profiles), -1, -1)
    return at_each.gather(2, places).masked_fill((back < 0) | (back >= num_distances), 0)


class _Blocks(Function):
    """The autograd function of `ExplicitAttention`; backward computes each block again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        numbers: Tensor | None,
        run: int,
        blocks: tuple[MaskBlock, ...],
        attention: ExplicitAttention,
    ) -> Tensor:
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for block in blocks:
            rows, keys = block.slices
            chosen = _chosen(numbers, run, block)
            out[rows] = attention.attend(q[rows], k[keys], v[keys], sinks, block, chosen)
        ctx.save_for_backward(q, k, v, sinks, numbers)
        ctx.run, ctx.blocks, ctx.attention = run, blocks, attention
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, numbers = ctx.saved_tensors
        totals = [None if x is None else torch.zeros_like(x) for x in (q, k, v, sinks)]
        for block in ctx.blocks:
            rows, keys = block.slices
            parts = (q[rows], k[keys], v[keys], sinks)
            # Compute the block again, under autograd; its logits are freed after `grad`.
            leaves = [None if x is None else x.detach().requires_grad_() for x in parts]
            with torch.enable_grad():
                out = ctx.attention.attend(*leaves, block, _chosen(numbers, ctx.run, block))
            given = [x for x in leaves if x is not None]  # q, k, v and, if there are any, sinks
            grads = torch.autograd.grad(out, given, dout[rows])
            # This loop ends after the gradients of q, k and v. All are added: a key is in several
            # blocks. Sinks are in all blocks, so their gradient is added whole, below.
            for total, grad, where in zip(totals, grads, (rows, keys, keys), strict=False):
                assert total is not None
                total[where] += grad
            if totals[3] is not None:
                totals[3] += grads[3]
        return *totals, None, None, None, None


def _chosen(numbers: Tensor | None, run: int, block: MaskBlock) -> Tensor | None:
    """Return the mask of chosen keys for a block, from all queries' indices [T, G, n]."""
    query, key, *_ = block
    return None if numbers is None else seen_by(numbers[query.start : query.stop], run, len(key))
