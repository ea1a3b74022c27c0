"""`isp.attention(q, k, v)`: the call by which a model of one's own attends.

B batch, S sequence (S' the tokens of a rank), H heads, K KV heads, d and e sizes of heads
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from isp.attention.local import make_local_attention
from isp.attention.mask import AttentionMask

__all__ = ["Attend", "attend_by", "attention"]


class Attend(Protocol):
    """Attention, as models that are not isp's ask for it."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [B, S', H, d], k [B, S', K, d], v [B, S', K, e] -> [B, S', H, e].

        `softcap` c makes c tanh(x / c) of logits x; `sinks` [H] are logits without values.
        """


_attend: ContextVar[Attend | None] = ContextVar("attend", default=None)
"""Where calls go; set while the code of a parallelised model runs."""


@contextmanager
def attend_by(attend: Attend | None) -> Iterator[None]:
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
) -> Tensor:
    """Attention for a model of one's own, which `isp.parallelize` spreads over the ranks.

    q [B, S, H, d], k [B, S, K, d], v [B, S, K, e] -> [B, S, H, e]; K divides H, e is at most d.
    `window` in tokens, the own included; `scale` of the logits, None: 1 / sqrt(d). Outside of a
    parallelised model it is plain attention over each row, without packed documents.
    """
    attend = _attend.get()
    if attend is not None:
        return attend(q, k, v, causal=causal, window=window, scale=scale)
    local = make_local_attention(device=q.device, dtype=q.dtype, scale=scale)
    return local(q, k, v, mask=AttentionMask(causal=causal, window=window))
