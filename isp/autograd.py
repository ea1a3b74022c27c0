"""`once_differentiable`: torch's, at no cost where nobody differentiates twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.autograd import function

__all__ = ["once_differentiable"]

R = TypeVar("R")


def once_differentiable(backward: Callable[..., R]) -> Callable[..., R]:
    """The backward of an autograd function, whose own gradients are refused.

    torch's decorator looks at all tensors of every call and switches gradients off. Only a pass
    that makes a graph of itself (`create_graph`) has gradients on, and needs that.
    """
    guarded: Callable[..., R] = function.once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *gradients: Any) -> R:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return call
