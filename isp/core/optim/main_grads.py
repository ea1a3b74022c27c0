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

    Gradients come in two ways. One that autograd accumulates is moved from `p.grad` by a hook, and
    `p.grad` is None again. One that a communicator still has to reduce is announced by `promise`
    inside the custom backward, which returns None for the leaf, and delivered by `add`.

        gradients.zero()
        for i, batch in enumerate(batches):
            if i == len(batches) - 1:
                gradients.expect_last()     # buckets may travel while this backward still runs
            loss(batch).backward()
        gradients.reduce()
        gradients.grad(parameter)           # the sum, on every rank of the layout's `reduce_over`

    If it `scatters`, a rank gets the sums of its own rows only, from `summed`.

    Overlap changes no bits: the same buckets are summed by the same collectives with and without
    `expect_last`. All reductions are sums; for a mean, scale the loss.

    [Note: When a gradient is final] In the last backward pass the hook of a leaf fires once, after
    all uses of the parameter have been added up. The gradient is final then, or, if promises are
    outstanding, with the last `add`. A later gradient raises RuntimeError, as its bucket may be in
    flight. A parameter whose hook never fires contributes what it has (zeros, if nothing) when
    `reduce` launches the remaining buckets.
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
        self._leaves = [whole.parameter for whole in by_whole(self.parameters)]
        self._hooks = after_gradients(self, MainGradients.collect, self._leaves)

    def zero(self) -> None:
        """Begin a step: set all gradients to zero, and expect further backward passes."""
        if owed := self._owed_names():
            raise RuntimeError(f"gradients were promised and not delivered: {owed}")
        self.reset()
        for leaf in self._leaves:
            leaf.grad = None
        self._last = self.reduced = False

    @property
    def owed(self) -> bool:
        """True if a gradient was promised and has not been delivered."""
        return bool(self._owed_names())

    def abandon(self) -> None:
        """Forget all promises, after a step that failed; `zero` then begins another.

        Gradients in flight have to be delivered before: they would be added to the next step's.
        """
        for gradient in self.gradients:
            gradient.owed, gradient.receives, gradient.waiting = 0, False, None

    def expect_last(self) -> None:
        """Declare the next backward pass the step's last: each bucket is reduced once complete."""
        self._last = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Declare backward passes in this context not the step's last, despite `expect_last`."""
        before, self._last = self._last, False
        try:
            yield
        finally:
            self._last = before

    def promise(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        """Announce one `add` for this parameter, before the backward of its use returns.

        For the first promise of a step, if the main gradient has this `dtype`, returns the main
        gradient's buffer to receive the gradient in. It is not touched until it is passed to `add`.
        Raises RuntimeError if the parameter's gradient is final already.
        """
        gradient = self._whole_of[id(parameter)]
        if self.reduced or gradient.ready:
            raise self._too_late(gradient)
        gradient.owed += 1
        if not gradient.untouched or gradient.view.dtype != dtype:
            return None
        gradient.receives = True
        return gradient.open()

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that autograd does not deliver, keeping its promise if there is one.

        Raises RuntimeError if the parameter's gradient is final already.
        """
        found = self._whole_of[id(parameter)]
        new: Tensor | None = gradient
        # Received in place: only gradients that came meanwhile are left to add.
        if found.receives and gradient is found.view:
            new, found.waiting, found.receives = found.waiting, None, False
        if new is not None:
            self._accumulate(found, new)
        if found.owed:
            found.owed -= 1
        self._settle(found)

    def add_product(self, parameter: nn.Parameter, dy: OutputGradient, x: Tensor) -> None:
        """Add the weight gradient dy^T x of dy [N, O] and x [N, I], without a tensor in between.

        Keeps no promise: code that made one calls `withdraw`. Raises RuntimeError if the
        parameter's gradient is final already.
        """
        gradient = self._whole_of[id(parameter)]
        if self.reduced or gradient.ready:
            raise self._too_late(gradient)
        buffer, fresh = gradient.sum_in()
        weight_gradient(dy, x, into=buffer, add=not fresh)

    def withdraw(self, parameter: nn.Parameter) -> None:
        """Count a promise as kept without a gradient."""
        gradient = self._whole_of[id(parameter)]
        if gradient.owed:
            gradient.owed -= 1
        self._settle(gradient)

    def collect(self, parameter: nn.Parameter) -> None:
        """Move `parameter.grad`, if any, here, and mark the parameter as done in this backward.

        The leaves' hooks call this; code that computes gradients without autograd's accumulation
        calls it itself.
        """
        gradient, value = self._whole_of[id(parameter)], parameter.grad
        if value is not None:
            self._accumulate(gradient, value)
            parameter.grad = None
        if self._last:
            gradient.passed = True
        self._settle(gradient)

    def reduce(self) -> None:
        """Sum over the ranks: launch the buckets that are not in flight, then wait for all."""
        if owed := self._owed_names():
            raise RuntimeError(f"gradients were promised and not delivered: {owed}")
        if self.reduced:
            raise RuntimeError("these gradients are reduced already: zero() begins a new step")
        for gradient in self.gradients:
            gradient.value()
        self.finish()
        self.reduced = True

    def summed(self, parameter: nn.Parameter) -> Tensor:
        """Return the reduced sums that this rank needs: its rows if it `scatters`, else `grad`."""
        if not self.scatters:
            return self.grad(parameter)
        return self.rows(self.of(parameter))

    def came(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank has had a gradient of `parameter` in this step, even zeros."""
        return self._whole_of[id(parameter)].came

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """Return the reduced gradient of the local shard: a collective if it `scatters`."""
        assert self.reduced, "sums are there after reduce()"
        return self.all_rows(self.of(parameter))

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """Return the main gradient, in the local shard's shape; a view that later steps reuse.

        If it `scatters`, this may be called only before `reduce`.
        """
        assert not (self.reduced and self.scatters), "a rank has rows of the sums: `summed`"
        gradient = self._whole_of[id(parameter)]
        assert not gradient.receives, f"a gradient of {gradient.name} is on its way"
        gradient.value()
        return self.of(parameter).view

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _accumulate(self, gradient: MainGradient, value: Tensor) -> None:
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
            f" expect_last() must be called before the last backward pass of a step, and"
            f" gradients delivered after a backward pass must be announced; between steps,"
            f" torch.autograd.grad gives gradients that are not kept"
        )

    def _settle(self, gradient: MainGradient) -> None:
        """Mark the gradient as ready if it is final [Note: When a gradient is final]."""
        if gradient.passed and not gradient.owed and not gradient.receives:
            if gradient.untouched:
                gradient.value()  # zeros
            self.mark_ready(gradient)

    def _owed_names(self) -> list[str]:
        return [found.name for found in self.gradients if found.owed or found.receives]


def _check(parameters: list[ShardedParameter]) -> None:
    """Raise ValueError for a parameter that cannot have a main gradient."""
    names: dict[nn.Parameter, str] = {}
    for item in parameters:
        name, parameter, layout = item.name, item.parameter, item.layout
        if not parameter.requires_grad:
            raise ValueError(f"{name} requires no gradient: leave it out")
        if parameter in names:
            raise ValueError(f"{name} is also {names[parameter]}: pass a shared parameter once")
        if tuple(parameter.shape) != layout.local_shape:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, its layout says {layout.local_shape}"
            )
        names[parameter] = name
