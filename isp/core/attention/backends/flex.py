"""Local attention by torch's flex_attention, for soft-capped logits; compiled, on CUDA.

T queries, L keys, H query heads, K KV heads, d head size, R and C blocks of 128 queries and keys

Whatever the documents, order and window are, a query sees one range of keys [low, high). So one
mask function, which reads the ranges from two tensors, serves all masks, and a new micro-batch does
not recompile. Which blocks of keys a block of queries needs follows from the least and greatest
bounds in it; no mask of T x L is formed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isp.core.attention.backends.mask_blocks import document_lengths
from isp.core.attention.mask import AttentionMask
from isp.core.comm import pinned_memory
from isp.core.torch_private import compiler_options

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["FlexAttention"]

_BLOCK = 128
"""Number of queries, and of keys, of a block of the block mask."""
_MASKS = 2
"""Number of masks whose blocks are cached: soft-capped models have layers with and without a
window."""


class FlexAttention:
    """Local attention whose logits x become softcap * tanh(x / softcap)."""

    def __init__(self, *, scale: float | None = None, softcap: float) -> None:
        # Imported only where it is used, because it loads torch's compiler.
        from torch.nn.attention.flex_attention import flex_attention

        self.scale = scale
        self.softcap = softcap
        # `fullgraph`: after too many recompilations torch raises. Without it torch would run the
        # function uncompiled, with scores of T x L in memory.
        self._attend: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True)
        self._blocks = lru_cache(_MASKS)(_blocks)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """Attend with q [B, Sq, H, d] to k and v [B, Sk, K, d] -> [B, Sq, H, d]."""
        softcap = self.softcap
        sizes = q.shape[0], q.shape[1], k.shape[1]

        def capped(logit: Tensor, *_: Tensor) -> Tensor:
            return softcap * torch.tanh(logit / softcap)

        # specialize_float: otherwise a second cap or scale becomes a symbol and breaks the graph.
        # recompile_limit: calls with and without gradients, with one block or more, and with each
        # number of heads compile separately, which is more than torch's default limit of 8.
        with compiler_options(specialize_float=True, recompile_limit=64):
            out: Tensor = self._attend(
                *(x.flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in (q, k, v)),  # [1, H, T, d]
                score_mod=capped,
                block_mask=self._blocks(mask, sizes, q.device),
                scale=self.scale,
                enable_gqa=q.shape[2] != k.shape[2],
                # For fewer than 128 queries torch would compile another kernel (for decoding).
                kernel_options={"BACKEND": "TRITON"},
            )
        return out.squeeze(0).transpose(0, 1).reshape(q.shape)


# The result is cached, and training could not use a mask that was made in inference mode.
@torch.inference_mode(False)
def _blocks(mask: AttentionMask, sizes: tuple[int, int, int], device: torch.device) -> BlockMask:
    """Return the block mask of B rows of Sq queries and Sk keys (`sizes`), joined into one row."""
    from torch.nn.attention.flex_attention import BlockMask

    low, high = (pinned_memory.send(x, device) for x in _runs(mask, sizes))
    num_queries, num_keys = len(low), sizes[0] * sizes[2]
    rows = torch.arange(-(-num_queries // _BLOCK) * _BLOCK, device=device)
    # The last block may have fewer than 128 queries: its last query is repeated to fill it.
    rows = rows.clamp_(max=num_queries - 1).view(-1, _BLOCK)
    lows, highs = low[rows], high[rows]  # [R, 128]
    begin = torch.arange(0, num_keys, _BLOCK, device=device)  # first key of each block, [C]
    # `some` marks blocks of keys of which a query of the block may see a part; `whole` marks those
    # that all its queries see completely, for which the kernel needs no mask.
    some = (begin < highs.amax(1, True)) & (begin + _BLOCK > lows.amin(1, True))  # [R, C]
    whole = (begin >= lows.amax(1, True)) & (begin + _BLOCK <= highs.amin(1, True))

    def visible(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low[query]) & (key < high[query])

    return BlockMask.from_kv_blocks(
        *_numbered(some & ~whole),
        *_numbered(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=visible,
        seq_lengths=(num_queries, num_keys),
    )


def _runs(mask: AttentionMask, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return the range [low, high) of keys that each query sees: two int32 tensors [T]."""
    queries, keys = torch.tensor(document_lengths(mask, *sizes)).T
    last = keys.cumsum(0)
    # A document's last query is aligned with its last key [Note: Causal alignment]: query i's own
    # key is i + shift.
    start, end, shift = (
        x.repeat_interleave(queries) for x in (last - keys, last, last - queries.cumsum(0))
    )
    own = torch.arange(len(shift)) + shift
    low = start if mask.window is None else start.maximum(own - mask.window + 1)
    if mask.causal:
        end = end.minimum(own + 1)
    elif mask.window is not None:
        end = end.minimum(own + mask.window)
    return low.int(), end.int()


def _numbered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True columns in each row of `blocks` [R, C], and column indices.

    In each row, the indices of True columns come first. The two tensors [1, 1, R] and [1, 1, R, C]
    are what `BlockMask.from_kv_blocks` expects.
    """
    numbers = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], numbers.int()[None, None]
