"""One linear for every mode: y = x W^T + b, with the six tensors that may travel.

B batch, S sequence, I in features, O out features; x is [B, S, I], W is [O, I], y is [B, S, O].

A linear has x, w, y going forward and dy, dx, dw going backward.

    mode   column linear                                row linear
    mtp    dx: all-reduce                               y: all-reduce
    msp    x: all-gather on S, kept; dx: r.-scatter     y: reduce-scatter on S; dy: all-gather
    fsp    as msp; x is gathered again in backward      as msp
    isp    w: all-gather; dw: reduce-scatter            the same

The communicator (`isp.core.weights`) moves w and dw; `Moves` has the collectives of the
activations.

Source: Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022), InternEvo (Chen et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.autograd import Function, once_differentiable, writable
from isp.core.comm import Channel, Pending
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.module import ParallelModule
from isp.core.layers.weight_gradients import OutputGradient, gradient_of
from isp.core.mesh import Mode
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.phase import Phase
from isp.core.torch_private import will_run
from isp.core.weights.declare import DeclaredBlock, WeightHolder
from isp.core.weights.wp import WPCommunicator

__all__ = [
    "LinearLayer",
    "Moves",
    "NeedsGrad",
    "ParallelLinear",
    "Role",
    "WeightGradientRoute",
    "delivered_gradient",
    "in_dtype",
    "linears_of",
    "moves_for",
    "multiply",
    "needs_grad",
]

Collective = Callable[..., Pending]
"""Called with a tensor and its `tag`."""


def _stay(x: Tensor, *, tag: Tag) -> Pending:
    return Pending.ready(x)


class Role(Enum):
    """The split of a linear's features: `COLUMN` splits its outputs, `ROW` its inputs."""

    COLUMN = auto()
    ROW = auto()


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The collectives of the four activations of a linear."""

    x: Collective = _stay
    """The input, before it is multiplied."""
    y: Collective = _stay
    """The output."""
    dy: Collective = _stay
    """The gradient of the output; the dual of `y`."""
    dx: Collective = _stay
    """The gradient of the input; the dual of `x`."""
    regather_x: bool = False
    """Save x as it came, and move it again in backward."""


def moves_for(mode: Mode, role: Role, tensor: Channel, *, sequence_dim: int = 1) -> Moves:
    """The row of the mode table for a linear of `role`, over the tensor group."""
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
    """A backward pass's use for an input's gradient; false if it has none."""

    NOTHING = 0
    """It is not asked for."""
    VALUE = 1
    """`torch.autograd.grad` returns it: it has to be there when the function's backward ends."""
    FLOW = 2
    """It flows on, to the function that made the input or into the sum that the leaf keeps."""


def needs_grad(ctx: Any, count: int) -> list[NeedsGrad]:
    """Say what the backward pass under way needs of the first `count` inputs of `ctx`'s function.

    `ctx.needs_input_grad` only says what could have a gradient; `autograd.grad(y, x)` and
    `backward(inputs=[x])` leave out the rest. Of these all but the last have to be tensors.
    """
    found, nodes = [], ctx.next_functions
    for index, needed in enumerate(ctx.needs_input_grad[:count]):
        try:
            runs = needed and will_run(nodes[index][0])
            found.append(_FLOW if runs else _NOTHING)
        except RuntimeError:  # torch's answer for a leaf whose gradient `autograd.grad` returns
            found.append(_VALUE)
    return found


# Python 3.11 looks a member up as slowly as a function is called.
_NOTHING, _VALUE, _FLOW = NeedsGrad
_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD
_X, _Y = (Purpose.ACTIVATION, "x"), (Purpose.ACTIVATION, "y")
_DX, _DY = (Purpose.INPUT_GRADIENT, "dx"), (Purpose.OUTPUT_GRADIENT, "dy")


WeightGradientRoute: TypeAlias = (
    "Callable[[LinearLayer, nn.Parameter, OutputGradient, Tensor], Tensor | None]"
)
"""Decides what becomes of the two factors of a weight gradient
(`isp.core.layers.weight_gradients`).

Called with a layer, the parameter that it was used with (its own, or one given at the call), dy
[N, O] and x [N, I] of N tokens -> dW = dy^T x [O, I], or None if it is taken care of.
"""


class LinearLayer(WeightHolder, Protocol):
    """A layer that multiplies by its weight: a `ParallelLinear`, or one of somebody else's."""

    communicator: WPCommunicator
    moves: Moves
    weight_gradients: WeightGradientRoute | None
    transposed: bool
    """Whether the weight is [I, O]."""


def linears_of(chunks: Iterable[Iterable[DeclaredBlock]]) -> Iterator[LinearLayer]:
    """The linears that the blocks of `chunks` declare; one that is used twice, twice."""
    for use in (use for blocks in chunks for block in blocks for use in block.uses):
        # Not isinstance: with a protocol that sees no parameter of a module since Python 3.12.
        if hasattr(use.layer, "weight_gradients"):
            yield cast(LinearLayer, use.layer)


class _Linear(Function):
    """forward   y = move_y(move_x(x) W^T + b)
    dgrad     dx = move_dx(move_dy(dy) W)
    wgrad     dW = move_dy(dy)^T move_x(x), db = sum of move_dy(dy), to the communicator

    [Note: Order of the gradients] The gradient that has to travel is computed first, so that
    computing the other hides its transfer: dW where weights are gathered, dx elsewhere.
    dW needs no weight, so in the first case the gather has that much longer to arrive.

    [Note: Autocast] It narrows the product in forward and does not reach backward: there the other
    factor takes the dtype of dy, and autograd widens what comes out.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayer
    ) -> Tensor:
        moves, communicator = layer.moves, layer.communicator
        full_x = _moved(moves.x, x, layer, _X)
        with communicator.unshard(layer, _FORWARD, weight, bias) as full:
            y = F.linear(full_x, full.weight.T if layer.transposed else full.weight, full.bias)
        # A recompute gives another tensor for a saved weight: the parameter itself is the route's.
        ctx.layer, ctx.parameter = layer, weight if isinstance(weight, nn.Parameter) else None
        need_x, need_w, _, _ = ctx.needs_input_grad
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
            if full is not None and not communicator.gathers_weights:
                dx = _input_gradient(dy, full.weight, layer)
                dx_arriving = moves.dx(dx, tag=Tag(Purpose.INPUT_GRADIENT, layer.name, "dx"))
            if needs_w:
                full_x = x if x_arriving is None else x_arriving.wait()
                flat_dy, flat_x = dy.flatten(0, -2), in_dtype(full_x.flatten(0, -2), dy.dtype)
                dw = delivered_gradient(flat_dy, flat_x, layer, ctx.parameter, needs_w)
            if needs_b:
                db = dy.flatten(0, -2).sum(0)
                returned = needs_b is _VALUE
                db = communicator.grad_hook(db, module=layer, is_bias=True, returned=returned)
            if full is not None and communicator.gathers_weights:
                dx = _input_gradient(dy, full.weight, layer)
                dx = _moved(moves.dx, dx, layer, _DX)
        return dx if dx_arriving is None else dx_arriving.wait(), dw, db, None


_NOTHING_READ = nullcontext()


def _moved(move: Collective, x: Tensor, layer: LinearLayer, what: tuple[Purpose, str]) -> Tensor:
    """x, where it is multiplied or goes on; waits for it."""
    if move is _stay:
        return x
    purpose, name = what
    return move(x, tag=Tag(purpose, layer.name, name)).wait()


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; to torch, it is an operator even where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def _input_gradient(dy: Tensor, weight: Tensor, layer: LinearLayer) -> Tensor:
    """dy W [Note: Autocast]."""
    return dy @ in_dtype(weight.T if layer.transposed else weight, dy.dtype)


def delivered_gradient(
    dy: OutputGradient,
    x: Tensor,
    layer: LinearLayer,
    parameter: nn.Parameter | None,
    needs: NeedsGrad,
) -> Tensor | None:
    """dy^T x of all tokens, [N, O] and [N, I], or None if it is taken care of."""
    left, right = dy, x
    if layer.transposed:
        assert isinstance(dy, Tensor)
        left, right = x, dy
    route = layer.weight_gradients
    if route is None or parameter is None or needs is not _FLOW:
        dw: Tensor | None = gradient_of(layer, left, right)
    else:
        dw = route(layer, parameter, left, right)
    if dw is None:
        return None
    return layer.communicator.grad_hook(dw, module=layer, returned=needs is _VALUE)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayer) -> Tensor:
    """`_Linear`'s forward alone."""
    x = _moved(layer.moves.x, x, layer, _X)
    with layer.communicator.unshard(layer, _FORWARD, weight, bias) as full:
        y = F.linear(x, full.weight.T if layer.transposed else full.weight, full.bias)
    return _moved(layer.moves.y, y, layer, _Y)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayer) -> Tensor:
    """x W^T + b, of which `weight` and `bias` are this rank's parts: x [B, S, I] -> [B, S, O]."""
    if not torch.is_grad_enabled():  # a node costs as much as the product of one token
        return _product(x, weight, bias, layer)
    y: Tensor = _Linear.apply(x, weight, bias, layer)
    return y


class ParallelLinear(ParallelModule):
    """y = x W^T + b, its weight a shard and its activations moved as the mode needs.

    x [B, S, I] -> y [B, S, O], before and after the moves of x and y. A bias that is split like
    the outputs is added inside; one that is `bias_after_move` (replicated, because y is a sum over
    ranks) is added to the moved y.
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
        weight_gradients: WeightGradientRoute | None = None,
        has_weight: bool = True,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.communicator = communicator
        self.moves = moves
        self.bias_after_move = bias_after_move
        self.skip_bias_add = skip_bias_add
        self.weight_gradients = weight_gradients
        """None: the product, for autograd or the communicator to deliver."""
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
        """x [B, S, I] -> y [B, S, O]; without the bias if that is to be added elsewhere.

        `weight` [O, I] is used in place of the layer's own, by modes that gather none; a parameter
        takes the layer's route of weight gradients, any other tensor autograd's. Raises ValueError
        if it is not of the shape of the layer's shard.
        """
        y = self.multiply(x, weight)
        if self.bias_after_move and not self.skip_bias_add and self.bias is not None:
            y = y + self.bias.to(y.dtype)  # [Note: Autocast]
        return y

    def multiply(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """`forward` without a bias that is added after the move of y."""
        own = self.weight
        if weight is None and own is None:
            raise ValueError(f"{self.title} has no weight of its own: call it with one")
        if weight is not None and weight is not own:
            self._check(weight)
        inner_bias = None if self.bias_after_move or self.skip_bias_add else self.bias
        return multiply(x, own if weight is None else weight, inner_bias, self)

    def _check(self, weight: Tensor) -> None:
        """Raise ValueError if this weight cannot take the place of the layer's own."""
        expected = self.layouts["weight"].local_shape
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"{self.title} was called with a weight of shape {tuple(weight.shape)}, its shard"
                f" has shape {expected}"
            )
        if self.communicator.gathers_weights:
            raise ValueError(f"{self.title}: in isp mode only a layer's own weight is gathered")
