"""Additions to torch's autograd: cheaper custom functions, and hooks that do not leak."""

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
    """torch's autograd function without support for `torch.func`, whose checks slow each `apply`.

    None of ISP's functions supports these transforms; torch still refuses them, by an assertion.
    """

    apply = function_apply


def once_differentiable(backward: Callable[..., R]) -> Callable[..., R]:
    """Decorate the backward of an autograd function, so that differentiating it raises.

    torch's decorator of this name checks all tensors in every call, which costs time. It is needed
    only in a backward with `create_graph`, in which grad mode is on: only then is it called here.
    """
    guarded: Callable[..., R] = function.once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *gradients: Any) -> R:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return call


def writable(x: Tensor) -> Tensor:
    """Return x as a tensor that is not a view, so that the caller of a forward may write into it.

    torch raises if code writes into a view that a custom function returned, and `F.linear` and
    `F.embedding` return views. Memory and version counter stay shared, so autograd still detects
    that a saved tensor was written into.
    """
    # The result of `detach` does not count as a view. Other tensors are returned as they are,
    # because `detach` takes time in every forward.
    return x.detach() if is_view(x) else x


class _Joined(Function):
    """The autograd function of `joined`."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in others]
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        # The zeros are made here, so that until backward only shapes are kept.
        zeros = (torch.zeros(shape, dtype=dtype, device=at) for shape, dtype, at in ctx.like)
        return d_out, *zeros


def joined(out: Tensor, *others: Tensor | None) -> Tensor:
    """Return `out` with a backward that also gives `others` gradients, of zeros.

    A rank without tokens, heads or earlier states uses nothing of what an exchange returns. Its
    backward must reach the exchange nevertheless: the other ranks wait for it there.
    """
    y: Tensor = _Joined.apply(out, *(x for x in others if x is not None and x.requires_grad))
    return y


def after_gradients(
    owner: T, act: Callable[[T, Any], None], parameters: Iterable[nn.Parameter]
) -> list[RemovableHandle]:
    """Register hooks that call `act(owner, parameter)` after a gradient has been accumulated.

    The hooks refer to `owner` weakly: Python's garbage collector cannot look into torch's list of
    hooks, so with a strong reference the owner and its weights would never be freed.
    """
    held = weakref.ref(owner)

    def call(parameter: Tensor) -> None:
        if (found := held()) is not None:
            act(found, parameter)

    return [parameter.register_post_accumulate_grad_hook(call) for parameter in parameters]
