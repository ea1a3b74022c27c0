"""`DistributedAttention`: attention over sequences that are split over ranks, by all-to-all.

p ranks, B batch, S sequence, H query heads, K KV heads, h and k those of this rank, d head size

    q, k, v  [B, S/p, H, d]  --all-to-all-->  [B, S, h, d]  local attention  [B, S, h, d]
                                                             --all-to-all-->  [B, S/p, H, d]

Every rank attends with some heads over the whole sequence, so packed documents, windows and
positions are what they are on one device. `HeadPlan` says which heads.

Source: Jacobs et al. 2023 (DeepSpeed Ulysses); the head plan and the joint transfers are ours.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.attention.all_to_all import Cut, Exchange, exchanged, launch
from isp.core.attention.heads import HeadPlan
from isp.core.attention.local import LocalAttention
from isp.core.attention.mask import AttentionMask
from isp.core.autograd import joined
from isp.core.comm import Channel, pinned_memory
from isp.core.comm.channel import check_channel
from isp.core.comm.tag import Purpose, Tag

__all__ = ["DistributedAttention"]

_TOGETHER_BELOW_BYTES = 4 << 20
"""Up to this size on a rank q, k and v travel as one message."""

_MAX_EXCHANGES = 64
"""Kept at most: sequences of ever other lengths would make ever more."""

_HEADS, _SEQUENCE = 2, 1  # dims of [B, S, H, d]


class DistributedAttention:
    """Local attention made to work on a sequence that `channel` splits; made once a model.

    `local_attention` sees what the ranks of `channel` hold together. It may itself be spread over
    the ranks of another channel: `ContextAttention` splits a sequence further.

    Each way of handing over q, k and v has its own method, all with the same result: `__call__`
    (separate), `from_qkv` and `from_kv` (packed).

    `together_below_bytes`: up to this size on a rank q, k and v travel as one message, which saves
    launches; above it each on its own, and packing one overlaps the transfer of the one before.
    """

    def __init__(
        self,
        local_attention: LocalAttention,
        channel: Channel,
        *,
        together_below_bytes: int = _TOGETHER_BELOW_BYTES,
    ) -> None:
        check_channel("channel", channel)
        if not callable(local_attention):
            raise TypeError(
                f"local_attention must be callable, got {type(local_attention).__name__}: pass a"
                " function of q, k, v and mask, or what isp.make_local_attention(..) returns"
            )
        self.local_attention = local_attention
        self.channel = channel
        self.together_below_bytes = together_below_bytes
        self._sent: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self._exchange = lru_cache(_MAX_EXCHANGES)(self._make_exchange)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, **extras: Any
    ) -> Tensor:
        """q [B, S/p, H, d], k and v [B, S/p, K, d] -> [B, S/p, H, d]; `mask` of the full sequence.

        The heads of v, and so of the result, may be smaller than those of q and k. `extras`, where
        the local attention takes them: `sinks` [H], a further logit of each head, without a value,
        or [H, ..], whatever else of each head it takes, and then q may be wider than k; `chosen`,
        the keys of this rank's queries.
        Raises ValueError if K does not divide H.
        """
        if self.channel.size == 1:
            return self._attend_here(q, k, v, mask, extras)
        if "chosen" in extras:
            numbers = extras["chosen"].gathered(self.channel)
        plan = HeadPlan.of(q.shape[_HEADS], k.shape[_HEADS], self.channel.size)
        length = q.shape[_SEQUENCE] * self.channel.size
        size = q.nbytes + k.nbytes + v.nbytes
        alike = q.shape[-1] == k.shape[-1] and k.shape == v.shape
        if size <= self.together_below_bytes and alike:
            together = self._exchange((plan.query, plan.kv, plan.kv), length, "qkv")
            q, k, v = exchanged(together, q, k, v)
        else:
            transfers = [
                launch(self._exchange((heads,), length, label), (x,))
                for x, heads, label in ((q, plan.query, "q"), (k, plan.kv, "k"), (v, plan.kv, "v"))
            ]
            q, k, v = (arrive()[0] for arrive in transfers)
        if "chosen" in extras:
            extras["chosen"] = extras["chosen"]._replace(numbers=numbers.wait())
        out = self._attend_arrived(q, k, v, plan, mask, extras)
        back = self._exchange((plan.query,), length, "out")
        return exchanged(back, out, reverse=True)[0]

    def from_qkv(self, qkv: Tensor, *, mask: AttentionMask) -> Tensor:
        """Packed with as many KV heads as query heads: [B, S/p, 3, H, d] -> [B, S/p, H, d]."""
        q, k, v = qkv.unbind(2)
        return self(q, k, v, mask=mask)

    def from_kv(self, q: Tensor, kv: Tensor, *, mask: AttentionMask) -> Tensor:
        """k and v packed: q [B, S/p, H, d], kv [B, S/p, 2, K, d] -> [B, S/p, H, d]."""
        k, v = kv.unbind(2)
        return self(q, k, v, mask=mask)

    def _make_exchange(
        self, heads: tuple[tuple[range, ...], ...], length: int, label: str
    ) -> Exchange:
        """The exchange that spreads the `heads` of tensors and joins their tokens, S = `length`."""
        spread = tuple(Cut(_HEADS, ranges) for ranges in heads)
        sequence = Cut.even(_SEQUENCE, length, self.channel.size)
        return Exchange(
            self.channel, spread, sequence, Tag(Purpose.HEADS, tensor=f"attention.{label}")
        )

    def _attend_arrived(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: HeadPlan,
        mask: AttentionMask,
        extras: dict[str, Any],
    ) -> Tensor:
        """This rank's heads of `plan`: q [B, S, h, d], k and v [B, S, k, d] -> [B, S, h, d]."""
        if q.shape[_HEADS] == 0:
            return joined(q.new_empty(*q.shape[:-1], v.shape[-1]), q, k, v, extras.get("sinks"))
        own, kv = plan.query[self.channel.rank], plan.kv[self.channel.rank]
        repeated = plan.repeated_kv(self.channel.rank)
        if "chosen" in extras and extras["chosen"].numbers.shape[_HEADS] > 1:
            chosen = extras["chosen"]
            index = self._index(tuple(kv if repeated is None else (kv[i] for i in repeated)), q)
            numbers = chosen.numbers.index_select(_HEADS, index)
            extras["chosen"] = chosen._replace(numbers=numbers)
        if repeated is not None:
            k, v = (x.index_select(_HEADS, self._index(repeated, q)) for x in (k, v))
        if "sinks" in extras:
            extras["sinks"] = extras["sinks"][own.start : own.stop]
        return self._attend_here(q, k, v, mask, extras)

    @torch.inference_mode(False)  # such a tensor could not be kept for backward later
    def _index(self, heads: tuple[int, ...], like: Tensor) -> Tensor:
        """These numbers of heads as a tensor; sent to each device once."""
        if (heads, like.device) not in self._sent:
            index = pinned_memory.send(torch.tensor(heads), like.device)
            self._sent[heads, like.device] = index
        return self._sent[heads, like.device]

    def _attend_here(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, extras: dict[str, Any]
    ) -> Tensor:
        """Kernels want heads of one size: what v lacks is zero."""
        size, lacking = v.shape[-1], k.shape[-1] - v.shape[-1]
        if lacking:
            v = F.pad(v, (0, lacking))
        out = self.local_attention(q, k, v, mask=mask, **extras)
        return out[..., :size] if lacking else out
