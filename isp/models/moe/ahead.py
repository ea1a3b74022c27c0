"""`ComputedAhead`: compute a shared expert before its block calls it, to hide transfers.

It is computed when the routed experts are called, while their tokens or weights are in flight. See
[Note: Computed ahead] in docs/design/notes/experts.md.

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
    """Computes a module [.., D] -> [.., E] before its call, and returns the result at the call.

    The module's result for a token must not depend on other tokens.
    """

    def __init__(self, module: nn.Module, ahead: Ahead, position: Position) -> None:
        """Prepare to compute `module`; its forward must get the wrapper `wrap`."""
        self._name, self._dims = ahead
        self._module, self._position = module, position
        self._forward: ModuleForward
        """The module's forward without this wrapper; `wrap` sets it."""

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        """Return a forward that returns the result computed ahead; the wrapper `Wrap.AHEAD`."""
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
        # Store the result in the pass, because a recompute is another pass and computes another
        # result.
        self._position.current(self._name).ahead[self._name] = tokens, self._forward(x), call

    def _called(self, x: Tensor) -> Tensor:
        """Return the module's result for x [.., D]: computed ahead, or else now.

        Raises RuntimeError if the result was computed ahead from other tokens than x.
        """
        now = self._position.current(self._name)
        tokens, y, call = now.ahead.pop(self._name, (x, None, []))
        if self._is_hooked and x.grad_fn is not None:
            # Tell `_Hooked` the edge of the graph that x comes from: it runs the module's full
            # backward hooks there.
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
"""The edge in the graph of the tensor that a module was called with, and the tensor's shape."""


class _Hooked(Function):
    """The input of a module computed ahead, as an autograd node that runs the call's hooks.

    forward   x, from which the module is computed before its `call`
    backward  dx, after the full backward hooks at the input of that call, which may change it
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: list[_Reached]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        own = dx
        # torch runs full backward hooks in a node that it puts before a hooked module's input. The
        # backward of the call does not reach that node, so run it alone.
        for at, shape in ctx.call:
            begin = GradientEdge(*at.node.next_functions[0])
            (own,) = torch.autograd.grad([at], [begin], [dx.view(shape)])
        return own.view_as(dx), None
