"""The exchange of keys and values between context ranks, by a `Route`.

T tokens of this rank, R keys that it receives, L keys as its kernels see them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isp.core.attention.all_to_all import Arrival
from isp.core.attention.context_parallel.route import Route
from isp.core.comm import Channel, Pending
from isp.core.comm.tag import Tag

__all__ = ["KeyExchange", "wide"]


@dataclass(frozen=True)
class KeyExchange:
    """The transfer of keys and values [T, ..] to where they are needed, laid out there as [L, ..].

    Back, copies are summed where they were laid out, and what comes from the ranks where it
    belongs: both in float32 at least, in one order.
    """

    channel: Channel
    route: Route
    tag: Tag

    def go_out(self, xs: Sequence[Tensor]) -> Arrival:
        """Own rows to all who need them."""
        (x,), route = xs, self.route
        pending = self.channel.all_to_all_into(
            x.new_empty(sum(route.received), *x.shape[1:]),
            x.index_select(0, route.send),
            out_rows=route.received,
            in_rows=route.sent,
            tag=self.tag,
        )
        return lambda: (pending.wait().index_select(0, route.layout),)

    def go_back(self, ys: Sequence[Tensor]) -> Arrival:
        """Gradients to whose they are."""
        (y,) = ys
        pending = self.send_back(y)

        def arrive() -> tuple[Tensor]:
            total = y.new_zeros(self.route.num_tokens, *y.shape[1:], dtype=wide(y.dtype))
            self.add_to(total, pending.wait())
            return (total.to(y.dtype),)

        return arrive

    def send_back(self, y: Tensor) -> Pending:
        """Gradients [L, ..] on their way, summed over copies; `add_to` is for what arrives."""
        route, dtype = self.route, wide(y.dtype)
        total = y.index_select(0, route.first).to(dtype)
        for keys, rows in route.again:  # each key once
            total.index_add_(0, keys, y.index_select(0, rows).to(dtype))
        return self.channel.all_to_all_into(
            y.new_empty(len(route.send), *y.shape[1:]),
            total.to(y.dtype),
            out_rows=route.sent,
            in_rows=route.received,
            tag=self.tag,
        )

    def add_to(self, total: Tensor, received: Tensor) -> None:
        """Add what came back to `total` [T, ..], in the order of ranks."""
        sizes = self.route.sent
        messages = zip(self.route.send.split(sizes), received.split(sizes), strict=True)
        for keys, message in messages:  # each key once
            total.index_add_(0, keys, message.to(total.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """That in which numbers of `dtype` are added up."""
    return torch.promote_types(dtype, torch.float32)
