"""Rotary positions that treat long rows otherwise (longrope): each document as if it were alone.

B batch, S sequence, S' the tokens of this rank, d size of a head
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from isp.attention.sequence import SequenceRanks
from isp.comm import host_memory
from isp.layers.factory import LayerFactory
from isp.models.forward_pass import ForwardPass

__all__ = ["by_document", "token_lengths"]


def token_lengths(positions: Tensor, cu_seqlens: Tensor | None, layers: LayerFactory) -> Tensor:
    """The length of the document in which each token of this rank lies, as `positions` [B, S'].

    All positions, [B, S], where the mode has a rank compute them. Without `cu_seqlens` a row is one
    document.
    """
    parts = layers.tensor.size if layers.mode.facts.slices_batch else 1
    if cu_seqlens is None:
        return torch.full_like(positions, positions.shape[1] * parts)
    ranks = layers.sequence or SequenceRanks.by_heads(layers.tensor)
    lengths = cu_seqlens.diff().long()
    each = lengths.repeat_interleave(lengths).view(len(positions), -1)  # [B, S]
    (each,) = ranks.arranged([each], cu_seqlens)
    own = each.chunk(parts, 1)[layers.tensor.rank if parts > 1 else 0]
    return host_memory.send(own.contiguous(), positions.device)


def by_document(
    limit: int, under_way: Callable[[str], ForwardPass], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """`forward`, which makes angles [B, S', d] by whether the largest position reaches `limit`.

    The result makes those of each token by the length of its document, if the forward that is
    under way knows it.
    """

    def angles(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        of_tokens = under_way("rotary positions").masks.lengths
        if of_tokens is None:
            return forward(x, position_ids, *args, **kwargs)
        far = torch.full_like(position_ids[..., :1], limit)
        short = forward(x, position_ids.clamp(max=limit - 1), *args, **kwargs)
        long = forward(x, torch.cat([position_ids, far], -1), *args, **kwargs)
        is_long = (of_tokens > limit).unsqueeze(-1)
        return tree_map(lambda a, b: torch.where(is_long, b[:, :-1], a), short, long)

    return angles
