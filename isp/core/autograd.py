"""Around torch's autograd: its functions at less cost, its hooks without a leak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import function
from torch.utils.hooks import RemovableHandle

from isp.core.torch_private import function_apply, is_view

__all__ = ["Function", "after_gradients", "joined", "once_differentiable", "writable"]

R = TypeVar("R")
T = TypeVar("T")


class Function(function.Function):
    """torch's own, whose `apply` first looks for the transforms of `torch.func` and their tensors.

    None of ours can be transformed so; torch still refuses to, by an assertion of its own.
    """

    apply = function_apply


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


def writable(x: Tensor) -> Tensor:
    """The same tensor and no view, as which a forward returns what its caller may write into.

    torch refuses to have a view that a custom function returned written into, and `F.linear` and
    `F.embedding` give views. The memory and the count of its changes stay shared: autograd still
    sees that something saved was written into.
    """
    return x.detach() if is_view(x) else x


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in others]
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=at) for shape, dtype, at in ctx.like)
        return d_out, *zeros


def joined(out: Tensor, *others: Tensor | None) -> Tensor:
    """`out`, whose backward gives `others` a gradient of zeros.

    A rank without tokens, heads or earlier states computes nothing from an exchange. Its backward
    has to reach that exchange all the same: the other ranks wait for it there.
    """
    y: Tensor = _Joined.apply(out, *(x for x in others if x is not None and x.requires_grad))
    return y


def after_gradients(
    owner: T, act: Callable[[T, Any], None], parameters: Iterable[nn.Parameter]
) -> list[RemovableHandle]:
    """Call `act(owner, parameter)` for each parameter whose gradient a pass has added up.

    Only as long as `owner` lives: torch keeps hooks where Python's collector does not see that they
    lead back to the parameters, so an owner that they held would never be freed, nor its weights.
    """
    held = weakref.ref(owner)

    def call(parameter: Tensor) -> None:
        if (found := held()) is not None:
            act(found, parameter)

    return [parameter.register_post_accumulate_grad_hook(call) for parameter in parameters]
