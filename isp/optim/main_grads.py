"""`MainGradients`, the one place where gradients end, and the buckets that sum them over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from isp.comm import Channel, Pending
from isp.comm.cargo import Cargo, Purpose
from isp.layers.module import NamedParameter
from isp.layers.weight_gradients import weight_gradient
from isp.parallel import Axis

__all__ = ["DEFAULT_BUCKET_BYTES", "BucketManager", "Channels", "MainGradients", "master_dtype"]

DEFAULT_BUCKET_BYTES = 25 * 2**20


class Channels(Protocol):
    """Lookup of a channel for every axis asked for: a `Mesh`, or a dict."""

    def __getitem__(self, axis: Axis, /) -> Channel: ...


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of main gradients and master weights of a parameter: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(eq=False)
class _GradientBucket:
    """Gradients that travel together."""

    flat: Tensor
    channel: Channel
    cargo: Cargo
    parameters: frozenset[nn.Parameter]
    awaited: set[nn.Parameter]
    pending: Pending | None = field(default=None, init=False)
    """The reduction, from its launch until the next `reset`."""


class BucketManager:
    """Main gradients as views into flat buckets, which are summed over the replicas.

    A bucket holds parameters that are reduced over the same axis, about `bucket_bytes` of them, in
    reverse order of declaration: the order in which a backward pass produces their gradients. It
    may travel once all of them are `mark_ready`, and the rest goes in `finish`.

    [Note: Launch order] Buckets are launched strictly in their order, whatever order they become
    ready in: the ranks' readiness may differ (a parameter that one of them did not use), and
    collectives that meet in different orders deadlock or add up different things.
    """

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        channels: Channels,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        if bucket_bytes < 0:
            raise ValueError(
                f"bucket_bytes={bucket_bytes} must be at least 0 (0: one parameter a bucket)"
            )
        self._buckets: list[_GradientBucket] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, _GradientBucket] = {}
        self._launched = 0
        for members in _grouped(list(parameters), bucket_bytes):
            self._open(members, channels)

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.flat.nbytes for bucket in self._buckets)

    def view(self, parameter: nn.Parameter) -> Tensor:
        """The place of the gradient of `parameter` in its bucket, of the parameter's shape."""
        return self._views[parameter]

    def is_ready(self, parameter: nn.Parameter) -> bool:
        """Whether `mark_ready` has been called: the gradient may be travelling, hands off."""
        return parameter not in self._bucket_of[parameter].awaited

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """The gradient is final; launches every bucket whose turn it is [Note: Launch order]."""
        self._bucket_of[parameter].awaited.discard(parameter)
        while self._launched < len(self) and not self._buckets[self._launched].awaited:
            self._launch_next()

    def finish(self) -> None:
        """Launch what has not been launched, ready or not, and wait until all sums are there."""
        while self._launched < len(self):
            self._buckets[self._launched].awaited.clear()
            self._launch_next()
        self.wait()

    def wait(self) -> None:
        """Wait for the reductions in flight."""
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()

    def reset(self) -> None:
        """Await every gradient anew; the values stay."""
        self.wait()
        self._launched = 0
        for bucket in self._buckets:
            bucket.pending = None
            bucket.awaited = set(bucket.parameters)

    def _launch_next(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.pending = bucket.channel.all_reduce_(bucket.flat, cargo=bucket.cargo)

    def _open(self, members: list[NamedParameter], channels: Channels) -> None:
        first = members[0]
        flat = torch.zeros(
            sum(m.parameter.numel() for m in members),
            dtype=master_dtype(first.parameter.dtype),
            device=first.parameter.device,
        )
        what = f"gradients {first.name} .. {members[-1].name}"
        bucket = _GradientBucket(
            flat=flat,
            channel=channels[first.layout.reduce_over],
            cargo=Cargo(Purpose.REPLICA_GRADIENT, tensor=what),
            parameters=frozenset(m.parameter for m in members),
            awaited={m.parameter for m in members},
        )
        sizes = [m.parameter.numel() for m in members]
        for member, part in zip(members, flat.split(sizes), strict=True):
            self._views[member.parameter] = part.view(member.parameter.shape)
            self._bucket_of[member.parameter] = bucket
        self._buckets.append(bucket)


def _grouped(parameters: list[NamedParameter], bucket_bytes: int) -> list[list[NamedParameter]]:
    """Members of each bucket; buckets in the order in which their last gradients come."""
    open_buckets: dict[tuple[Axis, torch.dtype, torch.device], list[NamedParameter]] = {}
    num_bytes: dict[tuple[Axis, torch.dtype, torch.device], int] = {}
    closed: list[list[NamedParameter]] = []
    for item in reversed(parameters):
        dtype = master_dtype(item.parameter.dtype)
        key = (item.layout.reduce_over, dtype, item.parameter.device)
        open_buckets.setdefault(key, []).append(item)
        num_bytes[key] = num_bytes.get(key, 0) + item.parameter.numel() * dtype.itemsize
        if num_bytes[key] >= bucket_bytes:
            closed.append(open_buckets.pop(key))
            del num_bytes[key]
    place = {item.parameter: i for i, item in enumerate(reversed(parameters))}
    rest = sorted(open_buckets.values(), key=lambda members: place[members[-1].parameter])
    return closed + rest


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
    ) -> None:
        self.parameters = list(parameters)
        _check(self.parameters)
        self._names = {item.parameter: item.name for item in self.parameters}
        self._buckets = BucketManager(self.parameters, channels, bucket_bytes=bucket_bytes)
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

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """The main gradient, of the shape of the local shard; a view that later steps reuse."""
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
