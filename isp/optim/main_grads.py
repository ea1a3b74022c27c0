"""`MainGradients`, the one place where gradients end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from isp.comm import Channel
from isp.layers.module import NamedParameter
from isp.layers.weight_gradients import weight_gradient
from isp.optim.buckets import BucketManager, Channels
from isp.optim.rows import DEFAULT_BUCKET_BYTES
from isp.parallel import Axis

__all__ = ["MainGradients"]


class MainGradients:
    """Gradients of this rank's parameters, float32 at least, summed over micro-batches and ranks.

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

    With `rows_of`, the channel of a zero1 group, a rank may have the sums of its own rows alone
    (`BucketManager`), which `summed` gives.

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
        parameters: Iterable[NamedParameter],
        channels: Channels,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        rows_of: Channel | None = None,
    ) -> None:
        self.parameters = list(parameters)
        _check(self.parameters)
        self._names = {item.parameter: item.name for item in self.parameters}
        self._buckets = BucketManager(
            self.parameters, channels, bucket_bytes=bucket_bytes, rows_of=rows_of
        )
        self._untouched = set(self._names)
        """Parameters whose buffer holds the last step's values: the first gradient overwrites."""
        self._owed: Counter[nn.Parameter] = Counter()
        self._passed: set[nn.Parameter] = set()
        """Parameters with which the last backward pass is through."""
        self._last = False
        self._reduced = False
        self._hooks = [
            item.parameter.register_post_accumulate_grad_hook(self._collect_leaf)
            for item in self.parameters
        ]

    @property
    def reduced(self) -> bool:
        """Whether `reduce` has been called since `zero`."""
        return self._reduced

    @property
    def num_bytes(self) -> int:
        return self._buckets.num_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes that sums in flight take besides, where a rank adds up itself."""
        return self._buckets.received_bytes

    @property
    def scatters(self) -> bool:
        """Whether `summed` gives the rows of this rank alone."""
        return self._buckets.scatters

    @property
    def spread_over(self) -> Axis:
        """The ranks that have every sum of the model once between them, by `summed`.

        What is replicated in a weight group each of its ranks has.
        """
        return Axis.WORLD if self.scatters else Axis.MODEL

    def zero(self) -> None:
        """Begin a step: every gradient is zero, and no backward pass is the last one yet."""
        if owed := self._owed_names():
            raise RuntimeError(f"gradients were promised and not delivered: {owed}")
        self._buckets.reset()
        for parameter in self._names:
            parameter.grad = None
        self._untouched = set(self._names)
        self._passed.clear()
        self._last = self._reduced = False

    @property
    def owed(self) -> bool:
        """Whether a gradient was promised and has not been delivered."""
        return bool(self._owed_names())

    def abandon(self) -> None:
        """Forget what was promised: the step failed, and `zero` begins another."""
        self._owed.clear()

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

    def promise(self, parameter: nn.Parameter) -> None:
        """Announce one `add` of this parameter; called before the backward of its use returns.

        Raises RuntimeError if the parameter's gradient was final already.
        """
        self._require_open(parameter)
        self._owed[parameter] += 1

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that did not come through autograd; keeps the promise if there is one.

        Raises RuntimeError if the parameter's gradient was final already.
        """
        self._accumulate(parameter, gradient)
        self.withdraw(parameter)

    def add_product(self, parameter: nn.Parameter, dy: Tensor, x: Tensor) -> None:
        """Add the weight gradient dy^T x, as `add` does: dy [N, O], x [N, I].

        It is multiplied straight into the main gradient where `weight_gradient` can.
        """
        view, fresh = self._open(parameter)
        weight_gradient(dy, x, into=view, add=not fresh)
        self.withdraw(parameter)

    def withdraw(self, parameter: nn.Parameter) -> None:
        """Take a promise back, or count it as kept."""
        if self._owed[parameter]:
            self._owed[parameter] -= 1
        self._settle(parameter)

    def collect(self, parameter: nn.Parameter) -> None:
        """Take `parameter.grad`, if there is one, and note that this backward pass is through.

        The leaves' hooks do this; who computes gradients without autograd's accumulation calls it.
        """
        if parameter.grad is not None:
            self._accumulate(parameter, parameter.grad)
            parameter.grad = None
        if self._last:
            self._passed.add(parameter)
        self._settle(parameter)

    def reduce(self) -> None:
        """Sum over the ranks: launch the buckets that are not on their way yet, wait for all."""
        if owed := self._owed_names():
            raise RuntimeError(f"gradients were promised and not delivered: {owed}")
        if self._reduced:
            raise RuntimeError("these gradients are reduced already: zero() begins a new step")
        for parameter in self._untouched:
            self._buckets.view(parameter).zero_()
        self._untouched.clear()
        self._buckets.finish()
        self._reduced = True

    def summed(self, parameter: nn.Parameter) -> Tensor:
        """The sums that this rank needs, once reduced: its rows if it `scatters`, else `grad`."""
        return self._buckets.rows(parameter) if self.scatters else self.grad(parameter)

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """The reduced gradient, of the shape of the local shard: a collective if it `scatters`."""
        assert self._reduced, "sums are there after reduce()"
        return self._buckets.whole(parameter)

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """The main gradient, of the shape of the local shard; a view that later steps reuse.

        Where sums are scattered that is this rank's part of them, and of use until `reduce`.
        """
        assert not (self._reduced and self.scatters), "a rank has rows of the sums: `summed`"
        view = self._buckets.view(parameter)
        if parameter in self._untouched:
            self._untouched.remove(parameter)
            view.zero_()
        return view

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _collect_leaf(self, leaf: Tensor) -> None:
        assert isinstance(leaf, nn.Parameter)
        self.collect(leaf)

    def _accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        view, fresh = self._open(parameter)
        if fresh:
            view.copy_(gradient)
        else:
            view.add_(gradient)

    def _open(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """The buffer to add to, and whether what it holds is of no interest any more."""
        self._require_open(parameter)
        fresh = parameter in self._untouched
        self._untouched.discard(parameter)
        return self._buckets.view(parameter), fresh

    def _require_open(self, parameter: nn.Parameter) -> None:
        if self._reduced or self._buckets.is_ready(parameter):
            raise RuntimeError(
                f"a gradient of {self._names[parameter]} came after its last one: zero() begins a"
                f" new step, expect_last() belongs before the last backward pass of a step, and"
                f" what is delivered after a backward pass has to be promised; between steps"
                f" torch.autograd.grad gives gradients that are not kept"
            )

    def _settle(self, parameter: nn.Parameter) -> None:
        """Tell the buckets if the gradient is final [Note: When a gradient is final]."""
        if parameter not in self._passed or self._owed[parameter]:
            return
        if parameter in self._untouched:
            self._untouched.remove(parameter)
            self._buckets.view(parameter).zero_()
        self._buckets.mark_ready(parameter)

    def _owed_names(self) -> list[str]:
        return [name for parameter, name in self._names.items() if self._owed[parameter]]


def _check(parameters: list[NamedParameter]) -> None:
    """Raise ValueError for what can have no main gradient."""
    if not parameters:
        raise ValueError(
            "no weight of this rank is trained: train one of each pipeline stage, or use"
            " parallel.pipeline.size=1"
        )
    names: dict[nn.Parameter, str] = {}
    for name, parameter, layout in parameters:
        if not parameter.requires_grad:
            raise ValueError(f"{name} requires no gradient: leave it out")
        if parameter in names:
            raise ValueError(f"{name} is {names[parameter]}: name a shared parameter once")
        if tuple(parameter.shape) != layout.local_shape:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, its layout says {layout.local_shape}"
            )
        names[parameter] = name
