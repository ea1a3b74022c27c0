"""Kept calls of a recomputed part: the recompute reuses their results instead of calling again.

See [Note: Kept calls] and [Note: Watched] in docs/design/notes/recomputation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from isp.core.autograd import Function
from isp.core.tensors import memory_of, tensors_in
from isp.core.torch_private import (
    TorchDispatchMode,
    argument_schemas,
    saved_tensors_hooks_in_use,
    version_of,
)

__all__ = ["KeptCalls", "Needs"]


class Needs(NamedTuple):
    """Which kept calls of a part must keep their results for a recompute, by index of the call.

    See [Note: Watched] in docs/design/notes/recomputation.md.
    """

    values: frozenset[int]
    """The calls whose results a recompute reads; the results of other calls are not kept."""
    written: frozenset[int]
    """The calls whose results the part overwrites after the call: a copy of each is kept."""


class _Result(NamedTuple):
    """The result of a kept call, and what is known of the tensor if it is not kept itself."""

    packed: Any
    """The result, packed by the saved-tensor hooks outside of the part; None: it is not kept."""
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class KeptCalls:
    """The kept calls of one part in one forward [Note: Kept calls].

    Make it outside of the part, so that results are packed by the saved-tensor hooks there.
    """

    def __init__(self, kinds: Collection[str], known: dict[Hashable, Needs], key: Hashable) -> None:
        """Keep calls of these `kinds`.

        `known`: the needs of parts by key. If `key` is missing, the first pass through the part is
        watched and its needs are added.
        """
        self._kinds = kinds
        self._again = False
        """True after the first pass: further passes are recomputes."""
        hooks: Any = saved_tensors_hooks_in_use()
        self._pack: Callable[[Tensor], Any] = hooks[0] if hooks else _same
        self._unpack: Callable[[Any], Tensor] = hooks[1] if hooks else _same
        self._known, self._key = known, key
        self._watch: _Watch | None = None
        self._results: list[_Result] = []
        self._next = 0

    def _keeps(self, kind: str) -> bool:
        """Return True if calls of this kind are kept; without gradients, no call is."""
        return kind in self._kinds and torch.is_grad_enabled()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Return a context for a pass through the part: first its forward, then its recomputes."""
        if not torch.is_grad_enabled():
            yield
            return
        # Calls are known by their number: a recompute makes the same calls in the same order.
        self._next = 0
        needs = self._known.get(self._key)
        if self._again or needs is not None:
            yield
        else:
            self._watch = _Watch()
            with self._watch, self._watch.saved():
                yield
            # All results are kept until here: only now is it known which are not needed.
            needs, self._watch = self._watch.needs(), None
            self._known[self._key] = needs
            self._results = [
                result if number in needs.values else result._replace(packed=None)
                for number, result in enumerate(self._results)
            ]
        self._again = True

    def __call__(
        self, kind: str, call: Callable[[], Tensor], dropped: Tensor | None = None
    ) -> Tensor:
        """Return `call()` in the forward, and its kept result in a recompute.

        `dropped`: an input of the call that is recomputed instead of kept, although the call saves
        it for its backward; None: all that the call saves is kept.
        """
        if not self._keeps(kind):
            return call()
        number, self._next = self._next, self._next + 1
        # Hold the output, not its node: before torch 2.13, a node's saved tensors are freed with
        # its output.
        holder = None if dropped is None else _Input.apply(dropped, _token())
        if self._again:
            return self._given(number)
        with self._saved_outside(dropped, holder):
            y = call()
        needs = self._known.get(self._key)
        kept = needs is None or number in needs.values or not y.is_floating_point()
        # A copy if the part writes into y, or may write: the recompute needs the old values.
        copied = needs is None or number in needs.written
        packed = self._pack(y.detach().clone() if copied else y.detach()) if kept else None
        self._results.append(_Result(packed, y.shape, y.dtype, y.device, y.requires_grad))
        if self._watch is not None:
            self._watch.made(number, y)
        return y

    def _given(self, number: int) -> Tensor:
        """Return the kept result of call `number`, or NaN if a recompute does not read it."""
        packed, shape, dtype, device, requires_grad = self._results[number]
        if packed is None:
            y = torch.full(shape, torch.nan, dtype=dtype, device=device)
        else:
            y = self._unpack(packed).detach()
            y = y.clone() if number in self._known[self._key].written else y
        given: Tensor = _GivenAgain.apply(y, _token()) if requires_grad else y
        return given

    def _saved_outside(self, dropped: Tensor | None, holder: Any) -> saved_tensors_hooks:
        """Return a context in which a call saves its tensors, all but `dropped`.

        The other tensors are saved by the saved-tensor hooks that are in use outside of the part,
        so they do not depend on its recompute. The first saved tensor that is `dropped` or a view
        of it is replaced by a `_View`: to unpack it, the saved tensor of the node of `holder`
        (`_Input`) is read, which starts the part's recompute.
        """
        left = [] if dropped is None else [memory_of(dropped)]
        offset = 0 if dropped is None else int(dropped.storage_offset())

        def pack(x: Tensor) -> Any:
            # If x is `dropped` or a view of it in the same dtype, it can be made of the recomputed
            # input by strides. Only the first such x is replaced.
            if left and memory_of(x) == left[0] and x.dtype == dtype:
                left.clear()
                return _View(x.shape, x.stride(), int(x.storage_offset()) - offset)
            return self._pack(x)

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, _View):
                own: Tensor = self._unpack(saved)
                return own
            (again,) = holder.grad_fn.saved_tensors
            found: Tensor = again.as_strided(*saved[:2], again.storage_offset() + saved.offset)
            return found

        dtype = None if dropped is None else dropped.dtype
        return saved_tensors_hooks(pack, unpack)


class _View(NamedTuple):
    """Size, stride and offset of a view of a dropped input."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Input(Function):
    """Saves the input of a call; reading it from the node of the output starts the recompute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return token.detach()


class _GivenAgain(Function):
    """Returns a kept result that requires a gradient, and that the part may write into.

    It has no backward: the recompute only restores saved tensors and is not differentiated.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor) -> Tensor:
        return y.detach()


def _token() -> Tensor:
    """Return an empty tensor that requires a gradient, to give an autograd function a node."""
    return torch.empty(0, requires_grad=True)


class _Watch(TorchDispatchMode):
    """A dispatch mode that records which values of a part depend on results of kept calls.

    See [Note: Watched] in docs/design/notes/recomputation.md.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made_of: dict[int, frozenset[int]] = {}
        """For each storage, the indices of the kept calls on whose results its values depend."""
        self._values: frozenset[int] = frozenset()
        """Indices of the kept calls on whose results any saved tensor depends."""
        self._results: dict[int, tuple[Tensor, int]] = {}
        """Each call's result and its version, by number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # By storage, so that views of a result, and writes into them, are followed.
        given = map(memory_of, tensors_in(args, kwargs))
        of = frozenset[int]().union(*(self._made_of.get(memory, ()) for memory in given))
        for x in tensors_in(out, *self._written(func, args, kwargs)):
            self._made_of[memory_of(x)] = of
        return out

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        """Yield the arguments that an operation writes into, as it may not return them."""
        for index, argument in enumerate(argument_schemas(func)):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield args[index] if index < len(args) else (kwargs or {}).get(argument.name)

    def made(self, number: int, y: Tensor) -> None:
        """Record y as the result of kept call `number`."""
        self._made_of[memory_of(y)] = frozenset([number])
        self._results[number] = y.detach(), version_of(y)

    def saved(self) -> saved_tensors_hooks:
        """Return a context that records which tensors are saved for backward."""
        pack_other, unpack = saved_tensors_hooks_in_use()

        def pack(x: Tensor) -> Any:
            self._values |= self._made_of.get(memory_of(x), frozenset())
            return pack_other(x)

        return saved_tensors_hooks(pack, unpack)

    def needs(self) -> Needs:
        """Return which kept calls must keep their results for a recompute of the watched part."""
        written = {n for n, (y, version) in self._results.items() if version_of(y) > version}
        return Needs(self._values, frozenset(written))


def _same(x: Tensor) -> Tensor:
    """Return x; takes the place of pack and unpack if no saved-tensor hooks are in use."""
    return x
