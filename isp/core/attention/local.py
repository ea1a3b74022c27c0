"""Attention on one device: its interface, and the choice of a backend.

On CUDA, AUTO times the backends at the start and takes the fastest on all ranks.
See [Note: Choice] in docs/design/notes/attention.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from isp.core.attention.backend import AttentionBackend
from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.backends.flash import FlashAttention, VarlenAttention
from isp.core.attention.backends.sdpa import CUDNN_ALONE, SdpaAttention
from isp.core.attention.mask import AttentionMask
from isp.core.comm import Channel, streams
from isp.core.comm.tag import Tag
from isp.utils.text import first_line

__all__ = [
    "FLASH_PACKAGES",
    "AttentionByRows",
    "LocalAttention",
    "Place",
    "fastest_first",
    "fault_of",
    "make_local_attention",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LocalAttention(Protocol):
    """Softmax attention over the tokens on this device.

    Each implementation handles grouped KV heads, packed documents, windows, and causal masks whose
    last query is aligned with the last key.
    See [Note: Causal alignment] in docs/design/notes/attention.md.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """Attend with q [B, Sq, H, d] to k and v [B, Sk, K, d] -> [B, Sq, H, d]; K divides H."""
        ...


class AttentionByRows:
    """Local attention by one backend for equal documents, and by another for packed rows.

    Windows, and rows with fewer queries than keys, use the backend for packed rows: SDPA would need
    a mask in memory for them. See [Note: Choice] in docs/design/notes/attention.md.
    """

    def __init__(
        self, equal: LocalAttention, packed: LocalAttention, *, scale: float | None
    ) -> None:
        self._equal = equal
        self._packed = packed
        self.scale = scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """Attend with q [B, Sq, H, d] to k and v [B, Sk, K, d] -> [B, Sq, H, d]."""
        mask.check_covers(q.shape[0], q.shape[1], k.shape[1])
        length = q.shape[1] if mask.cu_seqlens is None else mask.equal_length
        if not length or mask.window is not None or q.shape[1] != k.shape[1]:
            return self._packed(q, k, v, mask=mask)
        # Equal documents become rows of one document each: one call of a dense kernel.
        rows = (x.reshape(-1, length, *x.shape[2:]) for x in (q, k, v))  # [documents, length, H, d]
        return self._equal(*rows, mask=AttentionMask(causal=mask.causal)).reshape(q.shape)


FLASH_PACKAGES: dict[AttentionBackend, Callable[..., LocalAttention]] = {
    AttentionBackend.FLASH3: partial(FlashAttention, "flash_attn_interface"),
    AttentionBackend.FLASH4: partial(FlashAttention, "flash_attn.cute", no_limit=None),
    AttentionBackend.FLASH2: partial(FlashAttention, "flash_attn"),
}
"""The flash-attn packages, in the order of expected speed; they support a soft cap."""

_KINDS: dict[AttentionBackend, Callable[..., LocalAttention]] = {
    AttentionBackend.CUDNN: partial(SdpaAttention, in_order=True),
    AttentionBackend.VARLEN: VarlenAttention,
    **FLASH_PACKAGES,
}

_CLOSE = 1.05
"""Two times whose ratio is at most this count as equal."""

_TIMED_TOKENS = 8192
"""Tokens of the row that backends are timed with, as one document and as packed documents."""
_TIMED_DOCUMENTS = (1024, 3072, 512, 3584)
"""Lengths of the documents of the first packed row. Later rows have other lengths, as in training:
cuDNN builds a plan for each set of lengths."""
_TIMED_HEADS = 8
"""Query heads of the timed row, in whole groups: enough to fill any device with so many tokens."""


class Place(NamedTuple):
    """The device, dtype and head sizes for which an implementation of attention is chosen."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    """Number of features of a head."""
    group: int
    """Number of query heads that share a KV head."""


class _ByRows(NamedTuple, Generic[T]):
    """Two values, such as backends or times: one for batches whose documents have equal lengths,
    and one for packed rows.

    See [Note: Choice] in docs/design/notes/attention.md.
    """

    equal: T
    packed: T


def make_local_attention(
    backend: AttentionBackend = AttentionBackend.AUTO,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int = 64,
    group: int = 1,
    scale: float | None = None,
    everyone: Channel | None = None,
) -> LocalAttention:
    """Return local attention by `backend`, with logits times `scale` (None: 1 / sqrt(d)).

    `group` query heads share a KV head. `everyone`: the channel of all ranks, over which this is a
    collective that chooses the same backend on each; None: only this process chooses. Logs the
    backend, and for AUTO the times. Raises ValueError if a backend other than AUTO cannot run here,
    and says how to install it.
    """
    backend = AttentionBackend(backend)
    backend.check_fits(
        device.type,
        str(dtype).removeprefix("torch."),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    place = Place(device, dtype, head_dim, group)
    if backend is AttentionBackend.AUTO:
        equal, packed = _choose_backend(place, everyone or Channel.solo())
        attend = _make(packed, device, scale)
        if equal is packed:
            return attend
        return AttentionByRows(_make(equal, device, scale), attend, scale=scale)
    if backend is not AttentionBackend.SDPA and (fault := _fault_on(backend, place)):
        remedy = f"{backend.remedy}, or " if backend.remedy else ""
        raise ValueError(
            f"model.attention_backend={backend} does not run here ({fault}): {remedy}use"
            f" model.attention_backend=auto"
        )
    logger.info("attention: %s", backend)
    return _make(backend, device, scale)


def _choose_backend(place: Place, everyone: Channel) -> _ByRows[AttentionBackend]:
    """Return the backends that AUTO chooses, the same on all ranks."""
    faults: dict[AttentionBackend, str] = {}
    # Keep times of all backends, not only of this device's candidates: ranks with other GPUs have
    # other candidates, and all ranks must reduce tensors of the same shape.
    times = dict.fromkeys(AttentionBackend, _ByRows(math.inf, math.inf))
    candidates = fastest_first(place.device, place.dtype)
    for backend in candidates:
        faults[backend] = _fault_on(backend, place)
        if not faults[backend]:
            try:
                times[backend] = _milliseconds(backend, place)
            except Exception as error:
                # Do not raise, whether out of memory or a kernel's error: this rank must reach the
                # all-reduce below, or the other ranks hang in it.
                faults[backend] = first_line(error)[:200]
    if not candidates:
        logger.info("attention: %s (auto)", AttentionBackend.SDPA)
        return _ByRows(AttentionBackend.SDPA, AttentionBackend.SDPA)
    # Take the greatest time over the ranks: it is infinite if one rank cannot run the backend.
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)  # [backends, 2]
    slowest = everyone.all_reduce(slowest, op="max", tag=Tag(tensor="attention")).wait()
    times = {b: _ByRows(*each) for b, each in zip(times, slowest.tolist(), strict=True)}
    able = {backend: times[backend] for backend in candidates if max(times[backend]) < math.inf}
    chosen = _ByRows(
        _fastest({backend: time.equal for backend, time in able.items()}),
        _fastest({backend: time.packed for backend, time in able.items()}),
    )
    missing = [
        f"; not {backend}: {faults[backend] or 'it does not run on every rank'}"
        f"{f' ({backend.remedy})' * bool(backend.remedy)}"
        for backend in candidates
        if backend not in able
    ]
    logger.info(
        "attention: %s (auto; milliseconds for %s tokens, as one document / packed, forward and"
        " backward: %s%s)",
        chosen.packed
        if chosen.equal is chosen.packed
        else f"{chosen.equal} for rows of one document or equal ones, {chosen.packed} for others",
        f"{_TIMED_TOKENS:,}",
        ", ".join(f"{backend} {time[0]:.2f} / {time[1]:.2f}" for backend, time in able.items()),
        "".join(missing),
    )
    return chosen


def _fastest(times: dict[AttentionBackend, float]) -> AttentionBackend:
    """Return the first backend whose time is close to the least.

    `times` are milliseconds, in the order of expected speed. With deterministic algorithms the
    first backend is returned whatever its time, because a choice by times may differ between runs.
    """
    if torch.are_deterministic_algorithms_enabled():
        return next(iter(times), AttentionBackend.SDPA)
    least = min(times.values(), default=math.inf)
    close = (backend for backend, time in times.items() if time <= _CLOSE * least)
    return next(close, AttentionBackend.SDPA)


def _fault_on(backend: AttentionBackend, place: Place) -> str:
    """Return the reason why `backend` cannot train on packed documents; empty if it can.

    Tries it once on a few tokens: an importable package may have kernels that are not built for
    this device, take other keywords, or have no backward.
    """
    # Try cuDNN without the kernels that torch falls back to: they would hide that it cannot run.
    if backend is AttentionBackend.CUDNN:
        return fault_of(partial(SdpaAttention, CUDNN_ALONE), place)
    return fault_of(partial(_make, backend, place.device, None), place)


# Leave inference mode, because the trial needs a backward: the process may train later.
@torch.inference_mode(False)
def fault_of(make: Callable[[], Callable[..., Tensor]], place: Place, **extras: Tensor) -> str:
    """Return the reason why `make()` cannot train with the arguments `extras`; empty if it can."""
    try:
        mask = AttentionMask.of_documents([16, 32])
        _forward_and_backward(partial(make(), **extras), _tensors(place, 48, 1), mask)
    except Exception as error:  # catch everything: packages that compile kernels raise many types
        return first_line(error)[:200]
    return ""


@torch.inference_mode(False)
def _milliseconds(backend: AttentionBackend, place: Place) -> _ByRows[float]:
    """Return the milliseconds of a forward and backward: one document, and packed documents.

    Each time is the least of 3 repeats after a warm-up.
    """
    attend = _make(backend, place.device, None)
    tensors = _tensors(place, _TIMED_TOKENS, max(1, _TIMED_HEADS // place.group))

    def least(masks: list[AttentionMask]) -> float:
        times = []
        for mask in masks:
            start = streams.mark(place.device, timed=True)
            _forward_and_backward(attend, tensors, mask)
            end = streams.mark(place.device, timed=True)
            assert start is not None
            assert end is not None
            end.synchronize()
            times.append(float(start.elapsed_time(end)))
        return min(times[1:])  # the first run warms up and does not count

    first, second, *rest = _TIMED_DOCUMENTS
    # Each repeat has documents of new lengths, as in training, so the time includes what a backend
    # prepares for new lengths, such as cuDNN's plan.
    packed = [
        AttentionMask.of_documents([first + 8 * repeat, second - 8 * repeat, *rest])
        for repeat in range(4)
    ]
    return _ByRows(least([AttentionMask()] * 4), least(packed))


def _tensors(place: Place, tokens: int, kv_heads: int) -> list[Tensor]:
    """Return q, k and v of one row of zeros that require gradients."""
    return [
        torch.zeros(
            (1, tokens, heads, place.head_dim),
            device=place.device,
            dtype=place.dtype,
            requires_grad=True,
        )
        for heads in (place.group * kv_heads, kv_heads, kv_heads)
    ]


def _forward_and_backward(
    attend: Callable[..., Tensor], qkv: list[Tensor], mask: AttentionMask
) -> None:
    """Run attention and its backward once, as training does."""
    with torch.enable_grad():
        out = attend(*qkv, mask=mask)
        torch.autograd.grad(out, qkv, torch.zeros_like(out))


def fastest_first(device: torch.device, dtype: torch.dtype) -> list[AttentionBackend]:
    """Return the backends that may be fastest on a device, in the order of expected speed.

    cuDNN is not listed: it is among SDPA's kernels, which fall back where it cannot run.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return []
    major, _ = torch.cuda.get_device_capability(device)
    found = [AttentionBackend.FLASH2, AttentionBackend.VARLEN, AttentionBackend.SDPA]
    if major == 9:
        found = [AttentionBackend.FLASH3, AttentionBackend.FLASH4, *found]
    if major >= 10:
        found = [AttentionBackend.FLASH4, *found]
    return found


def _make(backend: AttentionBackend, device: torch.device, scale: float | None) -> LocalAttention:
    """Return attention by `backend`; SDPA on CPU is `CpuAttention`."""
    if backend in _KINDS:
        return _KINDS[backend](scale=scale)
    if device.type == "cpu":
        return CpuAttention(scale=scale)
    return SdpaAttention(scale=scale)
