"""`Chosen`: the keys to which sparse attention lets each query attend.

B batch, S sequence, K KV heads, G = K or 1, n numbers of a query, R queries, C keys
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isp.comm import Channel, Pending
from isp.comm.tag import Purpose, Tag

__all__ = ["Chosen", "seen_by"]


class Chosen(NamedTuple):
    """Numbers of keys, counted within the query's document; what a mask hides stays hidden."""

    numbers: Tensor
    """[B, S, G, n], int32; -1 and what lies behind the last key: none."""
    run: int = 1
    """Keys for which a number stands: number i for those from i * run on."""

    def gathered(self, channel: Channel) -> Pending:
        """The numbers of all ranks' queries, [B, S/p, G, n] -> [B, S, G, n]."""
        return channel.all_gather(self.numbers, 1, tag=Tag(Purpose.HEADS, tensor="indices"))


def seen_by(numbers: Tensor, run: int, num_keys: int) -> Tensor:
    """Whether queries with these numbers [R, G, n] see each of the first C keys: [G, 1, R, C]."""
    runs = -(-num_keys // run)
    outside = (numbers < 0) | (numbers >= runs)
    places = numbers.masked_fill(outside, runs).long().transpose(0, 1)  # [G, R, n]
    seen = torch.zeros(*places.shape[:2], runs + 1, dtype=torch.bool, device=numbers.device)
    seen = seen.scatter_(-1, places, True)[..., :runs].repeat_interleave(run, -1)
    return seen[..., :num_keys].unsqueeze(1)
