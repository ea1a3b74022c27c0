"""`FusedLinears`: gather and reduce linears as one that are called in a row with the same tensor.

Their weights are concatenated to [sum of Oi, I], and a rank holds contiguous rows of that: perhaps
some of one linear, all of the next and none of a third. Each parameter of the model is a view of
its own rows, so optimizers, checkpoints and adapters see separate parameters. But the autograd
graph has only the fused parameter: a hook on the gradient of a view never runs. The call of the
first linear gathers all rows in one transfer and computes all outputs; the calls of the other
linears return their outputs.

B batch, S sequence, N tokens, I in features, Oi out features of linear i
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.autograd import Function, once_differentiable, writable
from isp.core.layers.linear import (
    Moves,
    NeedsGrad,
    in_dtype,
    needs_grad,
)
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.phase import Phase
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.core.weights.wp_communicator import FullWeights, WPCommunicator
from isp.models.forwards import ModuleForward, Wrapper
from isp.models.roles import ParameterRole
from isp.models.tracing.calls import Call, Kind
from isp.models.tracing.trace import ModelTrace

__all__ = ["FusedLinears", "FusedRows", "groups_of", "rows_of"]


class FusedRows(NamedTuple):
    """The place of a linear's weight or bias in the fused parameter of its group."""

    whole: str
    """The name of the fused parameter."""
    rows_before: int
    """The number of rows of other linears before those of this linear."""
    rows_after: int
    """The number of rows of other linears after those of this linear."""


def groups_of(model: nn.Module, trace: ModelTrace) -> tuple[tuple[str, ...], ...]:
    """Return the groups of linears that can be computed as one, by name, in order of the calls.

    A group consists of plain linears of one block that are called in a row with the same tensor,
    each once. Their weights and biases are sharded and belong to no other module, have the same
    dtypes, and are trained or frozen in each linear in the same way.
    """
    calls = Counter(call.module for call in trace.calls)
    uses = Counter(p for m in model.modules() for p in m.parameters(recurse=False))

    def kind(numbered: tuple[int, Call]) -> Hashable:
        """Return a key that is equal for consecutive calls that one `FusedLinears` can hold.

        These linears share a gather and an autograd node; each still has its own product. Any other
        call gets its number as the key, which no other call has.
        """
        number, call = numbered
        module = model.get_submodule(call.module)
        if call.kind is not Kind.LINEAR or call.block is None or type(module) is not nn.Linear:
            return number
        own = dict(module.named_parameters(recurse=False))
        names = {f"{call.module}.{local}" for local in own}
        cut = all(trace.roles.get(name) is ParameterRole.SHARDED for name in names)
        if not cut or calls[call.module] > 1 or any(uses[p] > 1 for p in own.values()):
            return number
        form = tuple((local, p.dtype, p.requires_grad) for local, p in own.items())
        # `call.given` is a number for the input tensor, which changes if the tensor is written into
        # between two calls. Unused linears (of indexers) get no gradient, so they are fused only
        # with each other.
        return call.block, call.given, form, names.isdisjoint(trace.unused)

    runs = (list(run) for _, run in groupby(enumerate(trace.calls), key=kind))
    return tuple(tuple(call.module for _, call in run) for run in runs if len(run) > 1)


def rows_of(model: nn.Module, groups: Iterable[Sequence[str]]) -> dict[str, FusedRows]:
    """Return by name the place of each parameter of the `groups` in its fused parameter."""
    found = {}
    for linears in groups:
        modules = [model.get_submodule(name) for name in linears]
        for local, _ in modules[0].named_parameters(recurse=False):
            sizes = [len(module.get_parameter(local)) for module in modules]
            for i, linear in enumerate(linears):
                rows = FusedRows(f"{_name(linears)}.{local}", sum(sizes[:i]), sum(sizes[i + 1 :]))
                found[f"{linear}.{local}"] = rows
    return found


def _name(linears: Sequence[str]) -> str:
    """Return the name of a group of linears, such as `self_attn.q_proj+k_proj+v_proj`."""
    first, *others = linears
    parent = first.rpartition(".")[0]
    return "+".join([first, *(name.removeprefix(f"{parent}.") for name in others)])


class FusedLinears:
    """The holder of a group of linears [Oi, I] that are called in a row with the same tensor."""

    weight_name = "weight"
    transposed = False

    def __init__(
        self,
        linears: Mapping[str, nn.Module],
        communicator: WPCommunicator,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
    ) -> None:
        """`linears`: in order of their calls.

        `weight` [sum of Oi, I] and `bias` [sum of Oi] are the fused shards.
        """
        self._names = [*linears]
        self.name = _name(self._names)
        self.communicator, self.moves = communicator, Moves()
        self.weight = weight.parameter
        self.bias = None if bias is None else bias.parameter
        self.layouts: dict[str, ParameterLayout] = {"weight": weight.layout}
        if bias is not None:
            self.layouts["bias"] = bias.layout
        self.sizes = [cast(nn.Linear, linear).out_features for linear in linears.values()]
        self.weights = (self,)
        self.first = self._names[0]
        """The linear whose call gathers the weights and computes all outputs."""
        self._x: Tensor | None = None
        """The input of the first linear, until all linears have been called."""
        self._outputs: list[Tensor] = []
        """The outputs of the linears that have not been called yet, the last linear's first."""

    def wrapper(self, linear: str) -> Wrapper:
        """Return the wrapper `Wrap.COMPUTE` of one of the linears."""
        number = self._names.index(linear)
        return lambda inner: partial(self._forward, number, inner)

    def _forward(self, number: int, original: ModuleForward, x: Tensor) -> Tensor:
        """Return the output of one linear: x [B, S, I] -> [B, S, Oi].

        Raises RuntimeError if x is not the tensor that the first linear was called with.
        """
        # Run the linear's own code if its parameters are whole, because no weight is gathered, and
        # no gradient is needed. Otherwise the fused node computes all linears.
        if not (self.communicator.gathers_weights or torch.is_grad_enabled()):
            own: Tensor = original(x)
            return own
        if number == 0:
            # Reverse the outputs, so that `pop` below takes that of the linear that is called.
            self._x, self._outputs = x, list(self._multiply(x))[::-1]
        elif x is not self._x:
            raise RuntimeError(
                f"{self._names[number]} was called with a different tensor than {self._names[0]},"
                f" but with the same one when the model was traced, so isp computed them together"
            )
        y = self._outputs.pop()
        if not self._outputs:
            # This was the last linear of the group: drop the input, so that its memory can be
            # freed.
            self._x = None
        return y

    def _multiply(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs of all linears: x [B, S, I] -> [B, S, Oi] each."""
        if torch.is_grad_enabled():
            ys: tuple[Tensor, ...] = _Fused.apply(x, self.weight, self.bias, self)
            return ys
        with self.communicator.unshard(self, Phase.FORWARD, self.weight, self.bias) as full:
            return _products(x, full, self.sizes)


class _Fused(Function):
    """The product of x with the weights of all linears of a group, as one autograd node.

    forward   yi = x Wi^T + bi
    dgrad     dx = sum of dyi Wi
    wgrad     dWi = dyi^T x, concatenated and given to the communicator; db likewise

    The outputs do not share memory, because a model may write into one of them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FusedLinears
    ) -> tuple[Tensor, ...]:
        with layer.communicator.unshard(layer, Phase.FORWARD, weight, bias) as full:
            ys = _products(x, full, layer.sizes)
        # `ctx.parameter` is None if the weight is a tensor but no parameter: only autograd can
        # deliver the gradient of such a tensor.
        ctx.layer, ctx.parameter = layer, weight if isinstance(weight, nn.Parameter) else None
        need_x, need_w, _, _ = ctx.needs_input_grad
        # The shard is saved, not the whole weight: backward gathers again.
        ctx.save_for_backward(x if need_w else None, weight if need_x else None)
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        layer: FusedLinears = ctx.layer
        needs_x, needs_w, needs_b = needs_grad(ctx, 3)
        x, weight = ctx.saved_tensors
        communicator = layer.communicator
        # Only dx needs the weight: without it, nothing is gathered.
        use = communicator.unshard(layer, Phase.BACKWARD, weight) if needs_x else nullcontext()
        dys = tuple([dy.flatten(0, -2) for dy in given])  # [N, Oi]
        dx = dw = db = None
        with use as full:
            if needs_w:
                # Compute dW first, so that its reduce-scatter overlaps with the product for dx.
                flat_x = in_dtype(x.flatten(0, -2), dys[0].dtype)
                dw = communicator.add_product(
                    dys,
                    flat_x,
                    module=layer,
                    parameter=ctx.parameter,
                    returned=needs_w is NeedsGrad.VALUE,
                )
            if needs_b:
                db = torch.cat([dy.sum(0) for dy in dys])
                returned = needs_b is NeedsGrad.VALUE
                db = communicator.grad_hook(db, module=layer, is_bias=True, returned=returned)
            if full is not None:
                dx = _input_gradient(dys, full.weight, layer.sizes)
                dx = dx.view(*given[0].shape[:-1], dx.shape[-1])
        return dx, dw, db, None


def _products(x: Tensor, full: FullWeights, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return x Wi^T + bi of each linear, in separate tensors that the model may write into."""
    weights, bias = full.weight.split_with_sizes(sizes), full.bias
    biases = [None] * len(sizes) if bias is None else bias.split_with_sizes(sizes)
    return tuple([writable(F.linear(x, w, b)) for w, b in zip(weights, biases, strict=True)])


def _input_gradient(dys: Sequence[Tensor], weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return dx [N, I], the sum of dyi Wi.

    Adds from the last linear to the first, as autograd does for separate linears, so that the
    result has the same bits as in the plain model.
    """
    pairs = zip(reversed(dys), reversed(weight.split_with_sizes(sizes)), strict=True)
    (dy, rows), *others = pairs
    dx = dy @ in_dtype(rows, dy.dtype)
    for dy, rows in others:
        dx.addmm_(dy, in_dtype(rows, dy.dtype))
    return dx
