"""The choice of an implementation for each kind of attention.

only a mask   the configured `backend`: `make_local_attention`
sinks         a kernel that returns the log-sum-exp: `SinkAttention`
a soft cap    on CUDA a flash-attn package, or else `FlexAttention`
all else      `ExplicitAttention`, a loop over blocks
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from isp.core.attention.backend import AttentionBackend
from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.backends.explicit import MOST_LOGITS, ExplicitAttention
from isp.core.attention.backends.flex import FlexAttention
from isp.core.attention.backends.lse import FlashKernel
from isp.core.attention.backends.sinks import SinkAttention
from isp.core.attention.local import (
    FLASH_PACKAGES,
    LocalAttention,
    Place,
    fastest_first,
    fault_of,
    make_local_attention,
)
from isp.core.comm import Channel
from isp.core.comm.tag import Tag

__all__ = ["AttentionKind", "make_attention"]


logger = logging.getLogger(__name__)


class AttentionKind(NamedTuple):
    """The features of a layer's attention; layers of one kind share one implementation."""

    scale: float | None
    """Factor of the logits; None: 1 / sqrt(d)."""
    softcap: float | None
    """c turns logits x into c tanh(x / c); None: no cap."""
    sinks: bool
    """Each head has an extra logit without a value."""
    chosen: bool
    """Queries see chosen keys only."""
    relative: bool
    """Logits have a bias by distance."""
    head_size: int
    """Number of features of a head."""
    group: int
    """Number of query heads that share a KV head."""

    @property
    def extras(self) -> str:
        """The features in addition to a mask, in words for the log; empty if there are none."""
        needs = {
            "a soft cap": self.softcap is not None,
            "sinks": self.sinks,
            "chosen keys": self.chosen,
            "a bias by distance": self.relative,
        }
        return " and ".join(name for name, needed in needs.items() if needed)


def make_attention(
    kind: AttentionKind,
    backend: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    everyone: Channel,
) -> LocalAttention:
    """Return attention of `kind` on a device; a collective over all ranks, `everyone`.

    Attention with only a mask uses `backend`. For other features the log names the implementation.
    It is a warning if that is not `backend`, or if no kernel on CUDA has the features, so that
    `ExplicitAttention` loops over blocks in float32.
    """
    extras = kind.extras
    if not extras:
        return make_local_attention(
            backend,
            device=device,
            dtype=dtype,
            head_dim=kind.head_size,
            group=kind.group,
            scale=kind.scale,
            everyone=everyone,
        )
    if extras == "sinks" and device.type == "cpu":
        logger.info("attention: layers with sinks use %s", AttentionBackend.SDPA)
        return SinkAttention(CpuAttention(scale=kind.scale))
    place = Place(device, dtype, kind.head_size, kind.group)
    # Try with sinks if the layer has them, because `SinkAttention` cannot be called without sinks.
    sinks = {"sinks": torch.zeros(kind.group, device=device, dtype=dtype)} if kind.sinks else {}
    missing = ""
    # One all-reduce for each candidate, also on ranks that cannot run it: ranks that skipped one
    # would meet the others in different all-reduces.
    for name, make in _candidates(kind, backend, place).items():
        # All ranks go through the same list, so it may have packages that do not support this
        # rank's GPU: skip them, but not the all-reduce.
        for_others = name in FLASH_PACKAGES and name not in fastest_first(device, dtype)
        fault = "not for this device" if for_others else fault_of(make, place, **sinks)
        failed = everyone.all_reduce(torch.tensor([bool(fault)]).float(), op="max", tag=_TAG)
        if not failed.wait().item():
            other = backend not in (AttentionBackend.AUTO, name)
            forced = f" (model.attention_backend={backend} cannot compute it)" if other else ""
            level = logging.WARNING if other else logging.INFO
            logger.log(level, "attention: layers with %s use %s%s%s", extras, name, forced, missing)
            return make()
        missing += f"; not {name}: {fault or 'it does not run on every rank'}"
    logger.log(
        logging.WARNING if device.type == "cuda" else logging.INFO,
        "attention: layers with %s use a loop over blocks, because no kernel here computes it: in"
        " float32, up to %s logits in memory at a time, and again in backward%s",
        extras,
        f"{MOST_LOGITS:,}",
        missing,
    )
    return ExplicitAttention(scale=kind.scale, softcap=kind.softcap)


_TAG = Tag(tensor="attention")


def _candidates(
    kind: AttentionKind, backend: AttentionBackend, place: Place
) -> dict[str, Callable[[], LocalAttention]]:
    """Return the implementations to try, best first: the same list on all ranks."""
    if place.device.type != "cuda" or place.dtype not in (torch.bfloat16, torch.float16):
        return {}
    scale, softcap = kind.scale, kind.softcap
    found: dict[str, Callable[[], LocalAttention]] = {}
    if kind.extras == "sinks":
        found[AttentionBackend.VARLEN] = lambda: SinkAttention(FlashKernel(scale))
    elif softcap is not None and kind.extras == "a soft cap":
        for package, make in FLASH_PACKAGES.items():
            if backend in (AttentionBackend.AUTO, package):
                found[package] = partial(make, scale=scale, softcap=softcap)
        found["flex_attention"] = partial(FlexAttention, scale=scale, softcap=softcap)
    return found
