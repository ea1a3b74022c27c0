"""The kinds of attention that layers ask for, and what computes each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from isp.attention.explicit import ExplicitAttention
from isp.attention.local import LocalAttention, make_local_attention
from isp.comm import Channel
from isp.settings.attention_backend import AttentionBackend

__all__ = ["AttentionKind", "make_attention"]


class AttentionKind(NamedTuple):
    """What a layer's attention needs; layers of one kind share what computes it."""

    scale: float | None
    """Of the logits; None: 1 / sqrt(d)."""
    softcap: float | None
    sinks: bool
    chosen: bool
    """Whether queries see chosen keys only."""
    relative: bool
    """Whether there is a bias by distance."""
    head_size: int
    group: int
    """Query heads that share a KV head."""


def make_attention(
    kind: AttentionKind,
    backend: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    everyone: Channel,
) -> LocalAttention:
    """Attention of this kind on a device; `everyone`: as of `make_local_attention`."""
    if kind.softcap is not None or kind.sinks or kind.chosen or kind.relative:
        return ExplicitAttention(scale=kind.scale, softcap=kind.softcap)
    return make_local_attention(
        backend,
        device=device,
        dtype=dtype,
        head_dim=kind.head_size,
        group=kind.group,
        scale=kind.scale,
        everyone=everyone,
    )
