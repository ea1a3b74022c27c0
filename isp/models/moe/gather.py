"""Experts of a model: stacked weights [E, .., ..] of one module, gathered like those of linears.

[Note: A graph inside] Modules differ in how they use their weights: one expert after the other, or
all at once for groups of tokens. So a module's code runs as it is, on whole weights in place of the
shards, and autograd records it in an inner graph, within one function of the outer graph. In place
of a tensor in a whole weight, the inner graph saves only its position: backward gathers the weight
again, so the graph keeps no whole weight.

[Note: A graph again] In a recomputed block, the recompute records the inner graph, and the function
of the first forward uses that: the experts are computed twice and not a third time.

E experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from isp.core.autograd import Function, once_differentiable
from isp.core.comm import Pending
from isp.core.layers.linear import NeedsGrad, needs_grad
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.phase import Phase
from isp.core.tensors import memory_of
from isp.core.torch_private import (
    TreeSpec,
    saved_tensors_hooks_in_use,
    tree_flatten,
    tree_unflatten,
    version_of,
)
from isp.core.weights.wp_communicator import WPCommunicator
from isp.models.forwards import ModuleForward
from isp.models.moe.ahead import ComputedAhead
from isp.models.moe.dispatch import ExpertExchange, ExpertSubset, on_other_tokens
from isp.models.roles import expert_stacks
from isp.models.tracing.calls import weights_among

__all__ = ["ExpertPlace", "ExpertWeight", "ShardedExperts"]


class ExpertWeight:
    """One stacked weight of experts as the communicator sees it: the holder of a shard."""

    bias: nn.Parameter | None = None

    def __init__(self, module: nn.Module, name: str, weight_name: str) -> None:
        self.module = module
        self.name, self.weight_name = name, weight_name
        self.layouts: dict[str, ParameterLayout] = {}
        """The layout of the weight, by local name; `WeightHolders` sets it."""

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter(self.weight_name)


class ExpertPlace(NamedTuple):
    """The place of a call of experts in its block."""

    number: int
    """The number of calls of the block so far, those computed ahead included."""
    recomputed: bool
    """True if the block is recomputed in backward."""


class ShardedExperts:
    """A module with experts, whose stacked weights are read together."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: WPCommunicator,
        place: Callable[[], ExpertPlace],
        exchange: ExpertExchange | None = None,
        ahead: ComputedAhead | None = None,
    ) -> None:
        """`place` returns the place of the current call in its block.

        `exchange`: the exchange with ranks that have other experts; None: all experts are here, or
        gathered. `ahead`: the module that is computed while tokens or weights are in flight.
        """
        self.weights = tuple(ExpertWeight(module, name, n) for n in expert_stacks(module))
        self.communicator = communicator
        self.name, self.place = name, place
        self._exchange, self._ahead = exchange, ahead
        self.recorded: dict[int, _Graph] = {}
        """The inner graphs of the last recompute, by number of the call [Note: A graph again]."""
        self.reading: Sequence[Tensor] = []
        """The whole weights, while a backward reads them."""
        self._checked = False
        gathered = {weight.weight_name for weight in self.weights}
        self._module, self._call = module, _Call(module, exchange)
        self._others = [n for n, _ in module.named_parameters() if n not in gathered]

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        """Return the forward of the experts on this rank; the wrapper `Wrap.COMPUTE`."""
        if self.communicator.gathers_weights or self._exchange is not None:
            return self.__call__
        return inner

    @contextmanager
    def whole(self, phase: Phase) -> Iterator[Sequence[Tensor]]:
        """Yield the whole weights, gathered in order, or in backward from the last to the first.

        All weights are waited for, even if no token of this rank needs them: gathering takes all
        ranks, and the tokens of each rank decide what is read there, and when.
        """
        turn = slice(None, None, -1 if phase is Phase.BACKWARD else 1)
        with ExitStack() as stack:
            uses = [self.communicator.unshard(w, phase, w.weight) for w in self.weights[turn]]
            full = [stack.enter_context(use) for use in uses]
            yield [one.weight for one in full][turn]

    def compute(self, given: _Given, tensors: Sequence[Tensor], full: Sequence[Tensor]) -> Tensor:
        """Run the module's code on `tensors` and the whole weights `full`; return its output.

        `tensors`: the differentiable arguments, in order of `given.places`, then the parameters
        that are not gathered. Raises TypeError if the output is not one tensor, and RuntimeError if
        the code writes into its inputs.
        """
        inputs, others = tensors[: len(given.places)], tensors[len(given.places) :]
        leaves = list(given.leaves)
        for place, x in zip(given.places, inputs, strict=True):
            leaves[place] = x
        args, kwargs = tree_unflatten(leaves, given.spec)
        names = [*self._others, *(weight.weight_name for weight in self.weights)]
        parameters = {f"module.{n}": x for n, x in zip(names, [*others, *full], strict=True)}
        counted = [x for x in tensors if not x.is_inference()]
        versions = [version_of(x) for x in counted]
        out = torch.func.functional_call(self._call, parameters, args, kwargs)
        if not isinstance(out, Tensor):
            raise TypeError(
                f"{self.name} returns a {type(out).__name__}: experts must return one tensor"
            )
        if versions != [version_of(x) for x in counted]:
            raise RuntimeError(
                f"{self.name} modifies an input tensor in place, which gradients would not see:"
                f" return a new tensor instead"
            )
        # The memory of whole weights is reused after this: an output that is a view needs a copy.
        memory = {memory_of(x) for x in full}
        return out.clone() if memory_of(out) in memory else out

    def check(self, graph: _Graph) -> None:
        """Raise RuntimeError if the inner graph reaches parameters that are not its inputs.

        Only the first graph is checked.
        """
        if not self._checked and graph.leaves():
            raise RuntimeError(
                f"{self.name} reads a tensor that requires a gradient but is neither an argument"
                f" nor its parameter, so its gradient would be lost: pass it as an argument"
            )
        self._checked = True

    def deliver(self, weight: ExpertWeight, dw: Tensor | None, needs: NeedsGrad) -> Tensor | None:
        """Give the gradient of a whole weight to the communicator.

        Returns the gradient of the shard if autograd has to deliver it, else None.
        """
        if not needs:
            return None
        if dw is None:  # no token went to an expert, but all ranks take part in the reduce-scatter
            dw = weight.weight.new_zeros(weight.layouts[weight.weight_name].global_shape)
        returned = needs is NeedsGrad.VALUE
        return self.communicator.grad_hook(dw, module=weight, returned=returned)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the experts of all tokens, as the module's forward."""
        leaves, spec = tree_flatten((args, kwargs))
        tokens, under_way = leaves[0], []
        if self._exchange is not None:
            place = weights_among(leaves, leaves[1])
            assert place is not None, "the trace knows"
            sent = self._exchange.dispatch(tokens, leaves[1], leaves[place])
            under_way = sent.under_way
            # The received buffers are among the leaves of `sent`, in place of tokens and weights.
            leaves[0] = leaves[place] = None
            leaves, spec = tree_flatten(((sent, place, tree_unflatten(leaves, spec)), {}))
        if self._ahead is not None:
            self._ahead.compute(tokens)
        places = tuple(i for i, x in enumerate(leaves) if _is_differentiable(x))
        given = _Given(tuple(leaves), spec, places, under_way)
        others = [self._module.get_parameter(name) for name in self._others]
        tensors = [*(leaves[place] for place in places), *others]
        shards = [weight.weight for weight in self.weights]
        if not self.communicator.gathers_weights:  # the parameters are read as they are
            return self.compute(given, tensors, shards)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *shards)):
            out: Tensor = _Experts.apply(*tensors, *shards, self, given)
            return out
        with self.whole(Phase.FORWARD) as full:
            return self.compute(given, tensors, full)


def _is_differentiable(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Call(nn.Module):
    """A module that runs the code of another one, without its hooks.

    With an `exchange`, it runs for the received tokens of all its ranks.
    """

    def __init__(self, module: nn.Module, exchange: ExpertExchange | None) -> None:
        super().__init__()
        self.module, self._code, self._exchange = module, module.forward, exchange
        if exchange is not None:
            self._code = ExpertSubset(module, exchange.bounds[-1], exchange.own).forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the code; with an `exchange` the args are those that `ShardedExperts` prepares."""
        exchange = self._exchange
        if exchange is None:
            return self._code(*args, **kwargs)
        sent, place, (args, kwargs) = args
        factors = kwargs.get("factors", {})  # the factors of adapters, [E, .., ..] each
        if factors:
            own_of = {n: tuple(x[exchange.own] for x in f) for n, f in factors.items()}
            kwargs = {**kwargs, "factors": own_of}
        compute = on_other_tokens(self._code, (args, kwargs), place)
        read = [*self.module.parameters(), *(x for pair in factors.values() for x in pair)]
        return exchange(compute, sent, read)


class _Given(NamedTuple):
    """The arguments of a call of experts, as a flattened tree."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    places: tuple[int, ...]
    """The indices of the leaves that may have a gradient."""
    under_way: list[list[Pending]]
    """The transfers in flight of the `Sent` among the leaves; empty without an exchange."""


class _Graph(NamedTuple):
    """An inner graph [Note: A graph inside], which keeps alive only the tensors that it saves."""

    begins: tuple[GradientEdge | None, ...]
    """The graph's start at each tensor and then at each whole weight; None: no gradient."""
    ends: GradientEdge | None
    """The graph's end at the output; None if nothing with a gradient was used."""
    under_way: list[list[Pending]]
    """The transfers of the `Sent` that it was recorded with."""

    def leaves(self) -> bool:
        """Return whether its end is connected to a parameter other than through its begins."""
        seen = {begin.node for begin in self.begins if begin is not None}
        ahead: list[Any] = [] if self.ends is None else [self.ends.node]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            if hasattr(node, "variable"):
                return True
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
        return False

    def backward(self, dy: Tensor, needs: Sequence[NeedsGrad]) -> list[Tensor | None]:
        """Return the gradients that are needed, in the order of `begins`; None: it was not used."""
        if self.ends is None:
            return [None] * len(needs)
        begins = [b for b, needs in zip(self.begins, needs, strict=True) if needs and b is not None]
        found = iter(torch.autograd.grad([self.ends], begins, [dy], allow_unused=True))
        return [next(found) if needs else None for needs in needs]


class _Part(NamedTuple):
    """The position of a tensor within a whole weight."""

    weight: int
    """The index of the weight in `ShardedExperts.weights`."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedParts(saved_tensors_hooks):
    """A context in which a graph saves only the position of tensors within whole weights.

    Other tensors go through the saved-tensor hooks that are in use outside. Hooks of a recompute
    are left out: they belong to the backward of the outer graph, and the inner graph has another.
    """

    def __init__(self, experts: ShardedExperts, full: Sequence[Tensor], recomputing: bool) -> None:
        """`full`: the whole weights; `recomputing`: True in a recompute."""
        kinds = [(memory_of(x), x.dtype, int(x.storage_offset())) for x in full]
        hooks = None
        if not recomputing:
            hooks = saved_tensors_hooks_in_use()
        pack_other, unpack_other = hooks or (_same, _same)

        def pack(x: Tensor) -> Any:
            memory = memory_of(x)
            for index, (whole, dtype, offset) in enumerate(kinds):
                if memory == whole and x.dtype == dtype:
                    return _Part(index, x.shape, x.stride(), int(x.storage_offset()) - offset)
                if memory == whole:  # a view of another dtype: its position cannot be restored
                    return pack_other(x.clone())
            return pack_other(x)

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, _Part):
                other: Tensor = unpack_other(saved)
                return other
            whole = experts.reading[saved.weight]
            offset = int(whole.storage_offset()) + saved.offset
            return whole.as_strided(saved.size, saved.stride, offset)

        super().__init__(pack, unpack)


def _same(x: Tensor) -> Tensor:
    return x


class _Begin(Function):
    """The node at which an inner graph begins, at a tensor that it does not keep alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        raise AssertionError("a graph inside was followed beyond its beginning")


class _Experts(Function):
    """forward    y = the module's code, on tensors and whole weights
    backward   their gradients; those of the weights go to the communicator, the last weight first
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        experts: ShardedExperts = inputs[-2]
        given: _Given = inputs[-1]
        tensors = inputs[: -2 - len(experts.weights)]
        ctx.experts, ctx.place, ctx.graph = experts, experts.place(), None
        ctx.under_way = given.under_way
        ctx.save_for_backward(torch.empty(0))  # reading it in backward starts the recompute
        recomputing = experts.communicator.is_recomputing
        with experts.whole(Phase.RECOMPUTE if recomputing else Phase.FORWARD) as full:
            # The first forward of a recomputed block records no graph [Note: A graph again].
            if ctx.place.recomputed and not recomputing:
                experts.recorded.clear()
                return experts.compute(given, tensors, full)
            with torch.enable_grad(), _SavedParts(experts, full, recomputing):
                # `_Begin` needs an input with a gradient, or the graph would have no start there.
                token = torch.empty(0, requires_grad=True)
                begun = [
                    _Begin.apply(x, token) if needed else x.detach()
                    for x, needed in zip((*tensors, *full), ctx.needs_input_grad, strict=False)
                ]
                begins = tuple(get_gradient_edge(x) if x.requires_grad else None for x in begun)
                y = experts.compute(given, begun[: len(tensors)], begun[len(tensors) :])
        ends = get_gradient_edge(y) if y.requires_grad else None
        graph = _Graph(begins, ends, given.under_way)
        experts.check(graph)
        if ctx.place.recomputed:
            experts.recorded[ctx.place.number] = graph
        else:
            ctx.graph = graph
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        experts: ShardedExperts = ctx.experts
        (_,) = ctx.saved_tensors  # reading it computes again [Note: A graph again]
        graph = ctx.graph
        if graph is None:
            graph = experts.recorded.pop(ctx.place.number)
        needs = needs_grad(ctx, len(graph.begins))
        with experts.whole(Phase.BACKWARD) as experts.reading:
            try:
                gradients = graph.backward(dy, needs)
            finally:
                experts.reading = []
        # The transfers of gradients that the inner graph launched are waited for by the nodes that
        # the first forward recorded, outside of it [Note: Launch and wait].
        for first, again in zip(ctx.under_way, graph.under_way, strict=True):
            first[:] = again
        of_weights = range(len(needs) - len(experts.weights), len(needs))
        for weight, i in zip(experts.weights[::-1], of_weights[::-1], strict=True):
            gradients[i] = experts.deliver(weight, gradients[i], needs[i])
        return *gradients, None, None
