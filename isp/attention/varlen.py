"""Local attention by `torch.nn.attention.varlen`, flash attention that comes with torch.

B batch, S sequence, T tokens = B * S, H query heads, K KV heads, d head size

[Note: Signatures of varlen_attn] torch 2.10 takes `is_causal` and neither scale nor window; 2.11 to
2.13 take `scale` and `window_size`, where (-1, 0) is causal; since 2.12 `enable_gqa` has to be set
where KV heads are shared. They are told apart here, once, by the parameters that there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isp.attention.mask import AttentionMask

__all__ = ["VarlenAttention"]


class VarlenAttention:
    """Local attention in one kernel for all documents, without another package."""

    def __init__(self, *, scale: float | None = None) -> None:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError as error:
            raise ValueError("torch.nn.attention.varlen is not there") from error
        self.scale = scale
        self._attend: Callable[..., Any] = varlen_attn
        self._parameters = frozenset(inspect.signature(varlen_attn).parameters)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """q [B, Sq, H, d], k and v [B, Sk, K, d] -> [B, Sq, H, d]."""
        mask.check_covers(q.shape[0], q.shape[1], k.shape[1])
        if mask.cu_seqlens is None:
            query_ends, key_ends = (
                torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * x.shape[1]
                for x in (q, k)
            )
            longest = q.shape[1], k.shape[1]
        else:
            query_ends = key_ends = mask.cu_seqlens_on(q.device)
            longest = mask.max_length, mask.max_length
        out: Tensor = self._attend(
            *(x.flatten(0, 1) for x in (q, k, v)),  # [T, H, d]
            query_ends,
            key_ends,
            *longest,
            **self._options(mask, grouped=q.shape[2] != k.shape[2]),
        )
        return out.view(q.shape)

    def _options(self, mask: AttentionMask, *, grouped: bool) -> dict[str, Any]:
        if "window_size" not in self._parameters:
            if mask.window is not None or self.scale is not None:
                raise ValueError(
                    "torch 2.10's varlen attention has neither windows nor another scale: use"
                    " torch 2.11 or later, or model.attention_backend=flash2 or sdpa"
                )
            return {"is_causal": mask.causal}
        left = -1 if mask.window is None else mask.window - 1
        right = 0 if mask.causal else left
        options: dict[str, Any] = {"scale": self.scale, "window_size": (left, right)}
        if grouped and "enable_gqa" in self._parameters:
            options["enable_gqa"] = True
        return options
