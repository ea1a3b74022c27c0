"""`MainGradients`, the one place where gradients end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from isp.core.autograd import after_gradients
from isp.core.comm import Channel, Channels
from isp.core.optim.buckets import DEFAULT_BUCKET_BYTES, BucketManager, Gradient
from isp.core.weights.gather_reduce import WriteGradient
from isp.core.weights.sharded_parameter import ShardedParameter, by_whole

__all__ = ["MainGradients"]


class MainGradients(BucketManager):
    """Gradients of this rank's parameters, summed over micro-batches, and over ranks in buckets.

    Two routes lead in. What autograd accumulates is taken from `p.grad` as soon as it is there,
    and `p.grad` is None again. What a communicator still has to reduce is announced by `promise`
    inside the custom backward, which returns None for the leaf, and delivered by `add`.

        gradients.zero()
        for i, batch in enumerate(batches):
            if i == len(batches) - 1:
                gradients.expect_last()     # buckets may travel while this backward still runs
            loss(batch).backward()
        gradients.reduce()
        gradients.grad(parameter)           # the sum, on every rank of the layout's `reduce_over`

    Where it `scatters`, a rank has the sums of its own rows alone, which `summed` gives.

    Overlap changes no bits: the same buckets are summed by the same collectives with and without
    `expect_last`. All reductions are sums; a mean is the loss's business.

    [Note: When a gradient is final] In the last backward pass the hook of a leaf fires once, after
    all uses of the parameter have been added up. The gradient is final then, unless promises are
    outstanding; in that case with the last `add`. What comes later raises, because its bucket may
    be travelling already. A parameter whose hook never fires contributes what it has (nothing:
    zeros) when `reduce` launches the rest.
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
        """Whether `reduce` has been called since `zero`."""
        self._leaves = [whole.parameter for whole in by_whole(self.parameters)]
        self._hooks = after_gradients(self, MainGradients.collect, self._leaves)

    def zero(self) -> None:
        """Begin a step: every gradient is zero, and no backward pass is the last one yet."""
        if owed := self._owed_names():
            raise RuntimeError(f"gradients were promised and not delivered: {owed}")
        self.reset()
        for leaf in self._leaves:
            leaf.grad = None
        self._last = self.reduced = False

    @property
    def owed(self) -> bool:
        """Whether a gradient was promised and has not been delivered."""
        return bool(self._owed_names())

    def abandon(self) -> None:
        """Forget what was promised: the step failed, and `zero` begins another.

        What is on its way has to be delivered before: it would end in the next step's gradients.
        """
        for gradient in self.gradients:
            gradient.owed, gradient.receives, gradient.waiting = 0, False, None

    def expect_last(self) -> None:
        """The next backward pass is the step's last: reduce each bucket once it is complete."""
        self._last = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context are not the step's last, whatever was said before."""
        before, self._last = self._last, False
        try:
            yield
        finally:
            self._last = before

    def promise(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        """Announce one `add` of this parameter; called before the backward of its use returns.

        The first one of a step may, if it is of this `dtype`, be received in the main gradient
        itself, which is not touched until it is given to `add`. Raises RuntimeError if the
        parameter's gradient was final already.
        """
        gradient = self._whole_of[id(parameter)]
        self._require_open(gradient)
        gradient.owed += 1
        if not gradient.untouched or gradient.view.dtype != dtype:
            return None
        gradient.receives = True
        return gradient.open()

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that did not come through autograd; keeps the promise if there is one.

        Raises RuntimeError if the parameter's gradient was final already.
        """
        found = self._whole_of[id(parameter)]
        new: Tensor | None = gradient
        if found.receives and gradient is found.view:
            new, found.waiting, found.receives = found.waiting, None, False
        if new is not None:
            self._accumulate(found, new)
        self._keep_promise(found)

    def add_by(self, parameter: nn.Parameter, write: WriteGradient) -> None:
        """Let `write` put a gradient into the main gradient, or add it there, as `add` does."""
        gradient = self._whole_of[id(parameter)]
        self._require_open(gradient)
        buffer, fresh = gradient.sum_in()
        write(into=buffer, add=not fresh)
        self._keep_promise(gradient)

    def withdraw(self, parameter: nn.Parameter) -> None:
        """Take a promise back, or count it as kept."""
        self._keep_promise(self._whole_of[id(parameter)])

    def collect(self, parameter: nn.Parameter) -> None:
        """Take `parameter.grad`, if there is one, and note that this backward pass is through.

        The leaves' hooks do this; who computes gradients without autograd's accumulation calls it.
        """
        gradient = self._whole_of[id(parameter)]
        if parameter.grad is not None:
            self._accumulate(gradient, parameter.grad)
            parameter.grad = None
        gradient.passed = gradient.passed or self._last
        self._settle(gradient)

    def reduce(self) -> None:
        """Sum over the ranks: launch the buckets that are not on their way yet, wait for all."""
        if owed := self._owed_names():
            raise RuntimeError(f"gradients were promised and not delivered: {owed}")
        if self.reduced:
            raise RuntimeError("these gradients are reduced already: zero() begins a new step")
        for gradient in self.gradients:
            gradient.value()
        self.finish()
        self.reduced = True

    def summed(self, parameter: nn.Parameter) -> Tensor:
        """The sums that this rank needs, once reduced: its rows if it `scatters`, else `grad`."""
        if not self.scatters:
            return self.grad(parameter)
        return self.rows(self.of(parameter))

    def came(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank has had a gradient of `parameter` in this step, zeros or not."""
        return self._whole_of[id(parameter)].came

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """The reduced gradient, of the shape of the local shard: a collective if it `scatters`."""
        assert self.reduced, "sums are there after reduce()"
        return self.all_rows(self.of(parameter))

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """The main gradient, of the shape of the local shard; a view that later steps reuse.

        Where sums are scattered that is this rank's part of them, and of use until `reduce`.
        """
        assert not (self.reduced and self.scatters), "a rank has rows of the sums: `summed`"
        gradient = self._whole_of[id(parameter)]
        assert not gradient.receives, f"a gradient of {gradient.name} is on its way"
        gradient.value()
        return self.of(parameter).view

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _accumulate(self, gradient: Gradient, value: Tensor) -> None:
        self._require_open(gradient)
        buffer, fresh = gradient.sum_in()
        if fresh:
            buffer.copy_(value)
        else:
            buffer.add_(value)

    def _require_open(self, gradient: Gradient) -> None:
        if self.reduced or gradient.ready:
            raise RuntimeError(
                f"a gradient of {gradient.name} came after its last one: zero() begins a new step,"
                f" expect_last() must be called before the last backward pass of a step, and"
                f" gradients delivered after a backward pass must be announced; between steps,"
                f" torch.autograd.grad gives gradients that are not kept"
            )

    def _keep_promise(self, gradient: Gradient) -> None:
        if gradient.owed:
            gradient.owed -= 1
        self._settle(gradient)

    def _settle(self, gradient: Gradient) -> None:
        """Tell the buckets if the gradient is final [Note: When a gradient is final]."""
        if gradient.passed and not gradient.owed and not gradient.receives:
            gradient.value()
            self.mark_ready(gradient)

    def _owed_names(self) -> list[str]:
        return [found.name for found in self.gradients if found.owed or found.receives]


def _check(parameters: list[ShardedParameter]) -> None:
    """Raise ValueError for what can have no main gradient."""
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
