"""Local attention by flash attention: torch's own, and the packages of versions 2 to 4.

B batch, S sequence, T tokens = B * S, H query heads, K KV heads, d head size

All of them align the last query with the last key in causal masks (flash-attn since 2.1), return
zeros for a query that sees no key, and share KV heads between query heads, as `LocalAttention`
requires. A package
counts as installed if the function itself can be imported: a build whose extension does not load
raises ImportError or, for a missing symbol, OSError.

Source: github.com/Dao-AILab/flash-attention, flash_attn_interface.py of `flash_attn` and `hopper`,
and flash_attn/cute/interface.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from isp.core.attention.mask import AttentionMask

__all__ = ["FlashAttention", "VarlenAttention"]


class FlashAttention:
    """Local attention by `flash_attn_func` and `flash_attn_varlen_func` of the package `module`.

    `no_limit` is the package's value for a window without a limit on one side. A `softcap` turns
    logits x into softcap * tanh(x / softcap).
    """

    def __init__(
        self,
        module: str,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        no_limit: int | None = -1,
    ) -> None:
        self.scale = scale
        self.softcap = softcap
        self._no_limit = no_limit
        self._dense = _imported(module, "flash_attn_func")
        self._packed = _imported(module, "flash_attn_varlen_func")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """Attend with q [B, Sq, H, d] to k and v [B, Sk, K, d] -> [B, Sq, H, d]."""
        mask.check_covers(q.shape[0], q.shape[1], k.shape[1])
        options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "causal": mask.causal,
            "window_size": self._window(mask),
        }
        if self.softcap is not None:
            options["softcap"] = self.softcap
        # The flash-attn packages do not read torch's setting, so it is passed to them.
        if torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = True
        if mask.cu_seqlens is None:
            return _only_output(self._dense(q, k, v, **options))
        query_ends, key_ends = mask.cu_seqlens_on(q.device)
        longest_query, longest_key = mask.max_lengths
        out = self._packed(
            *(x.flatten(0, 1) for x in (q, k, v)),  # [T, H, d]
            cu_seqlens_q=query_ends,
            cu_seqlens_k=key_ends,
            max_seqlen_q=longest_query,
            max_seqlen_k=longest_key,
            **options,
        )
        return _only_output(out).view(q.shape)

    def _window(self, mask: AttentionMask) -> tuple[int | None, int | None]:
        """Return how many keys a query sees before and after its own key, which is not counted."""
        if mask.window is None:
            return self._no_limit, self._no_limit
        return mask.window - 1, 0 if mask.causal else mask.window - 1


def _imported(module: str, function: str) -> Callable[..., Any]:
    """Return `module.function`. Raises ValueError if it cannot be imported."""
    try:
        found: Callable[..., Any] = getattr(import_module(module), function)
    except (ImportError, OSError, AttributeError) as error:
        raise ValueError(f"{module}.{function} cannot be imported: {error}") from error
    return found


def _only_output(result: Any) -> Tensor:
    """Return a kernel's output, also for versions that return a tuple (output, logsumexp)."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


class VarlenAttention:
    """Local attention by torch's own flash attention, one kernel for all documents."""

    def __init__(self, *, scale: float | None = None) -> None:
        self.scale = scale
        self._attend: Callable[..., Any] = varlen_attn
        self._parameters = frozenset(inspect.signature(varlen_attn).parameters)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """Attend with q [B, Sq, H, d] to k and v [B, Sk, K, d] -> [B, Sq, H, d]."""
        mask.check_covers(q.shape[0], q.shape[1], k.shape[1])
        if mask.cu_seqlens is None:
            query_ends, key_ends = (
                torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * x.shape[1]
                for x in (q, k)
            )
            longest = q.shape[1], k.shape[1]
        else:
            query_ends, key_ends = mask.cu_seqlens_on(q.device)
            longest = mask.max_lengths
        # Without this, torch 2.14 and later prefer cuDNN's kernel on Hopper and Blackwell.
        # See [Note: Signature of varlen_attn] in docs/design/notes/attention.md.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = self._attend(
                *(x.flatten(0, 1) for x in (q, k, v)),  # [T, H, d]
                query_ends,
                key_ends,
                *longest,
                **self._options(mask, grouped=q.shape[2] != k.shape[2]),
            )
        return _only_output(out).view(q.shape)

    def _options(self, mask: AttentionMask, *, grouped: bool) -> dict[str, Any]:
        """Return the keywords of `varlen_attn`; `grouped`: query heads share KV heads."""
        left = -1 if mask.window is None else mask.window - 1
        right = 0 if mask.causal else left  # (-1, 0) is causal without a window
        options: dict[str, Any] = {"scale": self.scale, "window_size": (left, right)}
        if grouped and "enable_gqa" in self._parameters:  # required since torch 2.12
            options["enable_gqa"] = True
        return options
