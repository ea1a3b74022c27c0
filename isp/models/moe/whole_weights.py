"""`ShardedExperts`: run the code of a module with experts on whole stacks of their weights.

The code runs between two autograd nodes, which gather the stacks again in backward and free them;
the graph saves positions in the stacks, not the stacks. See [Note: Whole weights] in
docs/design/notes/experts.md.

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
    """The holder of one stack [E, .., ..] of expert weights, as the communicator knows it."""

    bias: nn.Parameter | None = None

    def __init__(self, module: nn.Module, name: str, weight_name: str) -> None:
        self.module = module
        self.name, self.weight_name = name, weight_name
        self.layouts: dict[str, ParameterLayout] = {}
        """The layout of the weight, by local name; `WeightHolders` sets this."""

    @property
    def weight(self) -> nn.Parameter:
        """This rank's shard of the stack."""
        return self.module.get_parameter(self.weight_name)


class ShardedExperts(ABC):
    """A module with experts, whose stacks are gathered together and read by the module's own code.

    The subclasses compute all experts on each rank (`GatherExperts`), or each expert on the ranks
    that have it (`DispatchExperts`).
    """

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
        """Return the summed results of each token's experts, as the module's own forward does."""

    def on_whole(self, code: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return `code(*args)`, run with whole stacks as the module's parameters.

        In backward the stacks are whole again; see [Note: Whole weights]. If weights are not
        gathered, the parameters are whole already.
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
            # The last tensors in `inside` are the stacks, which are no arguments: `zip` ends
            # before.
            for i, x in zip(places, inside, strict=False):
                leaves[i] = x
            with reads.positions_saved(whole):
                y = self._run(code, tree_unflatten(leaves, spec), inside[len(places) :])
        left: Tensor = _Leave.apply(y, tie, reads)
        return left

    @contextmanager
    def whole(self, phase: Phase) -> Iterator[Sequence[Tensor]]:
        """Yield the whole stacks; backward gathers them from the last to the first.

        Waits for all stacks, even if no token of this rank needs them: all ranks must take part in
        each gather, but which weights a rank reads, and when, depends on its tokens.
        """
        turn = slice(None, None, -1 if phase is Phase.BACKWARD else 1)
        with ExitStack() as stack:
            uses = [self.communicator.unshard(w, phase, w.weight) for w in self.weights[turn]]
            full = [stack.enter_context(use) for use in uses]
            yield [one.weight for one in full][turn]

    def _run(
        self, code: Callable[..., Tensor], args: Sequence[Any], whole: Sequence[Tensor]
    ) -> Tensor:
        """Return `code(*args)`, run with `whole` as the module's stacks.

        If the result is a view of a stack, a copy of it is returned.
        """
        names = (weight.weight_name for weight in self.weights)
        with reparametrized(self.module, dict(zip(names, whole, strict=True))):
            y = code(*args)
        # Copy a view of a stack, because the memory of stacks is reused after this.
        return y if _index_in(y, [memory_of(w) for w in whole]) is None else y.clone()

    def run_own(
        self, code: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        """Return `code(*args, **kwargs)`, where `code` is the module's own code, and check it.

        Raises TypeError if the result is not one tensor, and RuntimeError if the code writes into
        its arguments.
        """
        given = [x for x in tensors_in(args, kwargs) if x.is_floating_point()]
        # Leave out inference tensors, of which torch counts no versions.
        given = [x for x in given if not x.is_inference()]
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
        """Pass the gradient `dw` of a whole stack on to the communicator.

        Returns the gradient of the shard if autograd has to deliver it, else None. `needs`: whether
        autograd needs the gradient.
        """
        if not needs:
            return None
        if dw is None:
            # No token used the stack, but all ranks must take part in the reduction.
            dw = weight.weight.new_zeros(weight.layouts[weight.weight_name].global_shape)
        returned = needs is NeedsGrad.VALUE
        return self.communicator.grad_hook(dw, module=weight, returned=returned)


# -- backward ------------------------------------------------------------------------------------


class _Position(NamedTuple):
    """The place of a tensor in a whole stack, from which backward restores the tensor."""

    stack: int
    """The index of the stack in `ShardedExperts.weights`."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _BackwardReads:
    """Gathers the whole stacks for the backward of one call, and frees them.

    Each call has its own object, because several calls of a module may wait for backward.
    """

    def __init__(self, experts: ShardedExperts) -> None:
        self.experts = experts
        self._whole: Sequence[Tensor] = ()
        # If a backward fails, nothing calls `end`. The graph keeps this object; when the graph is
        # freed, Python closes the generator of `ShardedExperts.whole`, which frees the stacks.
        self._use = ExitStack()

    def begin(self) -> None:
        """Gather the weights of all experts of the layer, before a backward reads them."""
        # Free the stacks that an earlier backward of the same graph left if it failed.
        self.end()
        self._whole = self._use.enter_context(self.experts.whole(Phase.BACKWARD))

    def end(self) -> None:
        """Return the buffers of the stacks to the pool, if they are gathered."""
        self._whole = ()
        self._use.close()

    def positions_saved(self, whole: Sequence[Tensor]) -> saved_tensors_hooks:
        """Return a context in which autograd saves a tensor in one of `whole` as its position.

        For other tensors it calls the saved-tensor hooks that are in use outside of this context,
        for example those of a recompute.
        """
        # The closures below must not hold `whole`: the graph would keep the buffers.
        memories = [memory_of(w) for w in whole]
        starts = [(w.dtype, int(w.storage_offset())) for w in whole]
        pack_outside, unpack_outside = saved_tensors_hooks_in_use() or (_same, _same)

        def pack(x: Tensor) -> Any:
            index = _index_in(x, memories)
            if index is None:
                return pack_outside(x)
            dtype, start = starts[index]
            # `as_strided` cannot restore a view with another dtype: save a copy.
            if x.dtype != dtype:
                return pack_outside(x.clone())
            return _Position(index, x.shape, x.stride(), int(x.storage_offset()) - start)

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, _Position):
                other: Tensor = unpack_outside(saved)
                return other
            if not self._whole:
                raise RuntimeError(
                    f"backward reached the code of {self.experts.name} other than through its"
                    f" result, so its weights are not gathered: return everything that needs a"
                    f" gradient as the result, instead of storing it in an attribute for example"
                )
            whole = self._whole[saved.stack]
            start = int(whole.storage_offset())
            return whole.as_strided(saved.size, saved.stride, start + saved.offset)

        return saved_tensors_hooks(pack, unpack)


def _same(x: Tensor) -> Tensor:
    """Return x: a saved-tensor hook that does nothing."""
    return x


def _index_in(x: Tensor, memories: Sequence[int]) -> int | None:
    """Return the index of the whole stack that x is a view of; None if it is no view of a stack.

    `memories`: the storages of the stacks. Views, views of views and detached views have only their
    storage in common.
    """
    memory = memory_of(x)
    return memories.index(memory) if memory in memories else None


class _Enter(Function):
    """The autograd node before the module's own code, which backward reaches last.

    forward   x.., shards.. -> a tie (empty), x.. and the stacks in `whole`, for the code inside
    backward  frees the stacks; passes dW of each on to the communicator, the last one first

    The tie is also an input of `_Leave`, so that backward reaches this node even if no token of
    this rank reaches an expert. It comes here after all nodes that lead to an output of this node.
    Nodes that lead only to other parameters of the module have run by then, too, because autograd
    runs first what was recorded last.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        *inputs, whole, reads = given
        ctx.reads = reads
        # Without this, autograd would allocate zeros as the gradient of a stack that is not used.
        ctx.set_materialize_grads(False)
        num_x = len(inputs) - len(whole)
        # The outputs of the node must be new tensors, because the pool keeps those in `whole`.
        stacks = [w.detach() for w in whole]
        needed = ctx.needs_input_grad[num_x : len(inputs)]
        frozen = [w for w, needs in zip(stacks, needed, strict=True) if not needs]
        ctx.mark_non_differentiable(*frozen)
        # Make the tie on the weights' device, because autograd runs the nodes of each device in its
        # own thread.
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
    """The autograd node after the module's own code, which backward reaches first.

    forward   y, the result of the code; the stacks are freed afterwards
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
        # Read the tie first: in a recomputed block this starts the recompute, which runs up to here
        # with all its gathers and exchanges.
        (tie,) = ctx.saved_tensors
        reads.begin()
        _, reaches_enter = needs_grad(ctx, 2)
        if not reaches_enter:
            # In two cases `_Enter` does not run in backward: `torch.autograd.grad` asks only for a
            # tensor inside, or only biases are trained and x has no gradient. Then free the stacks
            # at the end of the backward pass.
            call_after_backward(reads.end)
        return dy, tie.detach(), None
