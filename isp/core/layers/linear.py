"""The linear of every mode, y = x W^T + b.

B batch, S sequence, N tokens, I in features, O out features; x is [B, S, I], W is [O, I], y is
[B, S, O].

Six tensors may be communicated: x, w and y in forward, dy, dx and dw in backward.

    mode   column linear                                row linear
    mtp    dx: all-reduce                               y: all-reduce
    msp    x: all-gather on S, kept; dx: r.-scatter     y: reduce-scatter on S; dy: all-gather
    fsp    as msp; x is gathered again in backward      as msp
    isp    w: all-gather; dw: reduce-scatter            the same

The communicator (`isp.core.weights`) moves w and dw; `Moves` holds the collectives of the
activations and their gradients.

Source: Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022), InternEvo (Chen et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.autograd import Function, once_differentiable, writable
from isp.core.comm import Channel, Pending
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.module import ParallelModule
from isp.core.mesh import Mode
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.phase import Phase
from isp.core.torch_private import will_run
from isp.core.weights.wp_communicator import ShardedLayer, WPCommunicator

__all__ = [
    "LinearLayer",
    "Moves",
    "NeedsGrad",
    "ParallelLinear",
    "Role",
    "in_dtype",
    "moves_for",
    "multiply",
    "needs_grad",
]

Collective = Callable[..., Pending]
"""A collective, launched by a call with a tensor and its `tag`."""


def _stay(x: Tensor, *, tag: Tag) -> Pending:
    """Return x as it is: the collective of an activation that is not communicated."""
    return Pending.ready(x)


class Role(Enum):
    """The split of a linear's features: `COLUMN` splits its outputs, `ROW` its inputs."""

    COLUMN = auto()
    ROW = auto()


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The collectives of a linear's input, its output and their gradients."""

    x: Collective = _stay
    """Collective of the input, run before the product."""
    y: Collective = _stay
    """Collective of the output."""
    dy: Collective = _stay
    """Collective of the output's gradient; the dual of `y`."""
    dx: Collective = _stay
    """Collective of the input's gradient; the dual of `x`."""
    regather_x: bool = False
    """Save x before its collective and run that again in backward: less memory, more traffic."""


def moves_for(mode: Mode, role: Role, tensor: Channel, *, sequence_dim: int = 1) -> Moves:
    """Return the collectives over `tensor` that the table above gives a linear of `role`."""
    if tensor.size == 1:
        return Moves()
    gather = partial(tensor.all_gather, dim=sequence_dim)
    reduce_scatter = partial(tensor.reduce_scatter, dim=sequence_dim)
    match mode, role:
        case Mode.ISP, _:
            return Moves()
        case Mode.MTP, Role.COLUMN:
            return Moves(dx=tensor.all_reduce)
        case Mode.MTP, Role.ROW:
            return Moves(y=tensor.all_reduce)
        case Mode.MSP | Mode.FSP, Role.COLUMN:
            return Moves(x=gather, dx=reduce_scatter, regather_x=mode is Mode.FSP)
        case Mode.MSP | Mode.FSP, Role.ROW:
            return Moves(y=reduce_scatter, dy=gather)
    raise AssertionError((mode, role))


class NeedsGrad(IntEnum):
    """The use that the running backward pass has for an input's gradient; false if none."""

    NOTHING = 0
    """The gradient is not needed."""
    VALUE = 1
    """`torch.autograd.grad` returns the gradient, so it must exist when the backward returns."""
    FLOW = 2
    """The gradient goes to the function that made the input, or is accumulated in the leaf."""


def needs_grad(ctx: Any, count: int) -> list[NeedsGrad]:
    """Return the use of the gradient of each of the first `count` inputs, in the running backward.

    `ctx.needs_input_grad` only says which inputs could have a gradient; `autograd.grad(y, x)` and
    `backward(inputs=[x])` compute fewer. All of the inputs but the last have to be tensors.
    """
    found, nodes = [], ctx.next_functions
    for index, needed in enumerate(ctx.needs_input_grad[:count]):
        try:
            runs = needed and will_run(nodes[index][0])
            found.append(_FLOW if runs else _NOTHING)
        except RuntimeError:  # torch raises for a leaf whose gradient `autograd.grad` returns
            found.append(_VALUE)
    return found


# Constants: Python 3.11 takes as long to look up an enum's member as to call a function.
_NOTHING, _VALUE, _FLOW = NeedsGrad
_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD
_X, _Y = (Purpose.ACTIVATION, "x"), (Purpose.ACTIVATION, "y")
_DX, _DY = (Purpose.INPUT_GRADIENT, "dx"), (Purpose.OUTPUT_GRADIENT, "dy")


class LinearLayer(ShardedLayer, Protocol):
    """A layer that multiplies by its weight: a `ParallelLinear`, or a user's linear adapted."""

    moves: Moves
    transposed: bool
    """Whether the weight is [I, O]."""


class _Linear(Function):
    """forward   y = move_y(move_x(x) W^T + b)
    dgrad     dx = move_dx(move_dy(dy) W)
    wgrad     dW = move_dy(dy)^T move_x(x), db = sum of move_dy(dy), to the communicator

    [Note: Order of the gradients] The gradient that has to be communicated is computed first, so
    that computing the other hides its transfer: dW where weights are gathered, dx elsewhere.
    dW needs no weight, so in the first case the gather has that much longer to arrive.

    [Note: Autocast] Autocast narrows the product in forward and is off in backward. There the
    other factor is cast to the dtype of dy, and autograd casts the results to the inputs' dtypes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayer
    ) -> Tensor:
        moves, communicator = layer.moves, layer.communicator
        full_x = _moved(moves.x, x, layer, _X)
        with communicator.unshard(layer, _FORWARD, weight, bias) as full:
            y = F.linear(full_x, full.weight.T if layer.transposed else full.weight, full.bias)
        # Main gradients are found by their parameter. The saved weight will not do: where a part
        # is recomputed, `saved_tensors` holds another tensor.
        ctx.layer, ctx.parameter = layer, weight if isinstance(weight, nn.Parameter) else None
        need_x, need_w, _, _ = ctx.needs_input_grad
        # dW needs x and dx needs W: a frozen weight keeps no input, a first layer no weight.
        saved_x = x if moves.regather_x else full_x
        ctx.save_for_backward(saved_x if need_w else None, weight if need_x else None)
        return writable(_moved(moves.y, y, layer, _Y))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: LinearLayer = ctx.layer
        needs_x, needs_w, needs_b = needs_grad(ctx, 3)
        x, weight = ctx.saved_tensors
        moves, communicator = layer.moves, layer.communicator
        use = communicator.unshard(layer, _BACKWARD, weight) if needs_x else _NOTHING_READ
        dx = dw = db = dx_arriving = None
        with use as full:
            dy = _moved(moves.dy, dy, layer, _DY)
            x_arriving = None
            if moves.regather_x and needs_w:
                again = Tag(Purpose.REGATHERED_ACTIVATION, layer.name, "x")
                x_arriving = moves.x(x, tag=again)
            # [Note: Order of the gradients] Activations are communicated: dx first, and its
            # transfer runs while dW is computed.
            if full is not None and not communicator.gathers_weights:
                dx = _input_gradient(dy, full.weight, layer)
                dx_arriving = moves.dx(dx, tag=Tag(Purpose.INPUT_GRADIENT, layer.name, "dx"))
            if needs_w:
                full_x = x if x_arriving is None else x_arriving.wait()
                flat_dy, flat_x = dy.flatten(0, -2), in_dtype(full_x.flatten(0, -2), dy.dtype)
                # W [I, O] of a transposed layer has the gradient x^T dy.
                left, right = (flat_x, flat_dy) if layer.transposed else (flat_dy, flat_x)
                dw = communicator.add_product(
                    left,
                    right,
                    module=layer,
                    parameter=ctx.parameter,
                    returned=needs_w is _VALUE,
                )
            if needs_b:
                db = dy.flatten(0, -2).sum(0)
                returned = needs_b is _VALUE
                db = communicator.grad_hook(db, module=layer, is_bias=True, returned=returned)
            # Weights are communicated: dW is on its way by now, and the gathered weight has had
            # the time of that product to arrive.
            if full is not None and communicator.gathers_weights:
                dx = _input_gradient(dy, full.weight, layer)
                dx = _moved(moves.dx, dx, layer, _DX)
        return dx if dx_arriving is None else dx_arriving.wait(), dw, db, None


_NOTHING_READ = nullcontext()


def _moved(move: Collective, x: Tensor, layer: LinearLayer, what: tuple[Purpose, str]) -> Tensor:
    """Return x after its collective, waiting for it."""
    if move is _stay:  # makes no tag: this runs for every activation of every linear
        return x
    purpose, name = what
    return move(x, tag=Tag(purpose, layer.name, name)).wait()


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`, without calling torch if it is: `to` is an operator in any case."""
    return x if x.dtype == dtype else x.to(dtype)


def _input_gradient(dy: Tensor, weight: Tensor, layer: LinearLayer) -> Tensor:
    """Return dx = dy W, with W in the dtype of dy [Note: Autocast]."""
    return dy @ in_dtype(weight.T if layer.transposed else weight, dy.dtype)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayer) -> Tensor:
    """Compute `_Linear`'s forward without an autograd node."""
    x = _moved(layer.moves.x, x, layer, _X)
    with layer.communicator.unshard(layer, _FORWARD, weight, bias) as full:
        y = F.linear(x, full.weight.T if layer.transposed else full.weight, full.bias)
    return _moved(layer.moves.y, y, layer, _Y)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayer) -> Tensor:
    """Return x W^T + b for this rank's shards `weight` and `bias`: x [B, S, I] -> [B, S, O]."""
    if not torch.is_grad_enabled():  # an autograd node costs as much as the product of one token
        return _product(x, weight, bias, layer)
    y: Tensor = _Linear.apply(x, weight, bias, layer)
    return y


class ParallelLinear(ParallelModule):
    """A linear y = x W^T + b with a sharded weight, whose activations are moved as the mode needs.

    x [B, S, I] -> y [B, S, O], shapes before the move of x and after the move of y. A bias that is
    split like the outputs is added before the move of y. With `bias_after_move` the bias is
    replicated and added after it: y is a sum over ranks, which would count the bias once for each.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed = False

    def __init__(
        self,
        layout: ParameterLayout,
        *,
        communicator: WPCommunicator,
        moves: Moves,
        bias_layout: ParameterLayout | None = None,
        bias_after_move: bool = False,
        skip_bias_add: bool = False,
        has_weight: bool = True,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.communicator = communicator
        self.moves = moves
        self.bias_after_move = bias_after_move
        self.skip_bias_add = skip_bias_add
        if has_weight:
            self.add_shard("weight", layout, device=device, dtype=dtype)
        else:
            self.register_parameter("weight", None)
            self.layouts["weight"] = layout
        if bias_layout is None:
            self.register_parameter("bias", None)
        else:
            self.add_shard("bias", bias_layout, device=device, dtype=dtype)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return y [B, S, O] for x [B, S, I]; without the bias if `skip_bias_add`.

        `weight` [O, I] replaces the layer's own, in modes that gather no weights. If it is a
        parameter, its gradient is delivered as the layer's own is, else autograd delivers it.
        Raises ValueError if `weight` does not have the shape of the layer's shard, or if weights
        are gathered.
        """
        y = self.multiply(x, weight)
        if self.bias_after_move and not self.skip_bias_add and self.bias is not None:
            y = y + self.bias.to(y.dtype)  # [Note: Autocast]
        return y

    def multiply(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return `forward`'s y without the bias that is added after the move of y."""
        own = self.weight
        if weight is None and own is None:
            raise ValueError(f"{self.title} has no weight of its own: call it with one")
        if weight is not None and weight is not own:
            self._check(weight)
        inner_bias = None if self.bias_after_move or self.skip_bias_add else self.bias
        return multiply(x, own if weight is None else weight, inner_bias, self)

    def _check(self, weight: Tensor) -> None:
        """Raise ValueError if `weight` cannot replace the layer's own."""
        expected = self.layouts["weight"].local_shape
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"{self.title} was called with a weight of shape {tuple(weight.shape)}, its shard"
                f" has shape {expected}"
            )
        if self.communicator.gathers_weights:
            raise ValueError(f"{self.title}: in isp mode only a layer's own weight is gathered")
