"""The positions of the tokens of a forward, and the lengths of the documents in which they lie.

B batch, S sequence, S' the tokens of this rank, D hidden size, d size of a head
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import pinned_memory
from isp.core.layers.rank_layers import RankLayers
from isp.core.torch_private import tree_map

__all__ = [
    "at_positions",
    "by_document",
    "current_positions",
    "give_positions",
    "token_lengths",
]

_positions: ContextVar[Tensor] = ContextVar("positions")


def current_positions() -> Tensor:
    """Those of the tokens of this rank, [B, S'], each counted in its document.

    Raises LookupError outside of a parallelised model's forward.
    """
    return _positions.get()


@contextmanager
def at_positions(positions: Tensor) -> Iterator[None]:
    """Tokens of forwards in this context are at `positions`."""
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


def give_positions(model: nn.Module) -> None:
    """Let tables of positions look up those of the forward, not a count of the rank's tokens.

    A table that counts tokens is known by its optional argument `position_ids`. The argument for
    the number of cached tokens has another name in each few versions of transformers.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            takes = inspect.signature(type(module).forward).parameters
            if "position_ids" in takes and takes["position_ids"].default is None:
                setattr(module, "forward", partial(_look_up, module.forward))  # noqa: B010


def _look_up(table: Callable[..., Tensor], tokens: Tensor, *_: Any, **__: Any) -> Tensor:
    """[B, S', D]; classes of transformers take positions of one sequence, [S']."""
    positions = current_positions()
    return table(tokens, position_ids=positions.flatten()).view(*positions.shape, -1)


def token_lengths(positions: Tensor, cu_seqlens: Tensor | None, layers: RankLayers) -> Tensor:
    """The length of the document in which each token of this rank lies, as `positions` [B, S'].

    All positions, [B, S], where the mode has a rank compute them. Without `cu_seqlens` a row is one
    document.
    """
    parts = layers.tensor.size if layers.mode.slices_batch else 1
    if cu_seqlens is None:
        return torch.full_like(positions, positions.shape[1] * parts)
    ranks = layers.sequence or SequenceRanks.by_heads(layers.tensor)
    lengths = cu_seqlens.diff().long()
    each = lengths.repeat_interleave(lengths).view(len(positions), -1)  # [B, S]
    (each,) = ranks.arranged([each], cu_seqlens)
    own = each.chunk(parts, 1)[layers.tensor.rank if parts > 1 else 0]
    return pinned_memory.send(own.contiguous(), positions.device)


def by_document(
    limit: int, lengths: Callable[[], Tensor | None], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """`forward`, which makes angles [B, S', d] by whether the largest position reaches `limit`.

    Rotary positions that treat long rows otherwise (longrope): the result makes those of each token
    by the length of its document, as if that were alone, if `lengths` gives them, [B, S'].
    """

    def angles(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        of_tokens = lengths()
        if of_tokens is None:
            return forward(x, position_ids, *args, **kwargs)
        far = torch.full_like(position_ids[..., :1], limit)
        short = forward(x, position_ids.clamp(max=limit - 1), *args, **kwargs)
        long = forward(x, torch.cat([position_ids, far], -1), *args, **kwargs)
        is_long = (of_tokens > limit).unsqueeze(-1)
        return tree_map(lambda a, b: torch.where(is_long, b[:, :-1], a), short, long)

    return angles
