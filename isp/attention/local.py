"""Attention on one device: the interface, and the choice of what computes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from isp.attention.cpu import CpuAttention
from isp.attention.flash import Flash2Attention, Flash3Attention, Flash4Attention
from isp.attention.mask import AttentionMask
from isp.attention.sdpa import SdpaAttention, SdpaKernel
from isp.attention.varlen import VarlenAttention

__all__ = ["AttentionBackend", "LocalAttention", "choose_backend", "make_local_attention"]

logger = logging.getLogger(__name__)


class LocalAttention(Protocol):
    """Softmax attention over the sequence that this device holds.

    Whatever implements it handles grouped KV heads, packed documents, windows and causal masks
    aligned as the note [Causal alignment] in `isp.attention.mask` draws them.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """q [B, Sq, H, d], k and v [B, Sk, K, d] -> [B, Sq, H, d]; K divides H."""
        ...


class AttentionBackend(StrEnum):
    """What computes local attention (`attention_backend`)."""

    AUTO = "auto"
    """The fastest that is there."""
    SDPA = "sdpa"
    """torch's scaled dot product attention, document by document; the one that runs on CPU."""
    CUDNN = "cudnn"
    """The same with cuDNN's kernel."""
    VARLEN = "varlen"
    """torch.nn.attention.varlen."""
    FLASH2 = "flash2"
    """The flash_attn package."""
    FLASH3 = "flash3"
    """flash_attn_interface, FlashAttention-3 for Hopper."""
    FLASH4 = "flash4"
    """flash_attn.cute, FlashAttention-4 for Hopper and Blackwell."""


_HALF = (torch.bfloat16, torch.float16)


def choose_backend(
    device: torch.device, dtype: torch.dtype, *, is_there: Callable[[AttentionBackend], bool]
) -> AttentionBackend:
    """What AUTO stands for on this device, of the backends that `is_there` says can be imported."""
    if device.type != "cuda" or dtype not in _HALF:
        return AttentionBackend.SDPA
    major, _ = torch.cuda.get_device_capability(device)
    wanted = [AttentionBackend.FLASH2, AttentionBackend.VARLEN]
    if major == 9:
        wanted = [AttentionBackend.FLASH3, AttentionBackend.FLASH4, *wanted]
    if major >= 10:
        wanted = [AttentionBackend.FLASH4, *wanted]
    return next((backend for backend in wanted if is_there(backend)), AttentionBackend.SDPA)


def make_local_attention(
    backend: AttentionBackend = AttentionBackend.AUTO,
    *,
    device: torch.device,
    dtype: torch.dtype,
    scale: float | None = None,
) -> LocalAttention:
    """Local attention by `backend`, with logits multiplied by `scale` (None: 1 / sqrt(d)).

    Says which one it is, once, at level info. Raises ValueError if `backend` is forced and cannot
    run here, with the way to get it.
    """
    backend = AttentionBackend(backend)
    chosen = backend
    if backend is AttentionBackend.AUTO:
        chosen = choose_backend(device, dtype, is_there=_can_be_made)
    elif chosen is not AttentionBackend.SDPA:
        _check_fits(chosen, device, dtype)
    attention = _make(chosen, device, scale)
    logger.info("attention: %s%s", chosen, " (auto)" if backend is AttentionBackend.AUTO else "")
    return attention


def _check_fits(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cuda" or dtype not in _HALF:
        raise ValueError(
            f"attention_backend={backend} needs bfloat16 or float16 on a CUDA device, not {dtype}"
            f" on {device.type}: use attention_backend=sdpa or auto"
        )


def _can_be_made(backend: AttentionBackend) -> bool:
    try:
        _make(backend, torch.device("cuda"), None)
    except ValueError:
        return False
    return True


def _make(backend: AttentionBackend, device: torch.device, scale: float | None) -> LocalAttention:
    match backend:
        case AttentionBackend.FLASH2:
            return Flash2Attention(scale=scale)
        case AttentionBackend.FLASH3:
            return Flash3Attention(scale=scale)
        case AttentionBackend.FLASH4:
            return Flash4Attention(scale=scale)
        case AttentionBackend.VARLEN:
            return VarlenAttention(scale=scale)
        case AttentionBackend.CUDNN:
            return SdpaAttention(SdpaKernel.CUDNN, scale=scale)
        case _ if device.type == "cpu":
            return CpuAttention(scale=scale)
        case _:
            return SdpaAttention(SdpaKernel.ANY, scale=scale)
