"""`ShardedExperts`: a module with stacks of expert weights, and its code on whole stacks.

[Note: Whole weights] A whole stack is in a buffer that is given back at the end of each use: one in
forward, one in backward. So the module's own code runs between two autograd nodes. `_Leave`, which
backward reaches first, gathers the stacks again, and `_Enter`, which it reaches last, gives them
back and delivers their gradients. While the code runs, a tensor in a whole stack is saved for
backward as its position there, so that the graph keeps no buffer.

E experts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from isp.core.autograd import Function, once_differentiable
from isp.core.layers.linear import NeedsGrad, needs_grad
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.phase import Phase
from isp.core.tensors import memory_of, tensors_in
from isp.core.torch_private import (
    call_after_backward,
    reparametrized,
    saved_tensors_hooks_in_use,
    tree_flatten,
    tree_unflatten,
    version_of,
)
from isp.core.weights.wp_communicator import WPCommunicator
from isp.models.forwards import ModuleForward
from isp.models.moe.ahead import ComputedAhead
from isp.models.roles import expert_stacks

__all__ = ["ExpertWeight", "ShardedExperts"]


class ExpertWeight:
    """One stack [E, .., ..] of expert weights as the communicator sees it: a holder of a shard."""

    bias: nn.Parameter | None = None

    def __init__(self, module: nn.Module, name: str, weight_name: str) -> None:
        self.module = module
        self.name, self.weight_name = name, weight_name
        self.layouts: dict[str, ParameterLayout] = {}
        """The layout of the weight, by local name; `WeightHolders` sets it."""

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter(self.weight_name)


class ShardedExperts(ABC):
    """A module with experts, whose stacks are read together; a subclass says by which rank."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: WPCommunicator,
        ahead: ComputedAhead | None,
    ) -> None:
        """`ahead`: the module that is computed while weights or tokens are in flight."""
        self.module, self.name, self.communicator = module, name, communicator
        self.weights = tuple(ExpertWeight(module, name, n) for n in expert_stacks(module))
        self.ahead = ahead
        self.own_code: ModuleForward
        """The module's own code; `wrap` sets it."""

    @abstractmethod
    def wrap(self, inner: ModuleForward) -> ModuleForward:
        """Return the forward of the experts on this rank; the wrapper `Wrap.COMPUTE`."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the experts of all tokens, as the module's forward."""

    def on_whole(self, code: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return `code(*args)`, with whole stacks as the module's parameters.

        [Note: Whole weights] says how backward reads them. Without gathered weights the parameters
        are read as they are.
        """
        if not self.communicator.gathers_weights:
            return code(*args)
        if not torch.is_grad_enabled():
            with self.whole(Phase.FORWARD) as whole:
                return self._run(code, args, whole)
        leaves, spec = tree_flatten(args)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        inputs = [*(leaves[i] for i in places), *(weight.weight for weight in self.weights)]
        reads = _BackwardReads(self)
        with self.whole(Phase.FORWARD) as whole:
            tie, *inside = _Enter.apply(*inputs, whole, reads)
            for i, x in zip(places, inside, strict=False):  # the rest are the stacks
                leaves[i] = x
            with reads.positions_saved(whole):
                y = self._run(code, tree_unflatten(leaves, spec), inside[len(places) :])
        left: Tensor = _Leave.apply(y, tie, reads)
        return left

    @contextmanager
    def whole(self, phase: Phase) -> Iterator[Sequence[Tensor]]:
        """Yield the whole stacks, gathered in order, or in backward from the last to the first.

        All are waited for, even if no token of this rank needs them: gathering takes all ranks, and
        the tokens of each rank decide what is read there, and when.
        """
        turn = slice(None, None, -1 if phase is Phase.BACKWARD else 1)
        with ExitStack() as stack:
            uses = [self.communicator.unshard(w, phase, w.weight) for w in self.weights[turn]]
            full = [stack.enter_context(use) for use in uses]
            yield [one.weight for one in full][turn]

    def _run(
        self, code: Callable[..., Tensor], args: Sequence[Any], whole: Sequence[Tensor]
    ) -> Tensor:
        """Return `code(*args)` with `whole` as the stacks of the module; never a view of them."""
        names = (weight.weight_name for weight in self.weights)
        with reparametrized(self.module, dict(zip(names, whole, strict=True))):
            y = code(*args)
        # The memory of the stacks is reused after this.
        return y if _index_in(y, [memory_of(w) for w in whole]) is None else y.clone()

    def run_own(
        self, code: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        """Return `code(*args, **kwargs)`, the module's own code.

        Raises TypeError if the result is not one tensor, and RuntimeError if the code writes into
        its arguments.
        """
        given = [x for x in tensors_in(args, kwargs) if x.is_floating_point()]
        given = [x for x in given if not x.is_inference()]  # these count no writes
        versions = [version_of(x) for x in given]
        y = code(*args, **kwargs)
        if not isinstance(y, Tensor):
            raise TypeError(
                f"{self.name} returns a {type(y).__name__}: experts must return one tensor"
            )
        if versions != [version_of(x) for x in given]:
            raise RuntimeError(
                f"{self.name} modifies an input tensor in place, which gradients would not see:"
                f" return a new tensor instead"
            )
        return y

    def deliver(self, weight: ExpertWeight, dw: Tensor | None, needs: NeedsGrad) -> Tensor | None:
        """Give the gradient of a whole stack to the communicator.

        Returns the gradient of the shard if autograd has to deliver it, else None.
        """
        if not needs:
            return None
        if dw is None:  # no token went to an expert, but all ranks take part in the reduce-scatter
            dw = weight.weight.new_zeros(weight.layouts[weight.weight_name].global_shape)
        returned = needs is NeedsGrad.VALUE
        return self.communicator.grad_hook(dw, module=weight, returned=returned)


# -- backward ------------------------------------------------------------------------------------


class _Position(NamedTuple):
    """The position of a tensor within a whole stack."""

    stack: int
    """The index of the stack in `ShardedExperts.weights`."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _BackwardReads:
    """The whole stacks that the backward of one call reads.

    It belongs to the call, not to the module: several calls may be in flight. If backward fails on
    its way, the use ends with this object, which the graph keeps.
    """

    def __init__(self, experts: ShardedExperts) -> None:
        self.experts = experts
        self._whole: Sequence[Tensor] = ()
        # After a backward that failed, the use ends when the graph is freed, and with it this
        # object: Python then closes the generator of `ShardedExperts.whole`.
        self._use = ExitStack()

    def begin(self) -> None:
        """Gather the stacks."""
        self.end()  # that of an earlier backward of the same graph, if it failed
        self._whole = self._use.enter_context(self.experts.whole(Phase.BACKWARD))

    def end(self) -> None:
        """Give the buffers of the stacks back, if there are any."""
        self._whole = ()
        self._use.close()

    def positions_saved(self, whole: Sequence[Tensor]) -> saved_tensors_hooks:
        """Return a context in which a tensor in one of `whole` is saved as its position.

        Other tensors go through the hooks that are in use outside, of a recompute for example.
        """
        # No closure may hold `whole`, which would keep the buffers in the graph.
        memories = [memory_of(w) for w in whole]
        starts = [(w.dtype, int(w.storage_offset())) for w in whole]
        pack_outside, unpack_outside = saved_tensors_hooks_in_use() or (_same, _same)

        def pack(x: Tensor) -> Any:
            index = _index_in(x, memories)
            if index is None:
                return pack_outside(x)
            dtype, start = starts[index]
            if x.dtype != dtype:  # a view as another dtype: its position cannot be restored
                return pack_outside(x.clone())
            return _Position(index, x.shape, x.stride(), int(x.storage_offset()) - start)

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, _Position):
                other: Tensor = unpack_outside(saved)
                return other
            if not self._whole:
                raise RuntimeError(
                    f"backward reached the code of {self.experts.name} other than through its"
                    f" result, while its weights are not gathered: return all that needs a"
                    f" gradient as the result, not in an attribute for example"
                )
            whole = self._whole[saved.stack]
            start = int(whole.storage_offset())
            return whole.as_strided(saved.size, saved.stride, start + saved.offset)

        return saved_tensors_hooks(pack, unpack)


def _same(x: Tensor) -> Tensor:
    return x


def _index_in(x: Tensor, memories: Sequence[int]) -> int | None:
    """Return the index of the storage of x among `memories`, of whole stacks; None: it has another.

    The storage is all that views, views of views and detached views have in common.
    """
    memory = memory_of(x)
    return memories.index(memory) if memory in memories else None


class _Enter(Function):
    """forward   x.., shards.. -> a tie (empty), x.. and the stacks in `whole`, for the code inside
    backward  ends the use of the stacks, gives dW of each to the communicator, the last one first

    The tie goes to `_Leave`, so backward comes here even if no token of this rank reaches an
    expert. It does so when it has run all nodes that lead to an output, and, as autograd first runs
    what was recorded last, all that only lead to other parameters that the code reads.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        *inputs, whole, reads = given
        ctx.reads = reads
        # Without this, autograd would make zeros of the size of a stack that is not used.
        ctx.set_materialize_grads(False)
        num_x = len(inputs) - len(whole)
        stacks = [w.detach() for w in whole]  # new tensors: the pool keeps its own
        needed = ctx.needs_input_grad[num_x : len(inputs)]
        frozen = [w for w, needs in zip(stacks, needed, strict=True) if not needs]
        ctx.mark_non_differentiable(*frozen)
        # On the device of the weights: autograd runs the nodes of each device in a thread.
        tie = whole[0].new_empty(0)
        return tie, *(x.detach() for x in inputs[:num_x]), *stacks

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: Tensor | None, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        reads: _BackwardReads = ctx.reads
        reads.end()
        experts, found, needs = reads.experts, [*gradients], needs_grad(ctx, len(gradients))
        of_stacks = range(len(found) - len(experts.weights), len(found))
        for weight, i in zip(experts.weights[::-1], of_stacks[::-1], strict=True):
            found[i] = experts.deliver(weight, found[i], needs[i])
        return *found, None, None


class _Leave(Function):
    """forward   y of the code inside, after which the stacks are given back
    backward  gathers the stacks, and waits for them
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, tie: Tensor, reads: _BackwardReads) -> Tensor:
        ctx.reads = reads
        ctx.save_for_backward(tie)
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        reads: _BackwardReads = ctx.reads
        # First of all: in a recomputed block, reading it starts the recompute, which runs up to
        # here with all its gathers and exchanges.
        (tie,) = ctx.saved_tensors
        reads.begin()
        _, reaches_enter = needs_grad(ctx, 2)
        if not reaches_enter:
            # `torch.autograd.grad` asks for something inside alone, or only biases are trained and
            # x has no gradient: the stacks stay whole until the end of the backward pass.
            call_after_backward(reads.end)
        return dy, tie.detach(), None
