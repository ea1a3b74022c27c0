"""Positions of the tokens of a forward, and lengths of the documents that contain them.

B batch, S sequence, S' tokens of this rank, D hidden size, d head size
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
from isp.models.forwards import ModuleForward, Wrapper, set_forward

__all__ = [
    "at_positions",
    "by_document",
    "current_positions",
    "give_positions",
    "token_lengths",
]

_positions: ContextVar[Tensor] = ContextVar("positions")
"""The positions that `at_positions` has set."""


def current_positions() -> Tensor:
    """Return the position of each token of this rank in its document, [B, S'].

    Raises LookupError outside of the forward of a parallelized model.
    """
    return _positions.get()


@contextmanager
def at_positions(positions: Tensor) -> Iterator[None]:
    """Set the result of `current_positions` in this context."""
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


def give_positions(model: nn.Module) -> None:
    """Make tables of learned positions look up `current_positions`, in place.

    Without this, a table of transformers counts positions from the tokens that it is given, which
    on a rank are only a part of the sequence. It is recognized by its optional argument
    `position_ids`; its other arguments are renamed every few versions of transformers, so they are
    not looked at.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            takes = inspect.signature(type(module).forward).parameters
            if "position_ids" in takes and takes["position_ids"].default is None:
                # The model is traced after this, so the trace sees this forward as the module's own
                # code.
                set_forward(module, partial(_look_up, module.forward))


def _look_up(table: Callable[..., Tensor], tokens: Tensor, *_: Any, **__: Any) -> Tensor:
    """Look up the current positions of all tokens in a table of positions, [B, S', D]."""
    positions = current_positions()
    # These tables of transformers take the positions of one sequence, [S'], so join the rows.
    return table(tokens, position_ids=positions.flatten()).view(*positions.shape, -1)


def token_lengths(positions: Tensor, cu_seqlens: Tensor | None, layers: RankLayers) -> Tensor:
    """Return the length of the document that contains each token, in the shape of `positions`.

    positions [B, S'] are those of this rank's tokens, or [B, S] if a rank computes with the
    positions of all tokens. `cu_seqlens`: starts of the documents, [documents + 1]; None: each row
    is one document.
    """
    parts = layers.tensor.size if layers.mode.slices_batch else 1
    if cu_seqlens is None:
        return torch.full_like(positions, positions.shape[1] * parts)
    ranks = layers.sequence or SequenceRanks.by_heads(layers.tensor)
    lengths = cu_seqlens.diff().long()
    each = lengths.repeat_interleave(lengths).view(len(positions), -1)  # [B, S]
    # Put the lengths in the order in which the ranks have their tokens.
    (each,) = ranks.arranged([each], cu_seqlens)
    own = each.chunk(parts, 1)[layers.tensor.rank if parts > 1 else 0]
    return pinned_memory.send(own.contiguous(), positions.device)


def by_document(limit: int, lengths: Callable[[], Tensor | None]) -> Wrapper:
    """Return a wrapper of a longrope forward that chooses its factors by each token's document.

    The module's own forward computes the angles [B, S', d] of a whole row with its long factors if
    the largest position in the row reaches `limit`, else with its short ones. In a packed row or on
    a part of a sequence, that would depend on other documents or on the rank. `lengths` returns
    each token's document length [B, S'], or None to run the forward unchanged.
    """

    def wrap(inner: ModuleForward) -> ModuleForward:
        def angles(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            of_tokens = lengths()
            if of_tokens is None:
                return inner(x, position_ids, *args, **kwargs)
            far = torch.full_like(position_ids[..., :1], limit)
            # Positions are below the limit where `short` is chosen, so the clamp changes none.
            short = inner(x, position_ids.clamp(max=limit - 1), *args, **kwargs)
            # One more position, at the limit, makes the forward use its long factors.
            long = inner(x, torch.cat([position_ids, far], -1), *args, **kwargs)
            is_long = (of_tokens > limit).unsqueeze(-1)
            return tree_map(lambda a, b: torch.where(is_long, b[:, :-1], a), short, long)

        return angles

    return wrap
