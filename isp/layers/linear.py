"""One linear for every mode: y = x W^T + b, with the six tensors that may travel.

B batch, S sequence, I in features, O out features; x is [B, S, I], W is [O, I], y is [B, S, O].
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from isp.comm import Pending
from isp.comm.cargo import Cargo, Purpose
from isp.layers.init import MasterStream
from isp.layers.module import ParallelModule
from isp.layers.moves import Moves
from isp.layers.wanted import Wanted, wanted
from isp.layers.weight_gradients import AtOnce, WeightGradientRoute
from isp.parallel.layout import ParameterLayout
from isp.parallel.phase import Phase
from isp.weights.wp import WPCommunicator

__all__ = ["ParallelLinear"]


class _Linear(torch.autograd.Function):
    """forward   y = move_y(move_x(x) W^T + b)
    dgrad     dx = move_dx(move_dy(dy) W)
    wgrad     dW = move_dy(dy)^T move_x(x), db = sum of move_dy(dy), to the communicator

    [Note: Order of the gradients] The gradient that has to travel is computed first, so that
    computing the other hides its trip: dW first where the weights are gathered, dx first elsewhere.
    dW needs no weight, so in the first case the gather has that much longer to arrive.

    [Note: Autocast] It narrows the product in forward and does not reach backward: there the other
    factor takes the dtype of dy, and autograd widens what comes out.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ParallelLinear
    ) -> Tensor:
        moves, communicator = layer.moves, layer.communicator
        full_x = moves.x(x, cargo=Cargo(Purpose.ACTIVATION, layer.name, "x")).wait()
        with communicator.visit(layer, Phase.FORWARD, weight, bias) as full:
            y = F.linear(full_x, full.weight, full.bias)
        # A recompute gives another tensor for a saved weight: the parameter itself is the route's.
        ctx.layer, ctx.parameter = layer, weight if isinstance(weight, nn.Parameter) else None
        need_x, need_w, _, _ = ctx.needs_input_grad
        saved_x = x if moves.regather_x else full_x
        ctx.save_for_backward(saved_x if need_w else None, weight if need_x else None)
        return moves.y(y, cargo=Cargo(Purpose.ACTIVATION, layer.name, "y")).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: ParallelLinear = ctx.layer
        want_x, want_w, want_b = (wanted(ctx, index) for index in range(3))
        x, weight = ctx.saved_tensors
        moves, communicator = layer.moves, layer.communicator
        visit = communicator.visit(layer, Phase.BACKWARD, weight) if want_x else nullcontext()
        with visit as full:
            dy = moves.dy(dy, cargo=Cargo(Purpose.OUTPUT_GRADIENT, layer.name, "dy")).wait()
            x_arriving = Pending.ready(x)
            if moves.regather_x and want_w:
                again = Cargo(Purpose.REGATHERED_ACTIVATION, layer.name, "x")
                x_arriving = moves.x(x, cargo=again)

            def input_gradient() -> Pending | None:
                if full is None:
                    return None
                dx = dy @ full.weight.to(dy.dtype)  # [Note: Autocast]
                return moves.dx(dx, cargo=Cargo(Purpose.INPUT_GRADIENT, layer.name, "dx"))

            def weight_gradients() -> tuple[Tensor | None, Tensor | None]:
                dw = db = None
                if want_w:
                    flat_dy = dy.flatten(0, -2)
                    flat_x = x_arriving.wait().flatten(0, -2).to(dy.dtype)  # [Note: Autocast]
                    if ctx.parameter is not None and want_w is Wanted.FLOW:
                        dw = layer.weight_gradients(layer, ctx.parameter, flat_dy, flat_x)
                    else:
                        dw = flat_dy.T @ flat_x
                    if dw is not None:
                        returned = want_w is Wanted.VALUE
                        dw = communicator.grad_hook(dw, module=layer, returned=returned)
                if want_b:
                    db = dy.flatten(0, -2).sum(0)
                    returned = want_b is Wanted.VALUE
                    db = communicator.grad_hook(db, module=layer, is_bias=True, returned=returned)
                return dw, db

            if communicator.gathers_weights:
                dw, db = weight_gradients()
                dx = input_gradient()
            else:
                dx = input_gradient()
                dw, db = weight_gradients()
        return None if dx is None else dx.wait(), dw, db, None


class ParallelLinear(ParallelModule):
    """y = x W^T + b, its weight a shard and its activations moved as the mode wants.

    x [B, S, I] -> y [B, S, O], before and after the moves of x and y. A bias that is split like
    the outputs is added inside; one that is `bias_after_move` (replicated, because y is a sum over
    ranks) is added to the moved y.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        layout: ParameterLayout,
        *,
        communicator: WPCommunicator,
        moves: Moves,
        bias_layout: ParameterLayout | None = None,
        bias_after_move: bool = False,
        skip_bias_add: bool = False,
        weight_gradients: WeightGradientRoute | None = None,
        init_std: float = 0.02,
        tied_to: nn.Parameter | None = None,
        has_weight: bool = True,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.communicator = communicator
        self.moves = moves
        self.bias_after_move = bias_after_move
        self.skip_bias_add = skip_bias_add
        self.weight_gradients = weight_gradients or AtOnce()
        self.init_std = init_std
        if tied_to is None and has_weight:
            self.add_shard("weight", layout, device=device, dtype=dtype)
        else:
            self.register_parameter("weight", tied_to)
            self.layouts["weight"] = layout
        if bias_layout is None:
            self.register_parameter("bias", None)
        else:
            self.add_shard("bias", bias_layout, device=device, dtype=dtype)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x [B, S, I] -> y [B, S, O]; without the bias if that is to be added elsewhere.

        `weight` [O, I] is used in place of the layer's own, by modes that gather none; a parameter
        takes the layer's route of weight gradients, any other tensor autograd's. Raises ValueError
        if it is not of the shape of the layer's shard.
        """
        y = self.multiply(x, weight)
        if self.bias_after_move and self.bias is not None and not self.skip_bias_add:
            y = y + self.bias.to(y.dtype)  # [Note: Autocast]
        return y

    def multiply(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """`forward` without a bias that is added after the move of y."""
        weight = self._checked_weight(weight)
        inner_bias = None if self.bias_after_move or self.skip_bias_add else self.bias
        y: Tensor = _Linear.apply(x, weight, inner_bias, self)
        return y

    def _checked_weight(self, weight: Tensor | None) -> Tensor:
        if weight is None:
            if self.weight is None:
                raise ValueError(f"{self._title} has no weight of its own: call it with one")
            return self.weight
        expected = self.layouts["weight"].local_shape
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"{self._title} was called with a weight of shape {tuple(weight.shape)}, its shard"
                f" has shape {expected}"
            )
        if self.communicator.gathers_weights and weight is not self.weight:
            raise ValueError(f"{self._title}: in isp mode only a layer's own weight is gathered")
        return weight

    @property
    def _title(self) -> str:
        return self.name or type(self).__name__

    def initial_value(self, name: str, stream: MasterStream) -> Tensor:
        shape = self.layouts[name].global_shape
        return torch.zeros(shape) if name == "bias" else stream.normal(shape, self.init_std)
