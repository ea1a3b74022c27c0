"""`isp.attention(q, k, v)`: attention that a user's own model calls.

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
    """A bias of logits by the distance, in tokens, from a key to a later query."""

    states: Tensor
    """Features of each query and head, [B, S', H, r]."""
    profiles: Tensor
    """Weights [r, E]: `states @ profiles` is the bias at distances 0 to E - 1; 0 beyond."""
    sinks: Tensor | None = None
    """An extra logit of each query and head, without a value, [B, S', H]; None: none."""


class AttentionOptions(NamedTuple):
    """The options of one layer's attention."""

    causal: bool = True
    """A token sees only tokens up to its own position."""
    window: int | None = None
    """Number of tokens that a token sees, including itself; None: all."""
    scale: float | None = None
    """Factor of the logits; None: 1 / sqrt(d)."""
    softcap: float | None = None
    """c turns logits x into c tanh(x / c); None: no cap."""
    sinks: Tensor | None = None
    """An extra logit of each head, without a value, [H]; None: none."""
    chunk: int | None = None
    """Tokens of an attention chunk: documents are cut into chunks, whose tokens see only their own
    chunk; None: not cut."""
    chosen: Chosen | None = None
    """The keys that each query may see; None: all."""
    profiles: Tensor | None = None
    """`Relative.profiles` [r, E]; q's last features are then `Relative.states`, followed by
    `Relative.sinks` if there are any. None: no bias by distance."""

    def of_heads(self, num_heads: int) -> Tensor | None:
        """Return the `sinks` argument of `ExplicitAttention`: sinks [H] or profiles [H, r, E].

        The profiles are equal for all heads, so they are expanded to `num_heads`.
        """
        return self.sinks if self.profiles is None else self.profiles.expand(num_heads, -1, -1)


Attend = Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""The signature of attention as a user's model calls it.

q [B, S', H, d], k [B, S', K, d], v [B, S', K, e] -> [B, S', H, e].
"""


_attend: ContextVar[Attend | None] = ContextVar("attend", default=None)
"""The function that computes calls of `attention`; set while a parallelized model runs."""


@contextmanager
def attend_by(attend: Attend) -> Iterator[None]:
    """Let `attend` compute all calls of `attention` in this context."""
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
    """Attend, in a user's own model; `isp.parallelize` distributes the call over the ranks.

    q [B, S, H, d], k [B, S, K, d], v [B, S, K, e] -> [B, S, H, e]; K divides H, e is at most d.
    `window` is in tokens and includes the query's own; `scale` multiplies the logits (None:
    1 / sqrt(d)); `relative` is a bias by distance. Outside of a parallelized model, each row is one
    document.
    """
    attend = _attend.get()
    options = AttentionOptions(causal, window, scale)
    if relative is not None:
        # States become features of q, so that one exchange sends q and states to the rank that
        # computes a head. The default scale is set here, from the head size of q without them.
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
    # Return a copy: kernels save their output for backward, and a model may write into the result.
    return local(q, k, v, mask=AttentionMask(causal=causal, window=window)).clone()


@lru_cache(maxsize=64)
def _alone(
    device: torch.device, dtype: torch.dtype, head_dim: int, scale: float | None
) -> LocalAttention:
    """Return attention for one process; cached, because choosing a backend takes timings."""
    local = make_local_attention(device=device, dtype=dtype, head_dim=head_dim, scale=scale)
    return DistributedAttention(local, Channel.solo())
