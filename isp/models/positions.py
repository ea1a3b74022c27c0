"""The positions of the tokens of a forward, for modules that would count them by themselves.

B batch, S' the tokens of this rank, D hidden size
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn

__all__ = ["at_positions", "current_positions", "give_positions"]

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
    """Let tables of positions look up those of the forward, not a count of the rank's tokens."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            takes = inspect.signature(type(module).forward).parameters
            if "position_ids" in takes and "past_key_values_length" in takes:
                setattr(module, "forward", partial(_look_up, module.forward))  # noqa: B010


def _look_up(table: Callable[..., Tensor], tokens: Tensor, *_: Any, **__: Any) -> Tensor:
    """[B, S', D]; classes of transformers take positions of one sequence, [S']."""
    positions = current_positions()
    return table(tokens, position_ids=positions.flatten()).view(*positions.shape, -1)
