"""`MainGradients`, which accumulates all gradients of a step and sums them over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from isp.core.autograd import after_gradients
from isp.core.comm import Channel, Channels
from isp.core.optim.buckets import DEFAULT_BUCKET_BYTES, BucketManager, MainGradient
from isp.core.weights.gradients import OutputGradient, weight_gradient
from isp.core.weights.sharded_parameter import ShardedParameter, by_whole

__all__ = ["MainGradients"]


class MainGradients(BucketManager):
    """Gradients of this rank's parameters, summed over micro-batches, and over ranks in buckets.

    A gradient that autograd accumulates is moved from `p.grad` by a hook, which sets `p.grad` to
    None again. A gradient that a communicator has to reduce first is announced by `promise` in the
    custom backward, which returns None for the leaf, and delivered later by `add`.

        gradients.zero()
        for i, batch in enumerate(batches):
            if i == len(batches) - 1:
                gradients.expect_last()     # buckets may be reduced while this backward runs
            loss(batch).backward()
        gradients.reduce()
        gradients.grad(parameter)           # the sum, on all ranks of `ParameterLayout.reduce_over`

    If `scatters` is True, a rank gets only the sums of its own rows, from `summed`.

    Overlap changes no bits: the same buckets are summed by the same collectives with and without
    `expect_last`. All reductions are sums; for a mean, scale the loss. See
    [Note: When a gradient is final] in docs/design/notes/optimizer.md.
    """

    def __init__(
        self,
        parameters: Iterable[ShardedParameter],
        channels: Channels,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        rows_of: Channel | None = None,
    ) -> None:
        self.parameters = list(parameters)
        _check(self.parameters)
        super().__init__(self.parameters, channels, bucket_bytes=bucket_bytes, rows_of=rows_of)
        self._last = False
        self.reduced = False
        """True if `reduce` has been called since `zero`."""
        # Autograd sees a fused parameter as one leaf and accumulates one gradient for it, so hooks
        # are registered on fused parameters, not on the parameters that they contain.
        self._leaves = [whole.parameter for whole in by_whole(self.parameters)]
        self._hooks = after_gradients(self, MainGradients.collect, self._leaves)

    def zero(self) -> None:
        """Begin a step: set all gradients to zero. `expect_last` declares its last backward pass.

        Raises RuntimeError if promised gradients of the last step were not delivered.
        """
        if names := self._open_promises():
            raise RuntimeError(
                f"gradients of the last step were promised and not delivered: {names}; deliver them"
                f" (ISPCommunicator.finish), or call abandon() if the step failed"
            )
        self.reset()
        for leaf in self._leaves:
            leaf.grad = None
        self._last = self.reduced = False

    @property
    def has_open_promises(self) -> bool:
        """True if a gradient was promised and not delivered yet."""
        return bool(self._open_promises())

    def abandon(self) -> None:
        """Forget all promises, after a step that failed; `zero` can then begin another step.

        Call `finish` of the communicator before this: gradients that are still in flight would be
        delivered later, and added to the gradients of the next step.
        """
        for gradient in self.gradients:
            gradient.open_promises, gradient.receives, gradient.waiting = 0, False, None

    def expect_last(self) -> None:
        """Declare that the next backward pass is the step's last: buckets are reduced during it."""
        self._last = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Treat backward passes in this context as not the step's last, despite `expect_last`."""
        before, self._last = self._last, False
        try:
            yield
        finally:
            self._last = before

    def promise(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        """Announce that `add` will be called once for `parameter`, after the backward of its use.

        If it is the step's first gradient and the main gradient has this `dtype`, returns the main
        gradient's buffer, to receive the gradient in; nothing else is added to the buffer until it
        is passed to `add`. Raises RuntimeError if the parameter's gradient is final already.
        """
        gradient = self._whole_of[id(parameter)]
        if self.reduced or gradient.ready:
            raise self._too_late(gradient)
        gradient.open_promises += 1
        # Only a first gradient may be received in the buffer: a later one would overwrite a sum.
        if not gradient.untouched or gradient.view.dtype != dtype:
            return None
        gradient.receives = True
        return gradient.open()

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that autograd does not deliver; closes one promise, if there is one.

        Raises RuntimeError if the parameter's gradient is final already.
        """
        found = self._whole_of[id(parameter)]
        new: Tensor | None = gradient
        # This gradient was received in the buffer itself, so it is there already. Add only the
        # gradients that other calls have added during the transfer.
        if found.receives and gradient is found.view:
            new, found.waiting, found.receives = found.waiting, None, False
        if new is not None:
            self._accumulate(found, new)
        if found.open_promises:
            found.open_promises -= 1
        self._settle(found)

    def add_product(self, parameter: nn.Parameter, dy: OutputGradient, x: Tensor) -> None:
        """Add the weight gradient dy^T x of dy [N, O] and x [N, I], by a matmul into the buffer.

        Closes no promise: code that made one calls `withdraw`. Raises RuntimeError if the
        parameter's gradient is final already.
        """
        gradient = self._whole_of[id(parameter)]
        if self.reduced or gradient.ready:
            raise self._too_late(gradient)
        buffer, fresh = gradient.sum_in()
        weight_gradient(dy, x, into=buffer, add=not fresh)

    def withdraw(self, parameter: nn.Parameter) -> None:
        """Cancel one promise for `parameter`: the promised gradient will not be added."""
        gradient = self._whole_of[id(parameter)]
        if gradient.open_promises:
            gradient.open_promises -= 1
        self._settle(gradient)

    def collect(self, parameter: nn.Parameter) -> None:
        """Add `parameter.grad` to the main gradient, set it to None, and record that backward ran.

        Autograd's hook of the parameter calls this after it has accumulated the gradient of a
        backward pass. Code that computes gradients without autograd's accumulation calls it, too.
        """
        gradient, value = self._whole_of[id(parameter)], parameter.grad
        if value is not None:
            self._accumulate(gradient, value)
            parameter.grad = None
        # The hook runs once in a backward pass, after all uses of the parameter. In the step's last
        # backward pass, autograd accumulates nothing after this.
        if self._last:
            gradient.passed = True
        self._settle(gradient)

    def reduce(self) -> None:
        """Sum all gradients over the ranks: launch the remaining buckets, then wait for all."""
        if names := self._open_promises():
            raise RuntimeError(
                f"gradients were promised and not delivered: {names}; call"
                f" ISPCommunicator.finish() before reduce()"
            )
        if self.reduced:
            raise RuntimeError("these gradients are reduced already: call zero() for a new step")
        # Where this rank had no gradient in this step, set the buffer to zeros: other ranks may
        # have had one.
        for gradient in self.gradients:
            gradient.value()
        self.finish()
        self.reduced = True

    def summed(self, parameter: nn.Parameter) -> Tensor:
        """Return the reduced sums that this rank needs: of its rows if `scatters`, else of all."""
        if not self.scatters:
            return self.grad(parameter)
        return self.rows(self.of(parameter))

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Return True if this rank has had a gradient of `parameter` in this step, even zeros."""
        return self._whole_of[id(parameter)].has_gradient

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """Return the reduced gradient of the local shard; a collective if `scatters`."""
        assert self.reduced, "call reduce() first"
        return self.all_rows(self.of(parameter))

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """Return the main gradient, in the local shard's shape; a view that later steps reuse.

        If `scatters`, this may be called only before `reduce`.
        """
        assert not (self.reduced and self.scatters), "only rows of the sums exist: call summed()"
        gradient = self._whole_of[id(parameter)]
        assert not gradient.receives, f"a gradient of {gradient.name} is in flight"
        gradient.value()
        return self.of(parameter).view

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _accumulate(self, gradient: MainGradient, value: Tensor) -> None:
        """Add `value` to a main gradient; raise RuntimeError if that is final already."""
        if self.reduced or gradient.ready:
            raise self._too_late(gradient)
        buffer, fresh = gradient.sum_in()
        if fresh:
            buffer.copy_(value)
        else:
            buffer.add_(value)

    def _too_late(self, gradient: MainGradient) -> RuntimeError:
        """Return the error for a gradient whose bucket may be in flight already."""
        return RuntimeError(
            f"a gradient of {gradient.name} came after its last one: zero() begins a new step,"
            f" expect_last() must be called before the last backward pass of a step, and promise()"
            f" before a gradient that add() delivers after its backward pass; between steps,"
            f" torch.autograd.grad returns gradients without accumulating them"
        )

    def _settle(self, gradient: MainGradient) -> None:
        """Mark the gradient as ready if it is final [Note: When a gradient is final]."""
        if gradient.passed and not gradient.open_promises and not gradient.receives:
            if gradient.untouched:
                gradient.value()  # sets the buffer to zeros, as there was no gradient in this step
            self.mark_ready(gradient)

    def _open_promises(self) -> list[str]:
        """Return the names of parameters with promised gradients that were not delivered."""
        return [found.name for found in self.gradients if found.open_promises or found.receives]


def _check(parameters: list[ShardedParameter]) -> None:
    """Raise ValueError for a parameter that cannot have a main gradient."""
    names: dict[nn.Parameter, str] = {}
    for item in parameters:
        name, parameter, layout = item.name, item.parameter, item.layout
        if not parameter.requires_grad:
            raise ValueError(f"{name} requires no gradient: pass only trained parameters")
        if parameter in names:
            raise ValueError(f"{name} is also {names[parameter]}: pass a shared parameter once")
        if tuple(parameter.shape) != layout.local_shape:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, but its ParameterLayout gives this"
                f" rank a shard of shape {layout.local_shape}: pass the shard, or the"
                f" ParameterLayout of this rank"
            )
        names[parameter] = name
