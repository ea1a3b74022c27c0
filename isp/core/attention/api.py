"""`isp.attention(q, k, v)`: the call by which your own model attends.

B batch, S sequence (S' the tokens of a rank), H heads, K KV heads, d and e sizes of heads
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from isp.core.attention.backends.explicit import ExplicitAttention
from isp.core.attention.local import LocalAttention, make_local_attention
from isp.core.attention.mask import AttentionMask, Chosen
from isp.core.attention.ulysses import DistributedAttention
from isp.core.comm import Channel

__all__ = ["Attend", "AttentionOptions", "Relative", "attend_by", "attention"]


class Relative(NamedTuple):
    """What is added to the logits of keys by how many tokens they lie before a query."""

    states: Tensor
    """[B, S', H, r], of each query and head."""
    profiles: Tensor
    """[r, E]: `states @ profiles` is added at the distances 0 to E - 1, beyond them nothing."""
    sinks: Tensor | None = None
    """[B, S', H], a further logit of each query and head, without a value."""


class AttentionOptions(NamedTuple):
    """How one layer attends."""

    causal: bool = True
    """Whether a token sees only those up to its own place."""
    window: int | None = None
    """Tokens that one sees, its own included; None: all."""
    scale: float | None = None
    """Of the logits; None: 1 / sqrt(d)."""
    softcap: float | None = None
    """c makes c tanh(x / c) of logits x; None: they stay."""
    sinks: Tensor | None = None
    """[H], a further logit of each head, without a value."""
    chunk: int | None = None
    """Tokens of the chunks that a document is cut into, each of which sees itself; None: one."""
    chosen: Chosen | None = None
    """The keys that each query may see; None: all."""
    profiles: Tensor | None = None
    """[r, E] of `Relative`, whose states, and sinks if it has any, are the last features of q."""

    def of_heads(self, num_heads: int) -> Tensor | None:
        """What each head has of its own, as `ExplicitAttention` takes it for sinks."""
        return self.sinks if self.profiles is None else self.profiles.expand(num_heads, -1, -1)


Attend = Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""Attention, as models that are not isp's ask for it.

q [B, S', H, d], k [B, S', K, d], v [B, S', K, e] -> [B, S', H, e].
"""


_attend: ContextVar[Attend | None] = ContextVar("attend", default=None)
"""Where calls go; set while the code of a parallelised model runs."""


@contextmanager
def attend_by(attend: Attend) -> Iterator[None]:
    """Calls of `attention` in this context go to `attend`."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    relative: Relative | None = None,
) -> Tensor:
    """Attention for your own model, which `isp.parallelize` spreads over the ranks.

    q [B, S, H, d], k [B, S, K, d], v [B, S, K, e] -> [B, S, H, e]; K divides H, e is at most d.
    `window` in tokens, the own included; `scale` of the logits, None: 1 / sqrt(d); `relative`: a
    bias by distance. Outside of a parallelised model it is plain attention over each row, without
    packed documents.
    """
    attend = _attend.get()
    options = AttentionOptions(causal, window, scale)
    if relative is not None:
        options = options._replace(scale=scale or q.shape[-1] ** -0.5, profiles=relative.profiles)
        sinks = [] if relative.sinks is None else [relative.sinks.unsqueeze(-1)]
        q = torch.cat([q, relative.states, *sinks], -1)
    if attend is not None:
        return attend(q, k, v, options)
    if relative is not None:
        mask = AttentionMask(causal=causal, window=window)
        explicit = ExplicitAttention(scale=options.scale)
        return explicit(q, k, v, mask=mask, sinks=options.of_heads(q.shape[2]))
    local = _alone(q.device, q.dtype, q.shape[-1], scale)
    # A copy, as kernels save what they give, and a model may write into it.
    return local(q, k, v, mask=AttentionMask(causal=causal, window=window)).clone()


@lru_cache(maxsize=64)
def _alone(
    device: torch.device, dtype: torch.dtype, head_dim: int, scale: float | None
) -> LocalAttention:
    """Chosen once: what is fastest on a device is found by trying."""
    local = make_local_attention(device=device, dtype=dtype, head_dim=head_dim, scale=scale)
    return DistributedAttention(local, Channel.solo())
