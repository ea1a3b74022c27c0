"""Attention on one device: the interface, and the choice of what computes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from isp.attention.cpu import CpuAttention
from isp.attention.flash import FlashAttention, VarlenAttention
from isp.attention.mask import AttentionMask
from isp.attention.sdpa import CUDNN_ALONE, SdpaAttention
from isp.settings.attention_backend import AttentionBackend

__all__ = [
    "LocalAttention",
    "make_local_attention",
]

logger = logging.getLogger(__name__)


class LocalAttention(Protocol):
    """Softmax attention over the sequence that this device holds.

    Whatever implements it handles grouped KV heads, packed documents, windows and causal masks
    aligned as the note [Causal alignment] in `isp.attention.mask` draws them.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """q [B, Sq, H, d], k and v [B, Sk, K, d] -> [B, Sq, H, d]; K divides H."""
        ...


_KINDS: dict[AttentionBackend, Callable[..., LocalAttention]] = {
    AttentionBackend.CUDNN: partial(SdpaAttention, CUDNN_ALONE),
    AttentionBackend.VARLEN: VarlenAttention,
    AttentionBackend.FLASH2: partial(FlashAttention, "flash_attn"),
    AttentionBackend.FLASH3: partial(FlashAttention, "flash_attn_interface"),
    AttentionBackend.FLASH4: partial(FlashAttention, "flash_attn.cute", no_limit=None),
}


def _choose_backend(
    device: torch.device, dtype: torch.dtype, *, fault_of: Callable[[AttentionBackend], str]
) -> tuple[AttentionBackend, dict[AttentionBackend, str]]:
    """The backend AUTO stands for on this device, and the faults of those that would be faster.

    `fault_of` says what is wrong with a backend here; empty: nothing.
    """
    faults: dict[AttentionBackend, str] = {}
    for backend in _fastest_first(device, dtype):
        fault = fault_of(backend)
        if not fault:
            return backend, faults
        faults[backend] = fault
    return AttentionBackend.SDPA, faults


def make_local_attention(
    backend: AttentionBackend = AttentionBackend.AUTO,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int = 64,
    scale: float | None = None,
) -> LocalAttention:
    """Local attention by `backend`, with logits multiplied by `scale` (None: 1 / sqrt(d)).

    Says which one it is, once, at level info, and why not a faster one. Raises ValueError if
    `backend` is forced and cannot run here, with the way to get it.
    """
    backend = AttentionBackend(backend)
    backend.check_fits(device.type, str(dtype).removeprefix("torch."))
    fault_of = partial(_fault_on, device=device, dtype=dtype, head_dim=head_dim)
    if backend is AttentionBackend.AUTO:
        chosen, faults = _choose_backend(device, dtype, fault_of=fault_of)
        passed_over = "".join(f"; not {other}: {fault}" for other, fault in faults.items())
        logger.info("attention: %s (auto%s)", chosen, passed_over)
        return _make(chosen, device, scale)
    if backend is not AttentionBackend.SDPA and (fault := fault_of(backend)):
        remedy = f"{backend.remedy}, or " if backend.remedy else ""
        raise ValueError(
            f"model.attention_backend={backend} does not run here ({fault}): {remedy}use"
            f" model.attention_backend=auto"
        )
    logger.info("attention: %s", backend)
    return _make(backend, device, scale)


def _fault_on(
    backend: AttentionBackend, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str:
    """The obstacle to `backend` training on packed documents; empty: none.

    Found out by doing it once, on a few tokens: packages can be imported whose kernels are not
    built for this device, know other keywords, or have no backward.
    """
    try:
        attend, mask = _make(backend, device, None), AttentionMask.of_documents([16, 32])
        q, k, v = (
            torch.zeros(1, 48, heads, head_dim, device=device, dtype=dtype, requires_grad=True)
            for heads in (2, 1, 1)
        )
        with torch.enable_grad():
            torch.autograd.grad(attend(q, k, v, mask=mask).sum(), (q, k, v))
    except Exception as error:  # a package that compiles as it runs may raise anything
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line[:200]}"
    return ""


def _fastest_first(device: torch.device, dtype: torch.dtype) -> list[AttentionBackend]:
    """Backends that may be faster than SDPA on such a device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return []
    major, _ = torch.cuda.get_device_capability(device)
    wanted = [AttentionBackend.FLASH2, AttentionBackend.VARLEN]
    if major == 9:
        wanted = [AttentionBackend.FLASH3, AttentionBackend.FLASH4, *wanted]
    if major >= 10:
        wanted = [AttentionBackend.FLASH4, *wanted]
    return wanted


def _make(backend: AttentionBackend, device: torch.device, scale: float | None) -> LocalAttention:
    if backend in _KINDS:
        return _KINDS[backend](scale=scale)
    if device.type == "cpu":
        return CpuAttention(scale=scale)
    return SdpaAttention(scale=scale)
