"""The gradients a backward pass wants of a custom function: not all that could be computed."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

__all__ = ["Wanted", "wanted"]


class Wanted(IntEnum):
    """The use of an input's gradient; false if nobody wants it."""

    NOTHING = 0
    """It is not asked for."""
    VALUE = 1
    """`torch.autograd.grad` returns it: it has to be there when the function's backward ends."""
    FLOW = 2
    """It flows on, to the function that made the input or into the sum that the leaf keeps."""


def wanted(ctx: Any, index: int) -> Wanted:
    """Say what the backward pass under way wants of input `index` of `ctx`'s function.

    `ctx.needs_input_grad` only says what could have a gradient; `autograd.grad(y, x)` and
    `backward(inputs=[x])` leave out the rest. The inputs before `index` have to be tensors.
    """
    if not ctx.needs_input_grad[index]:
        return Wanted.NOTHING
    target, _ = ctx.next_functions[index]
    try:
        runs = torch._C._will_engine_execute_node(target)
    except RuntimeError:  # torch's answer for a leaf whose gradient `autograd.grad` returns
        return Wanted.VALUE
    return Wanted.FLOW if runs else Wanted.NOTHING
