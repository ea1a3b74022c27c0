"""Experts of a model: weights [E, .., ..] of one module, gathered as those of linears are.

[Note: A graph inside] Modules differ in how they use their weights: one expert after the other, or
all at once for groups of tokens. So a module's code runs as it is, on whole weights in place of the
shards, and autograd records it in a graph of its own, inside one function of the graph outside. Of
a weight, that graph saves only which part was read: backward gathers the weight again, so the graph
keeps none.

[Note: A graph again] In a recomputed block the graph is recorded by the recompute, and the function
that first went forward takes it from there: nothing is computed a third time.

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
from isp.models.moe.ahead import ComputedAhead
from isp.models.moe.dispatch import ExpertExchange, ExpertSubset, on_other_tokens
from isp.models.roles import expert_stacks
from isp.models.tracing.calls import weights_among

__all__ = ["ExpertPlace", "ExpertWeight", "ShardedExperts"]


class ExpertWeight:
    """One of the weights of experts as the runtime sees it: a holder of a shard."""

    bias: nn.Parameter | None = None

    def __init__(self, module: nn.Module, name: str, weight_name: str) -> None:
        self.module = module
        self.name, self.weight_name = name, weight_name
        self.layouts: dict[str, ParameterLayout] = {}

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter(self.weight_name)


class ExpertPlace(NamedTuple):
    """Where a call comes."""

    number: int
    """Among the calls of its block."""
    recomputed: bool
    """Whether the block is."""


class ShardedExperts:
    """A module that holds experts, whose weights are read together."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: WPCommunicator,
        called: Callable[[], object],
        place: Callable[[], ExpertPlace],
        exchange: ExpertExchange | None = None,
        ahead: ComputedAhead | None = None,
    ) -> None:
        """`called` is called with each call, and `place` gives where in the block that is.

        `exchange`: the ranks that have other experts; None: all are here, or gathered. `ahead`:
        what is computed while tokens or weights are on their way.
        """
        self.weights = tuple(ExpertWeight(module, name, n) for n in expert_stacks(module))
        self.communicator = communicator
        self.name, self.place = name, place
        self._exchange, self._ahead = exchange, ahead
        self.recorded: dict[int, _Graph] = {}
        """By the recompute whose backward is to come, by number [Note: A graph again]."""
        self.reading: Sequence[Tensor] = []
        """The whole weights, while a backward reads them."""
        self._checked = False
        gathered = {weight.weight_name for weight in self.weights}
        self._module, self._call = module, _Call(module, exchange)
        self._others = [n for n, _ in module.named_parameters() if n not in gathered]
        module.register_forward_pre_hook(lambda *_: called() and None)
        if communicator.gathers_weights or exchange is not None:
            module.forward = self.__call__

    @contextmanager
    def whole(self, phase: Phase) -> Iterator[Sequence[Tensor]]:
        """The whole weights, waited for in order, in backward from the last to the first.

        All of them: what is not there is gathered by all ranks, and which tokens go to an expert
        decides on each rank what is read, and when.
        """
        turn = slice(None, None, -1 if phase is Phase.BACKWARD else 1)
        with ExitStack() as stack:
            uses = [self.communicator.unshard(w, phase, w.weight) for w in self.weights[turn]]
            full = [stack.enter_context(use) for use in uses]
            yield [one.weight for one in full][turn]

    def compute(self, given: _Given, tensors: Sequence[Tensor], full: Sequence[Tensor]) -> Tensor:
        """What the module makes of `tensors` and its whole weights.

        Raises TypeError if that is no tensor, RuntimeError if it writes into what it is given.
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
        memory = {memory_of(x) for x in full}  # another's as soon as this is over
        return out.clone() if memory_of(out) in memory else out

    def check(self, graph: _Graph) -> None:
        """Raise RuntimeError if the graph, the first one, leads on to what is outside."""
        if not self._checked and graph.leaves():
            raise RuntimeError(
                f"{self.name} reads a tensor that requires a gradient but is neither an argument"
                f" nor its parameter, so its gradient would be lost: pass it as an argument"
            )
        self._checked = True

    def deliver(self, weight: ExpertWeight, dw: Tensor | None, needs: NeedsGrad) -> Tensor | None:
        """The gradient of a shard for autograd, or None if the communicator brings it."""
        if not needs:
            return None
        if dw is None:  # the other ranks wait for this one's part
            dw = weight.weight.new_zeros(weight.layouts[weight.weight_name].global_shape)
        returned = needs is NeedsGrad.VALUE
        return self.communicator.grad_hook(dw, module=weight, returned=returned)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the module gives."""
        leaves, spec = tree_flatten((args, kwargs))
        tokens, under_way = leaves[0], []
        if self._exchange is not None:
            place = weights_among(leaves, leaves[1])
            assert place is not None, "the trace knows"
            sent = self._exchange.dispatch(tokens, leaves[1], leaves[place])
            under_way = sent.under_way
            leaves[0] = leaves[place] = None
            leaves, spec = tree_flatten(((sent, place, tree_unflatten(leaves, spec)), {}))
        if self._ahead is not None:
            self._ahead.compute(tokens)
        places = tuple(i for i, x in enumerate(leaves) if _is_differentiable(x))
        given = _Given(tuple(leaves), spec, places, under_way)
        others = [self._module.get_parameter(name) for name in self._others]
        tensors = [*(leaves[place] for place in places), *others]
        shards = [weight.weight for weight in self.weights]
        if not self.communicator.gathers_weights:
            return self.compute(given, tensors, shards)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *shards)):
            out: Tensor = _Experts.apply(*tensors, *shards, self, given)
            return out
        with self.whole(Phase.FORWARD) as full:
            return self.compute(given, tensors, full)


def _is_differentiable(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Call(nn.Module):
    """Calls the code of a module's class, and none of its hooks; with the `exchange`, for tokens of
    all its ranks.
    """

    def __init__(self, module: nn.Module, exchange: ExpertExchange | None) -> None:
        super().__init__()
        self.module, self._code, self._exchange = module, module.forward, exchange
        if exchange is not None:
            self._code = ExpertSubset(module, exchange.bounds[-1], exchange.own).forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        exchange = self._exchange
        if exchange is None:
            return self._code(*args, **kwargs)
        sent, place, (args, kwargs) = args
        factors = kwargs.get("factors", {})  # of adapters
        if factors:
            own_of = {n: tuple(x[exchange.own] for x in f) for n, f in factors.items()}
            kwargs = {**kwargs, "factors": own_of}
        compute = on_other_tokens(self._code, (args, kwargs), place)
        read = [*self.module.parameters(), *(x for pair in factors.values() for x in pair)]
        return exchange(compute, sent, read)


class _Given(NamedTuple):
    """What a module is called with."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    places: tuple[int, ...]
    """Those of the leaves that may have a gradient."""
    under_way: list[list[Pending]]
    """Of the `Sent` among them."""


class _Graph(NamedTuple):
    """A graph inside [Note: A graph inside]; it keeps no tensor that it does not save."""

    begins: tuple[GradientEdge | None, ...]
    """At each tensor and then each whole weight; None at those without a gradient."""
    ends: GradientEdge | None
    """None if nothing that has a gradient was used: no token went to an expert."""
    under_way: list[list[Pending]]
    """What travels to those who `Sent` its tokens."""

    def leaves(self) -> bool:
        """Whether there is a way from its end to a parameter that is not by its begins."""
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
        """The gradients that are needed, in the order of `begins`; None of what was not used."""
        if self.ends is None:
            return [None] * len(needs)
        begins = [b for b, needs in zip(self.begins, needs, strict=True) if needs and b is not None]
        found = iter(torch.autograd.grad([self.ends], begins, [dy], allow_unused=True))
        return [next(found) if needs else None for needs in needs]


class _Part(NamedTuple):
    """A tensor that lies in a whole weight."""

    weight: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedParts(saved_tensors_hooks):
    """In this context a graph saves, of tensors within whole weights, only where they lie.

    Others go through the hooks that were there before, but not through those of a recompute: these
    know what to compute again for by the backward that asks, and a graph inside has its own.
    """

    def __init__(self, experts: ShardedExperts, full: Sequence[Tensor], recomputing: bool) -> None:
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
                if memory == whole:
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
    """Where a graph begins, at a tensor that it does not keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        raise AssertionError("a graph inside was followed beyond its beginning")


class _Experts(Function):
    """forward   y = the module's code, on tensors and whole weights
    backward   their gradients; those of the weights, last one first, to the communicator
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        experts: ShardedExperts = inputs[-2]
        given: _Given = inputs[-1]
        tensors = inputs[: -2 - len(experts.weights)]
        ctx.experts, ctx.place, ctx.graph = experts, experts.place(), None
        ctx.under_way = given.under_way
        ctx.save_for_backward(torch.empty(0))  # who reads it has what was not kept computed again
        recomputing = experts.communicator.is_recomputing
        with experts.whole(Phase.RECOMPUTE if recomputing else Phase.FORWARD) as full:
            if ctx.place.recomputed and not recomputing:
                experts.recorded.clear()
                return experts.compute(given, tensors, full)
            with torch.enable_grad(), _SavedParts(experts, full, recomputing):
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
        for first, again in zip(ctx.under_way, graph.under_way, strict=True):
            first[:] = again  # for who recorded the first [Note: Launch and wait]
        of_weights = range(len(needs) - len(experts.weights), len(needs))
        for weight, i in zip(experts.weights[::-1], of_weights[::-1], strict=True):
            gradients[i] = experts.deliver(weight, gradients[i], needs[i])
        return *gradients, None, None
