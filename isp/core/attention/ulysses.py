"""`DistributedAttention`: attention over sequences split over ranks, by all-to-all (Ulysses).

p ranks, B batch, S sequence, H query heads, K KV heads, h and k this rank's, d head size

    q, k, v  [B, S/p, H, d]  --all-to-all-->  [B, S, h, d]  local attention  [B, S, h, d]
                                                             --all-to-all-->  [B, S/p, H, d]

Each rank attends with some heads, given by `HeadSplit`, to the whole sequence, so packed documents,
windows and positions are those of one device.

Source: Jacobs et al. 2023 (DeepSpeed Ulysses); the head split and the joint transfers are ours.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.attention.all_to_all import Cut, Exchange, exchanged, launch
from isp.core.attention.heads import HeadSplit
from isp.core.attention.local import LocalAttention
from isp.core.attention.mask import AttentionMask
from isp.core.autograd import joined
from isp.core.comm import Channel, pinned_memory
from isp.core.comm.channel import check_channel
from isp.core.comm.tag import Purpose, Tag

__all__ = ["DistributedAttention"]

_TOGETHER_BELOW_BYTES = 4 << 20
"""Total bytes of q, k and v on a rank up to which they are sent as one message."""

_MAX_EXCHANGES = 64
"""Number of cached exchanges; without a limit, ever new lengths of sequences would fill memory."""

_HEADS, _SEQUENCE = 2, 1  # indices of the dims of [B, S, H, d]


class DistributedAttention:
    """Attention to a sequence that is sharded over `channel`, on each rank by `local_attention`.

    `local_attention` gets some heads of all tokens that the ranks of `channel` have. It may itself
    communicate over another channel: `ContextAttention` splits a sequence further. An object serves
    all layers of one kind.

    q, k and v are passed separately (`__call__`) or packed (`from_qkv`, `from_kv`), with the same
    result.

    `together_below_bytes`: total bytes of q, k and v on a rank up to which they are one message,
    which saves launches. Larger ones are sent separately: packing k overlaps sending q.
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
        """Attend with q [B, S/p, H, d] to k and v [B, S/p, K, d] -> [B, S/p, H, d].

        `mask` describes the full sequence. The head size of v, and so of the result, may be smaller
        than the head size of q and k. `extras` are further arguments of the local attention:
        `sinks` [H], an extra logit of each head without a value, or profiles [H, r, E] of a bias by
        distance (q then has further features, see `ExplicitAttention`); `chosen`, the keys that
        this rank's queries may see.
        Raises ValueError if K does not divide H.
        """
        if self.channel.size == 1:
            return self._attend_here(q, k, v, mask, extras)
        if "chosen" in extras:  # launched first: it arrives while q, k and v are sent
            numbers = extras["chosen"].gathered(self.channel)
        split = HeadSplit.of(q.shape[_HEADS], k.shape[_HEADS], self.channel.size)
        length = q.shape[_SEQUENCE] * self.channel.size
        size = q.nbytes + k.nbytes + v.nbytes
        # One message needs tensors that differ only in the number of heads.
        same_head_size = q.shape[-1] == k.shape[-1] and k.shape == v.shape
        if size <= self.together_below_bytes and same_head_size:
            together = self._exchange((split.query, split.kv, split.kv), length, "qkv")
            q, k, v = exchanged(together, q, k, v)
        else:
            # Launch all three transfers before the wait for the first one.
            transfers = [
                launch(self._exchange((heads,), length, label), (x,))
                for x, heads, label in (
                    (q, split.query, "q"),
                    (k, split.kv, "k"),
                    (v, split.kv, "v"),
                )
            ]
            q, k, v = (arrive()[0] for arrive in transfers)
        if "chosen" in extras:
            extras["chosen"] = extras["chosen"]._replace(numbers=numbers.wait())
        out = self._attend_arrived(q, k, v, split, mask, extras)
        back = self._exchange((split.query,), length, "out")
        return exchanged(back, out, reverse=True)[0]

    def from_qkv(self, qkv: Tensor, *, mask: AttentionMask) -> Tensor:
        """Attend with packed q, k, v of equally many heads: [B, S/p, 3, H, d] -> [B, S/p, H, d]."""
        q, k, v = qkv.unbind(2)
        return self(q, k, v, mask=mask)

    def from_kv(self, q: Tensor, kv: Tensor, *, mask: AttentionMask) -> Tensor:
        """Attend with packed k and v: q [B, S/p, H, d], kv [B, S/p, 2, K, d] -> [B, S/p, H, d]."""
        k, v = kv.unbind(2)
        return self(q, k, v, mask=mask)

    def _make_exchange(
        self, heads: tuple[tuple[range, ...], ...], length: int, label: str
    ) -> Exchange:
        """Return the exchange that shards the heads of tensors and gathers S = `length` tokens."""
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
        split: HeadSplit,
        mask: AttentionMask,
        extras: dict[str, Any],
    ) -> Tensor:
        """Attend with this rank's heads: q [B, S, h, d], k and v [B, S, k, d] -> [B, S, h, d]."""
        # Without heads nothing is computed. But the exchange in backward is a collective, so its
        # inputs are joined to the result: backward then reaches it on this rank, too.
        if q.shape[_HEADS] == 0:
            return joined(q.new_empty(*q.shape[:-1], v.shape[-1]), q, k, v, extras.get("sinks"))
        own, kv = split.query[self.channel.rank], split.kv[self.channel.rank]
        repeated = split.repeated_kv(self.channel.rank)
        # If each KV head has its own choice of keys, select the choices of this rank's KV heads,
        # and repeat them like the KV heads.
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

    # The result is cached, and backward could not save an index made in inference mode.
    @torch.inference_mode(False)
    def _index(self, heads: tuple[int, ...], like: Tensor) -> Tensor:
        """Return indices of heads as a tensor on the device of `like`; copied there once."""
        if (heads, like.device) not in self._sent:
            index = pinned_memory.send(torch.tensor(heads), like.device)
            self._sent[heads, like.device] = index
        return self._sent[heads, like.device]

    def _attend_here(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, extras: dict[str, Any]
    ) -> Tensor:
        """Call the local attention, with v padded by zeros to the head size of k.

        Kernels need one head size for q, k and v; the padding is cut off the result.
        """
        size, lacking = v.shape[-1], k.shape[-1] - v.shape[-1]
        if lacking:
            v = F.pad(v, (0, lacking))
        out = self.local_attention(q, k, v, mask=mask, **extras)
        return out[..., :size] if lacking else out
