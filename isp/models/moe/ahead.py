"""Modules of a block that are computed earlier than the model's own code calls them.

[Note: Computed ahead] A shared expert reads the same tokens as the routed experts of its block, and
most blocks call it after them. It is computed where the experts are called instead, so that it
overlaps with the transfers of their tokens or weights. Backward reaches the experts first, and the
gradients of the tokens are sent back while it runs through the shared expert. The block's own call
returns the result that is there. The trace shows which module that is. If full backward hooks are
registered around that call, the gradient of the tokens passes through them, too.

N tokens, D and E features
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from isp.core.autograd import Function, once_differentiable
from isp.core.torch_private import has_full_backward_hooks
from isp.models.forwards import ModuleForward
from isp.models.tracing.calls import Ahead, same_rows
from isp.models.tracing.position import Position

__all__ = ["ComputedAhead"]


class ComputedAhead:
    """A module [.., D] -> [.., E] that acts on each token alone and is computed before its call."""

    def __init__(self, module: nn.Module, ahead: Ahead, position: Position) -> None:
        """Prepare to compute `module`, once its forward has the wrapper `wrap`."""
        self._name, self._dims = ahead
        self._module, self._position = module, position
        self._forward: ModuleForward
        """The module's forward without this wrapper; `wrap` sets it."""

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        """Return a forward that gives what was computed ahead; the wrapper `Wrap.AHEAD`."""
        self._forward = inner
        return self._called

    @property
    def _is_hooked(self) -> bool:
        """True if the module has full backward hooks."""
        return has_full_backward_hooks(self._module)

    def compute(self, tokens: Tensor) -> None:
        """Compute the result of the module's next call in this pass, from tokens [N, D]."""
        x, call = tokens if self._dims == 2 else tokens.unsqueeze(0), list[_Reached]()
        if self._is_hooked:
            x = _Hooked.apply(x, call)
        # Kept in the pass: a recompute is a pass of its own, and computes its own result.
        self._position.current(self._name).ahead[self._name] = tokens, self._forward(x), call

    def _called(self, x: Tensor) -> Tensor:
        """Return the result for x [.., D]: the one computed ahead if there is one, else a new one.

        Raises RuntimeError if that was computed from other tokens than x.
        """
        now = self._position.current(self._name)
        tokens, y, call = now.ahead.pop(self._name, (x, None, []))
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
"""The place in the graph of the tensor that a module is called with, and its shape."""


class _Hooked(Function):
    """forward   x, from which a module is computed before its `call`
    backward  dx, passed through the input of that call, whose full backward hooks may change it
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: list[_Reached]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        own = dx
        # The input of a hooked module comes from a node of torch that runs the hooks in backward:
        # run that node alone.
        for at, shape in ctx.call:
            begin = GradientEdge(*at.node.next_functions[0])
            (own,) = torch.autograd.grad([at], [begin], [dx.view(shape)])
        return own.view_as(dx), None
