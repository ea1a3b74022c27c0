"""The linear y = x W^T + b with a sharded weight, in every mode.

B batch, S sequence, I in features, O out features; x is [B, S, I], W is [O, I], y is [B, S, O].

Six tensors may be communicated: x, w and y in forward, dy, dx and dw in backward.

    mode   column linear                                row linear
    mtp    dx: all-reduce                               y: all-reduce
    msp    x: all-gather on S, saved; dx: reduce-sc.    y: reduce-scatter on S; dy: all-gather
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
"""A function that launches a collective, given a tensor and its `tag`."""


def _stay(x: Tensor, *, tag: Tag) -> Pending:
    """Return x unchanged; used where an activation is not communicated."""
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
    """Collective of the output, run after the product."""
    dy: Collective = _stay
    """Collective of the output's gradient: the backward of the collective `y`."""
    dx: Collective = _stay
    """Collective of the input's gradient: the backward of the collective `x`."""
    regather_x: bool = False
    """Save x before its collective and run that again in backward: less memory, more traffic."""


def moves_for(mode: Mode, role: Role, tensor: Channel, *, sequence_dim: int = 1) -> Moves:
    """Return the collectives over `tensor` of a linear with `role` in `mode`.

    They are those of the table in this module's docstring. Sequences are gathered and scattered
    along `sequence_dim`.
    """
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
    """The reason why the running backward pass needs an input's gradient; false if it does not."""

    NOTHING = 0
    """The backward pass does not need the gradient of this input."""
    VALUE = 1
    """`torch.autograd.grad` returns the gradient, so it must exist when the backward returns."""
    FLOW = 2
    """The gradient goes to the node that made the input, or is accumulated into the leaf."""


def needs_grad(ctx: Any, count: int) -> list[NeedsGrad]:
    """Return a `NeedsGrad` for each of the first `count` inputs, for the running backward pass.

    `ctx.needs_input_grad` says which inputs could have a gradient; `autograd.grad(y, x)` and
    `backward(inputs=[x])` compute only some of these. All of the first `count` inputs but the last
    must be tensors.
    """
    found, nodes = [], ctx.next_functions
    for index, needed in enumerate(ctx.needs_input_grad[:count]):
        try:
            # The engine computes the gradient only if it will run the input's own node.
            runs = needed and will_run(nodes[index][0])
            found.append(_FLOW if runs else _NOTHING)
        except RuntimeError:
            # `will_run` raises only for a leaf whose gradient `autograd.grad` is to return.
            found.append(_VALUE)
    return found


# Constants, because Python 3.11 takes as long to look up an enum's member as to call a function.
_NOTHING, _VALUE, _FLOW = NeedsGrad
_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD
_X, _Y = (Purpose.ACTIVATION, "x"), (Purpose.ACTIVATION, "y")
_DX, _DY = (Purpose.INPUT_GRADIENT, "dx"), (Purpose.OUTPUT_GRADIENT, "dy")


class LinearLayer(ShardedLayer, Protocol):
    """A layer that multiplies by its weight: `ParallelLinear`, or a wrapper of a user's linear."""

    moves: Moves
    """The collectives of the layer's input, of its output, and of their gradients."""
    transposed: bool
    """True if the weight is stored as [I, O], as in transformers' `Conv1D`; else [O, I]."""


class _Linear(Function):
    """The autograd function of a linear whose activations and weight may be communicated.

    forward   y = move_y(move_x(x) W^T + b)
    backward  dx = move_dx(move_dy(dy) W)
              dW = move_dy(dy)^T move_x(x), db = sum of move_dy(dy), both to the communicator

    Backward first computes the gradient that is communicated, so that computing the other hides
    the transfer. See [Note: Order of the gradients] in docs/design/notes/layers.md.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayer
    ) -> Tensor:
        moves, communicator = layer.moves, layer.communicator
        full_x = _moved(moves.x, x, layer, _X)
        with communicator.unshard(layer, _FORWARD, weight, bias) as full:
            y = F.linear(full_x, full.weight.T if layer.transposed else full.weight, full.bias)
        # The parameter itself, to find its main gradient: in a recomputed part, `saved_tensors`
        # has a different tensor object.
        ctx.layer, ctx.parameter = layer, weight if isinstance(weight, nn.Parameter) else None
        need_x, need_w, _, _ = ctx.needs_input_grad
        # dW needs x, and dx needs W: save no input for a frozen weight, and no weight for an input
        # without gradient.
        saved_x = x if moves.regather_x else full_x
        ctx.save_for_backward(saved_x if need_w else None, weight if need_x else None)
        return writable(_moved(moves.y, y, layer, _Y))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: LinearLayer = ctx.layer
        needs_x, needs_w, needs_b = needs_grad(ctx, 3)
        # If the linear is in a recomputed part, reading its saved tensors starts the recompute.
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
            # [Note: Order of the gradients] If activations are communicated, dx first: it is in
            # flight while dW is computed.
            if full is not None and not communicator.gathers_weights:
                dx = _input_gradient(dy, full.weight, layer)
                dx_arriving = moves.dx(dx, tag=Tag(Purpose.INPUT_GRADIENT, layer.name, "dx"))
            if needs_w:
                full_x = x if x_arriving is None else x_arriving.wait()
                flat_dy, flat_x = dy.flatten(0, -2), in_dtype(full_x.flatten(0, -2), dy.dtype)
                # The gradient of a transposed weight W [I, O] is x^T dy.
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
            # If weights are communicated, dW was computed first: its reduce-scatter is in flight
            # while dx is computed, and the weight that dx needs was gathered during the product dW.
            if full is not None and communicator.gathers_weights:
                dx = _input_gradient(dy, full.weight, layer)
                dx = _moved(moves.dx, dx, layer, _DX)
        return dx if dx_arriving is None else dx_arriving.wait(), dw, db, None


_NOTHING_READ = nullcontext()
"""The context of a backward that needs no weight."""


def _moved(move: Collective, x: Tensor, layer: LinearLayer, what: tuple[Purpose, str]) -> Tensor:
    """Run the collective `move` of x, wait for it and return its result."""
    # Return before a tag is made, to save time: this runs for every activation of every linear.
    if move is _stay:
        return x
    purpose, name = what
    return move(x, tag=Tag(purpose, layer.name, name)).wait()


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`; x itself if it has this dtype, because `to` would cost a dispatch."""
    return x if x.dtype == dtype else x.to(dtype)


def _input_gradient(dy: Tensor, weight: Tensor, layer: LinearLayer) -> Tensor:
    """Return dx = dy W, computed in the dtype of dy.

    See [Note: Autocast] in docs/design/notes/layers.md.
    """
    return dy @ in_dtype(weight.T if layer.transposed else weight, dy.dtype)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayer) -> Tensor:
    """Return y of `_Linear`'s forward, without an autograd node."""
    x = _moved(layer.moves.x, x, layer, _X)
    with layer.communicator.unshard(layer, _FORWARD, weight, bias) as full:
        y = F.linear(x, full.weight.T if layer.transposed else full.weight, full.bias)
    return _moved(layer.moves.y, y, layer, _Y)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayer) -> Tensor:
    """Return x W^T + b for this rank's shards `weight` and `bias`: x [B, S, I] -> [B, S, O]."""
    # Without gradients, make no autograd node: it costs as much time as the product of one token.
    if not torch.is_grad_enabled():
        return _product(x, weight, bias, layer)
    y: Tensor = _Linear.apply(x, weight, bias, layer)
    return y


class ParallelLinear(ParallelModule):
    """A linear y = x W^T + b with a sharded weight, whose activations `moves` communicates.

    x [B, S, I] -> y [B, S, O], shapes before the move of x and after the move of y. A bias that is
    split like the outputs is added before the move of y. With `bias_after_move` the bias is
    replicated and added after the move: where y is summed over ranks, adding it before would count
    it once for each rank.
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

        `weight` [O, I] replaces the layer's own weight, in modes that gather no weights. If it is
        a parameter, its gradient is delivered like that of the layer's own; if not, by autograd.
        Raises ValueError if `weight` does not have the shape of the layer's shard, or if weights
        are gathered.
        """
        y = self.multiply(x, weight)
        if self.bias_after_move and not self.skip_bias_add and self.bias is not None:
            # Under autocast y is narrower than the bias: convert the bias to keep the dtype of y.
            y = y + self.bias.to(y.dtype)
        return y

    def multiply(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return y of `forward`, without the bias if that is added after the move of y."""
        own = self.weight
        if weight is None and own is None:
            raise ValueError(f"{self.title} has no weight of its own: call it with a weight")
        if weight is not None and weight is not own:
            self._check(weight)
        inner_bias = None if self.bias_after_move or self.skip_bias_add else self.bias
        return multiply(x, own if weight is None else weight, inner_bias, self)

    def _check(self, weight: Tensor) -> None:
        """Raise ValueError if `weight` cannot replace the layer's own."""
        expected = self.layouts["weight"].local_shape
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"{self.title} was called with a weight of shape {tuple(weight.shape)}: pass"
                f" this rank's shard, of shape {expected}"
            )
        if self.communicator.gathers_weights:
            raise ValueError(
                f"{self.title} was called with a weight, but in isp mode only a layer's own weight"
                " is gathered: call it without one, or use another mode"
            )
