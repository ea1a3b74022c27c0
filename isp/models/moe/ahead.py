"""Modules of a block that are computed earlier than the model's own code calls them.

[Note: Computed ahead] A shared expert reads the tokens that a block gives to its experts, and most
blocks call it behind them. So it is computed where the experts are called: the tokens that are
sent are on their way meanwhile, or weights that are gathered. Backward comes to the experts first,
and the gradients of the tokens that they sent back travel while it goes through the shared expert.
The block's own call is given what there is. The trace shows which module that is. If full backward
hooks lie around that call, the gradient of the tokens goes through them, too.

N tokens, D and E features
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from isp.core.autograd import Function, once_differentiable
from isp.core.torch_private import has_full_backward_hooks
from isp.models.tracing.calls import Ahead, same_rows
from isp.models.tracing.forward_pass import ForwardPass

__all__ = ["ComputedAhead"]


class ComputedAhead:
    """A module [.., D] -> [.., E] that is computed ahead of its call, of each token by itself."""

    def __init__(
        self, module: nn.Module, ahead: Ahead, under_way: Callable[[str], ForwardPass]
    ) -> None:
        """`under_way` gives the pass in which the module of this name is computed."""
        self._name, self._dims = ahead
        self._module, self._forward, self._under_way = module, module.forward, under_way
        module.forward = self._called

    @property
    def _is_hooked(self) -> bool:
        """Whether it has full backward hooks."""
        return has_full_backward_hooks(self._module)

    def compute(self, tokens: Tensor) -> None:
        """Compute what the next call in this pass gives, of tokens [N, D]."""
        x, call = tokens if self._dims == 2 else tokens.unsqueeze(0), list[_Reached]()
        if self._is_hooked:
            x = _Hooked.apply(x, call)
        self._under_way(self._name).ahead[self._name] = tokens, self._forward(x), call

    def _called(self, x: Tensor) -> Tensor:
        tokens, y, call = self._under_way(self._name).ahead.pop(self._name, (x, None, []))
        if self._is_hooked and x.grad_fn is not None:
            call.append((get_gradient_edge(x), x.shape))
        if y is None:
            y = self._forward(x)
        elif not same_rows(x, tokens):
            raise RuntimeError(
                f"{self._name} was called with other tokens than the experts before it, but with"
                f" the same tokens when the model was traced, so isp computed it early. Register"
                f" hooks that change a module's input before isp.parallelize"
            )
        return y.reshape(*x.shape[:-1], y.shape[-1])


_Reached = tuple[GradientEdge, torch.Size]
"""Where what a module is called with lies in the graph, and its shape."""


class _Hooked(Function):
    """forward   x, of which a module is computed ahead of its `call`
    backward  dx by way of what it was called with, where full backward hooks may change it
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: list[_Reached]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        own = dx
        for at, shape in ctx.call:  # a function of torch's, which calls them
            begin = GradientEdge(*at.node.next_functions[0])
            (own,) = torch.autograd.grad([at], [begin], [dx.view(shape)])
        return own.view_as(dx), None
