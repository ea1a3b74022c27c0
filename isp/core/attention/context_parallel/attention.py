"""`ContextAttention`: attention of this rank's queries to the keys of all context ranks.

c context ranks, B batch, S sequence; of this rank: h query heads, k KV heads, T tokens in all rows,
L keys as its kernels get them; d head size

    q     [B, S/c, h, d]                                                stays on its rank
    k, v  [B, S/c, k, d]  --needed keys, all-to-all-->  [L, k, d]       for each stripe of KV heads
                                                         local attention [B, S/c, h, d]

Each context rank has the slices of documents that a `SequenceSplit` gives it, and receives exactly
the keys and values that these attend to. One kernel call gets each slice's whole range of keys, so
no results have to be merged, and windows and sinks work as on one device. Keys are sent in stripes
of heads: the next stripe is sent while the kernel computes this one.

backward   gradients of k and v return by the transposed all-to-all, and are summed in float32 or
           wider: first over the copies of a key on one rank, then over ranks in their order

Source: stripes as in ring-flash-attention, llama3_flash_attn_varlen; sending only the needed keys
as in NeMo's blockdiag_cp.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isp.core.attention.all_to_all import Arrival, launch
from isp.core.attention.backends.flash import FlashAttention, VarlenAttention
from isp.core.attention.backends.lse import FlashKernel, LseKernel
from isp.core.attention.backends.sdpa import SdpaAttention
from isp.core.attention.context_parallel.ring import Ring, ring_attention
from isp.core.attention.context_parallel.route import KeyExchange, Route, gather_route, ring_routes
from isp.core.attention.local import AttentionByRows, LocalAttention
from isp.core.attention.mask import AttentionMask
from isp.core.autograd import joined
from isp.core.comm import Channel
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh.sequence_split import SequenceSplit, Windows

__all__ = ["ContextAttention", "lse_kernel"]

logger = logging.getLogger(__name__)

_ROUTES = 16
"""Number of cached routes, each for the documents of a micro-batch and a kind of mask."""

_STRIPE_BYTES = 1 << 20
"""Smallest stripe, in bytes received by the rank that receives most; more stripes cost launches."""

_MOST_STRIPES = 4
"""Largest number of stripes of KV heads."""

SplitOf = Callable[[tuple[int, ...], int, Windows], SequenceSplit]


class ContextAttention:
    """Attention to tokens that are sharded over `channel`, on each rank by `local_attention`.

    One object serves all layers. A rank's tokens are in the order of its slices, row by row.
    `windows` are the attention windows of all layers of the model: tokens are split so that each
    rank has about the same attention FLOPs in these layers together.
    `stripes` is the number of stripes of KV heads; None: it follows from their bytes.

    With `ring`, a layer attends to one block of keys after another and never has all keys in
    memory. This needs a kernel that returns the log-sum-exp, and a layer without window, sinks,
    chosen keys and soft cap; other layers gather the keys of all ranks.
    """

    def __init__(
        self,
        local_attention: LocalAttention,
        channel: Channel,
        windows: Windows,
        *,
        stripes: int | None = None,
        ring: bool = False,
        split_of: SplitOf = SequenceSplit.of,
    ) -> None:
        self.local_attention = local_attention
        self.channel = channel
        self.windows = windows
        self.stripes = stripes
        self.ring = ring
        self._split_of = split_of
        self._kernels: dict[tuple[torch.dtype, int, torch.device], LseKernel | None] = {}
        self._routes_of = lru_cache(_ROUTES)(self._make_routes)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, **extras: Any
    ) -> Tensor:
        """Attend with q [B, S/c, h, d] to k and v [B, S/c, k, d] -> [B, S/c, h, d].

        `mask` describes whole rows, in the order before their tokens were arranged by rank. If it
        has no documents, every row is cut in the same way. `extras` are further arguments of the
        local attention, as in `DistributedAttention.__call__`. Raises ValueError if q does not have
        the number of tokens that the split gives this rank, or if a mask that is not causal has a
        window.
        """
        if self.channel.size == 1:
            return self.local_attention(q, k, v, mask=mask, **extras)
        kernel = None
        if self.ring and mask.window is None and not extras:
            kernel = self._lse_kernel(q)
        routes = self._routes(q, mask, in_ring=kernel is not None)
        if not routes[0].is_local:
            # Copy q if it is a view of a message that also has k and v. Autograd saves q for
            # backward, and a view would keep this rank's k and v in memory, although only the
            # exchanged keys and values are needed.
            q = q.contiguous()
        tokens = _Tokens(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), extras)
        if routes[0].is_local:
            out = self._attend(tokens, routes[0].mask)
        elif kernel is not None:
            ring = Ring(self.channel, routes, kernel, q.device)
            out = ring_attention(*tokens[:3], ring)
        else:
            out = self._exchange(tokens, routes[0])
        return out.view(*q.shape[:-1], out.shape[-1])

    def _lse_kernel(self, q: Tensor) -> LseKernel | None:
        """Return the kernel whose results a ring merges; None if there is none for q.

        The choice is cached by q's dtype, head size and device.
        """
        kind = q.dtype, q.shape[-1], q.device
        if kind not in self._kernels:
            self._kernels[kind] = lse_kernel(self.local_attention, q)
        return self._kernels[kind]

    def _exchange(self, tokens: _Tokens, route: Route) -> Tensor:
        """Return attention [T, h, d]: each stripe is computed while the next one is sent."""
        stripes = tokens.stripes(self._num_stripes(tokens, route))
        route, outs, transfers = route.on(tokens.k.device), [], []
        for number, (_, k, v, _) in enumerate(stripes):
            tag = Tag(Purpose.KEYS, tensor=f"attention.kv.{number}")
            exchange = KeyExchange(self.channel, route, tag)
            transfers.append(launch(exchange, (torch.stack((k, v), 1),)))
            if number:  # compute the stripe before this one while this one is sent
                outs.append(self._attend_arrived(stripes[number - 1], transfers[number - 1], route))
        outs.append(self._attend_arrived(stripes[-1], transfers[-1], route))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _num_stripes(self, tokens: _Tokens, route: Route) -> int:
        """Return the number of stripes; the same on all ranks, because each is a collective."""
        k = tokens.k
        # Chosen keys are one tensor for all heads, which `_Tokens.stripes` does not cut.
        if "chosen" in tokens.extras:
            return 1
        if self.stripes is not None:
            return min(self.stripes, k.shape[1])
        received = 2 * route.most_received * k.shape[1:].numel() * k.element_size()
        return max(1, min(_MOST_STRIPES, k.shape[1], received // _STRIPE_BYTES))

    def _attend_arrived(self, stripe: _Tokens, arrive: Arrival, route: Route) -> Tensor:
        """Wait for a stripe's keys and values, and attend to them."""
        k, v = arrive()[0].unbind(1)
        return self._attend(stripe._replace(k=k, v=v), route.mask)

    def _attend(self, tokens: _Tokens, mask: AttentionMask) -> Tensor:
        """Return the local attention of `tokens`, [T, h, d]."""
        q, k, v, extras = tokens
        # Without queries nothing is computed. But the exchange in backward is a collective, so its
        # inputs are joined to the result: backward then reaches it on this rank, too.
        if not len(q):
            return joined(q.new_empty(*q.shape[:-1], v.shape[-1]), q, k, v, extras.get("sinks"))
        # Pass one row. Its documents, as `mask` has them, are the slices of all rows.
        attended = self.local_attention(*(x[None] for x in (q, k, v)), mask=mask, **extras)
        return attended.squeeze(0)

    def _routes(self, q: Tensor, mask: AttentionMask, *, in_ring: bool) -> tuple[Route, ...]:
        """Return the routes for a mask, after checking that q has this rank's number of tokens."""
        batch_size, length = q.shape[:2]
        # Without documents each row is one document, which has all ranks' tokens.
        lengths: tuple[int, ...] = (length * self.channel.size,)
        rows = batch_size
        if mask.cu_seqlens is not None:
            mask.check_covers(1, mask.bounds[-1], mask.bounds[-1])
            lengths, rows = mask.lengths, 1
        routes = self._routes_of(lengths, rows, mask.causal, mask.window, in_ring)
        if routes[0].num_tokens != batch_size * length:
            raise ValueError(
                f"context rank {self.channel.rank} of {self.channel.size} has"
                f" {routes[0].num_tokens} tokens by the split, got {batch_size} x {length}: pass"
                f" the mask of the whole rows, and tokens arranged by the split of its documents"
            )
        return routes

    def _make_routes(
        self, lengths: tuple[int, ...], rows: int, causal: bool, window: int | None, in_ring: bool
    ) -> tuple[Route, ...]:
        """Return the routes of keys for `rows` equal rows of documents of these lengths."""
        rank, num_ranks = self.channel.rank, self.channel.size
        if not causal and window is not None:
            raise ValueError(
                f"attention window={window} without causal order is not split over {num_ranks}"
                f" context ranks: use parallel.sequence_2D.context_size=1"
            )
        split = self._split_of(lengths, num_ranks, self.windows).repeated(rows)
        if in_ring:
            return ring_routes(split, rank, causal=causal)
        return (gather_route(split, rank, causal=causal, window=window),)


class _Tokens(NamedTuple):
    """Queries, keys and values of all rows, or of a stripe of their heads."""

    q: Tensor
    """Queries [T, h, d]."""
    k: Tensor
    """Keys [T, k, d], after the exchange [L, k, d]; v has the same shape."""
    v: Tensor
    extras: dict[str, Any]
    """Further arguments of the local attention, such as sinks."""

    def stripes(self, number: int) -> list[_Tokens]:
        """Cut the heads into `number` stripes, as evenly as KV heads allow."""
        if number == 1:
            return [self]
        heads, group = self.k.shape[1], self.q.shape[1] // self.k.shape[1]
        # KV heads of each stripe: any two stripes differ by at most one.
        sizes = [len(range(i, heads, number)) for i in range(number)]
        queries = [group * size for size in sizes]
        extras: list[dict[str, Any]] = [{}] * number
        if "sinks" in self.extras:
            extras = [{"sinks": sinks} for sinks in self.extras["sinks"].split(queries)]
        parts = (self.q.split(queries, 1), self.k.split(sizes, 1), self.v.split(sizes, 1), extras)
        return [_Tokens(*stripe) for stripe in zip(*parts, strict=True)]


def lse_kernel(local: LocalAttention, q: Tensor) -> LseKernel | None:
    """Return a kernel that computes the same as `local` and also returns the log-sum-exp, or None.

    Logs a warning if the dtype, head size or device of q is the only reason for None.
    """
    if isinstance(local, LseKernel):
        return local
    if not isinstance(local, SdpaAttention | VarlenAttention | FlashAttention | AttentionByRows):
        return None
    if isinstance(local, FlashAttention) and local.softcap is not None:
        return None
    is_narrow, size = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    # Flash attention needs CUDA, 16-bit floats and one of these head sizes.
    if q.is_cuda and is_narrow and size % 8 == 0 and size <= 256:
        return FlashKernel(local.scale)
    logger.warning(
        "attention: keys are gathered instead of sent in a ring, because ring attention needs flash"
        " attention: CUDA, 16-bit floats, and a head size that is a multiple of 8 up to 256. Here"
        " q is %s with head size %d on %s",
        *(q.dtype, size, q.device.type),
    )
    return None
