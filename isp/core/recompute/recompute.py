"""Recomputation of activations in backward, and the inputs of parts that are kept for it.

[Note: Not reentrant] A recompute runs when backward first reads a tensor that was not kept, like
`torch.utils.checkpoint` without reentrance. A backward within the backward would end the pass early
for code that waits for its end, such as the data-parallel wrappers.

[Note: A forward that fails] Torch 2.11 leaves its saved-tensor hooks installed if a function
raises, and a training loop that continues would save under them. So the function returns normally
to torch, and its exception is raised afterwards.

[Note: Held in its place] The arguments of a recompute live as long as its graph. So instead of its
input it gets something else, from which the input is restored: a shard of it, a copy in host
memory, or a `Segment`. Autograd keeps that if it is a tensor; if it is none, it lives as long as
the graph all the same.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from isp.core.autograd import Function
from isp.core.comm import Channel
from isp.core.comm.channel import check_channel
from isp.core.comm.host_offload import HostMemory, Stored
from isp.core.comm.tag import MAPPING, Purpose, Tag
from isp.core.mesh.partition import chunk_range, divide
from isp.core.rng import RngSnapshot, RngStatesTracker
from isp.core.torch_private import storage_key

__all__ = [
    "CheckpointWithoutOutput",
    "HostInputs",
    "Recomputer",
    "Restore",
    "Segment",
    "checkpoint",
    "gather_split_1d_tensor",
    "in_parts",
    "split_tensor_into_1d_equal_chunks",
]

Restore = Callable[[Any], Tensor]
"""A function that restores a tensor, without a graph, from what is held in its place."""

_TAG = Tag(Purpose.BLOCK_INPUT, tensor="block input")


def in_parts(x: Tensor, channel: Channel) -> tuple[Tensor, Restore]:
    """Return 1/p of the elements of x, which is equal on all ranks of `channel`, and its restore.

    Raises ValueError if p does not divide the number of elements.
    """
    shape = x.shape
    part = split_tensor_into_1d_equal_chunks(x, channel, new_buffer=True)
    return part, lambda part: gather_split_1d_tensor(part, channel, tag=_TAG).view(shape)


class HostInputs:
    """Inputs in host memory, copied back one ahead of their use.

    Backward reads the inputs of a forward pass in reverse order, and passes in the order of their
    forwards. When one is read, the copy of the next is launched. The last input stored stays on the
    device, too, until the next one is stored: a backward right after its forward reads it at once.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._passes: deque[list[weakref.ref[Stored]]] = deque()
        self._latest: weakref.ref[Stored] | None = None

    def begin(self) -> None:
        """Begin another forward pass."""
        while self._passes and not _alive(self._passes[0]):
            self._passes.popleft()
        self._passes.append([])

    def __call__(self, x: Tensor, restore: Restore) -> tuple[Stored, Restore]:
        """Store x in host memory; return what is held in its place, and its restore."""
        if self._latest is not None and (latest := self._latest()) is not None:
            latest.leave()
        stored = self._memory.store(x, tag=_TAG)
        self._latest = weakref.ref(stored)
        if not self._passes:
            self.begin()
        self._passes[-1].append(self._latest)
        return stored, lambda stored: restore(self._fetched(stored))

    def _fetched(self, stored: Stored) -> Tensor:
        x = stored.get()
        if (following := self._next(stored)) is not None:
            following.fetch()
        return x

    def _next(self, stored: Stored) -> Stored | None:
        """Return the input that backward reads after this one; None: none is left."""
        passes = [_alive(kept) for kept in self._passes]
        own = next(kept for kept in passes if stored in kept)
        if place := own.index(stored):
            return own[place - 1]
        return next((kept[-1] for kept in passes if kept and kept is not own), None)


def _alive(kept: list[weakref.ref[Stored]]) -> list[Stored]:
    """Return the inputs whose graphs still exist."""
    return [stored for ref in kept if (stored := ref()) is not None]


class Segment:
    """Consecutive parts, each of which takes the result of the one before; keeps the first input.

    If a part returns a tuple, the next takes its first element. Further arguments are kept.

    When backward first reads the input of a later part, all parts before it are computed again, in
    order, which restores the inputs of all of them.
    """

    def __init__(self, first: Callable[[], Tensor]) -> None:
        """`first` restores the input of the first part."""
        self._first = first
        self._again: list[Callable[[Tensor], Any]] = []
        self._inputs: dict[int, Tensor] = {}
        self._given: weakref.ref[Tensor] | None = None

    def follows(self, x: Tensor) -> bool:
        """Return whether x is the result of the last part."""
        return self._given is not None and self._given() is x

    def add(self, again: Callable[[Tensor], Any]) -> Restore:
        """Add a part, which `again` computes without a graph; return the restore of its input."""
        number = len(self._again)
        self._again.append(again)
        return lambda _: self._input(number)

    def gave(self, y: Any) -> None:
        """Set the result of the last part."""
        x = _first(y)
        self._given = weakref.ref(x) if isinstance(x, Tensor) else None

    def _input(self, number: int) -> Tensor:
        """Return the input of a part, computing it and those before it from the first.

        Backward reads the last part's input first, so the others are there when it reads them.
        """
        if number not in self._inputs:
            x = self._first()
            for index, again in enumerate(self._again[:number]):
                self._inputs[index] = x
                x = _first(again(x))
            self._inputs[number] = x
        return self._inputs.pop(number)


def _first(given: Any) -> Any:
    return given[0] if isinstance(given, tuple) else given


R = TypeVar("R")

Announce = Callable[[], AbstractContextManager[None]]
"""A function that returns the context in which a recompute runs; it announces the phase."""


def checkpoint(
    function: Callable[..., R],
    distribute_saved_activations: bool,
    *args: Any,
    tracker: RngStatesTracker,
    channel: Channel | None = None,
    announce: Announce = nullcontext,
) -> R:
    """Return `function(*args)`, whose activations are dropped and computed again in backward.

    The recompute draws the random numbers of the forward again, from every stream of `tracker` and
    from its device's own generator. With `distribute_saved_activations` the first of `args`, which
    must be the same on all ranks of `channel`, is kept as 1/p of its elements on each rank, and
    gathered again for the recompute: one all-gather in backward.

    Raises ValueError if the elements of that argument do not divide by p.
    Source: Megatron-LM, core/tensor_parallel/random; Korthikanti et al. 2022.
    """
    if distribute_saved_activations:
        if channel is None:
            raise ValueError("distribute_saved_activations needs the channel to distribute over")
        check_channel("channel", channel)
        if channel.size > 1 and torch.is_grad_enabled():
            held, restore = in_parts(args[0].detach(), channel)
            function, args = _with_first_held(function, args, held, restore)
    return _checkpoint(function, args, tracker, announce)


def _checkpoint(
    function: Callable[..., R],
    args: Sequence[Any],
    tracker: RngStatesTracker,
    announce: Announce,
    snapshot: RngSnapshot | None = None,
) -> R:
    """Return `function(*args)`, computed again in backward with the random numbers of `snapshot`.

    `snapshot`: state of the random streams before `function`; None: the current one.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    snapshot = snapshot or tracker.snapshot()
    failed: list[BaseException] = []
    going_forward = True

    def run(*args: Any) -> R | None:
        if not going_forward:
            with tracker.replaying(snapshot), announce():
                return function(*args)
        try:
            return function(*args)
        except BaseException as error:
            failed.append(error)  # [Note: A forward that fails]
            return None

    out = torch_checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # the tracker does it, for every stream
    )
    going_forward = False
    if failed:
        raise failed.pop()  # so that no frame of its traceback holds it
    return cast(R, out)


def _with_first_held(
    function: Callable[..., R], args: Sequence[Any], held: Any, restore: Restore
) -> tuple[Callable[..., R], tuple[Any, ...]]:
    """Return a function of `held`, in place of the first argument, and its arguments.

    Its first call, in forward, uses the original argument, so that autograd follows it. Later
    calls, in backward, need only its values, and restore them from `held`.
    """
    first, *rest = args
    needs_grad = first.requires_grad
    whole = [first]

    def of_held(held: Any, *rest: Any) -> R:
        if whole:  # popped: the recompute must not keep the original argument alive
            return function(whole.pop(), *rest)
        return function(restore(held).requires_grad_(needs_grad), *rest)

    return of_held, (held, *rest)


class _Ticket(Function):
    """Returns tensors as they are, and saves an empty one: reading that starts their recompute."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(xs[0].new_empty(0))
        return xs

    @staticmethod
    def backward(ctx: Any, *dxs: Tensor | None) -> tuple[Tensor | None, ...]:
        return dxs


class CheckpointWithoutOutput:
    """Drops the output of a recomputed part, too, and restores it shortly before its gradient.

        part = CheckpointWithoutOutput(tracker=tracker)
        y = part.checkpoint(function, x)
        z = consumer(y)                                  # saves y for its backward
        part.discard_output_and_register_recompute(z)

    The memory of y is freed at once. It is filled again when the gradient of z arrives, by the one
    recompute that `function` needs for its own backward in any case. Use it once. All operations
    that save y must come before z, and nothing may read y afterwards. Inside a part that is
    recomputed by the same tracker it saves no memory, and computes once more.

    Source: Megatron-LM, core/tensor_parallel/random.
    """

    def __init__(self, *, tracker: RngStatesTracker, announce: Announce = nullcontext) -> None:
        self._tracker = tracker
        self._announce = announce
        self._outputs: tuple[Tensor, ...] | None = None
        # [Note: No way back] The recompute must not refer to the output, whose graph refers to the
        # recompute: Python does not see this cycle, so its memory would never be freed.
        self._dropped: list[torch.UntypedStorage] = []

    def checkpoint(self, function: Callable[..., R], *args: Any) -> R:
        """Return `function(*args)`: a tensor, or a tuple of tensors.

        Raises ValueError if an output shares its memory with an argument.
        """
        if self._outputs is not None:
            raise RuntimeError("a CheckpointWithoutOutput is used once: make another")
        dropped = self._dropped

        def with_ticket(*args: Any) -> Any:
            out = function(*args)
            outs = _as_tuple(out)
            _restore(dropped, _storages(outs))
            ticketed = _Ticket.apply(*outs)
            return ticketed if isinstance(out, tuple) else ticketed[0]

        out: R = _checkpoint(with_ticket, args, self._tracker, self._announce)
        outs = _as_tuple(out)
        kept = {storage_key(s) for s in _storages([a for a in args if isinstance(a, Tensor)])}
        if any(storage_key(s) in kept for s in _storages(outs) if s.nbytes()):
            raise ValueError("an output shares its memory with an argument: it cannot be dropped")
        self._outputs = outs
        return out

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the memory of the output until the gradient of `hook_tensor` arrives.

        Does nothing without a backward, or in a recompute, whose tensors backward is about to read.
        Raises ValueError if the output has a backward but `hook_tensor` has none.
        """
        if not self._outputs:
            raise RuntimeError("there is no output yet, or it was dropped already")
        node = next((y.grad_fn for y in self._outputs if y.requires_grad), None)
        if node is not None and not hook_tensor.requires_grad:
            raise ValueError("the output could not be restored: hook_tensor requires no gradient")
        outputs, self._outputs = self._outputs, ()
        if node is None or self._tracker.replays:
            return
        ticket: Any = node
        hook_tensor.register_hook(lambda _: _read(ticket))
        for storage in _storages(outputs):
            self._dropped.append(storage)
            storage.resize_(0)


def _read(ticket: Any) -> None:
    """Start the recompute, by reading the tensor that the ticket saved."""
    _ = ticket.saved_tensors


def _as_tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _storages(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, once each, in order."""
    found = {storage_key(t.untyped_storage()): t.untyped_storage() for t in tensors}
    return list(found.values())


@torch.no_grad()
def _restore(dropped: list[torch.UntypedStorage], computed: list[torch.UntypedStorage]) -> None:
    """Fill dropped storages, if any, with computed values.

    It writes to storages, as writing to tensors counts as a change, after which autograd refuses
    to use those that it has saved.
    """
    if not dropped:
        return
    for storage, source in zip(dropped, computed, strict=True):
        storage.resize_(source.nbytes())
        storage.copy_(source)
    dropped.clear()


class Recomputer:
    """Recomputation of a model's parts; made once for a model, for use by one thread.

    Inside a part that is recomputed as a whole, nothing else is recomputed.
    """

    def __init__(
        self,
        *,
        tracker: RngStatesTracker,
        announce: Announce = nullcontext,
        distribute_over: Channel | None = None,
        offload_to: HostMemory | None = None,
        segment: int = 0,
    ) -> None:
        """Set what is kept of a part's first argument; by default all of it.

        `distribute_over`  1/p of it on each rank of a channel whose ranks all have the same;
        `offload_to`       a copy in host memory of what would be kept on the device;
        `segment`          nothing, except for the first of so many parts: see `Segment`.
        """
        self._tracker = tracker
        self._announce = announce
        self._channel = distribute_over
        self._host = None if offload_to is None else HostInputs(offload_to)
        self._segment_size = segment
        self._segment: weakref.ref[Segment] | None = None
        self._number = 0
        """Number of parts in this pass so far."""
        self._latest: tuple[weakref.ref[Tensor], weakref.ref[Any], Restore] | None = None
        """First argument of the last part, what is held in its place, and the restore."""

    def begin(self) -> None:
        """Begin a forward pass through the model."""
        self._segment = self._latest = None
        self._number = 0
        if self._host is not None and torch.is_grad_enabled():
            self._host.begin()

    def __call__(self, fn: Callable[..., R], *args: Any) -> R:
        """Return `fn(*args)`, computed again in backward; `__init__` says what is kept for that.

        Raises ValueError if segments are on and the first of `args` is not the result of the part
        before.
        """
        if not torch.is_grad_enabled():
            return fn(*args)
        snapshot, part, segment = self._tracker.snapshot(), fn, None
        if self._segment_size:
            segment, restore = self._in_segment(fn, args, snapshot)
            part, args = _with_first_held(part, args, segment, restore)
        elif self._channel is not None or self._host is not None:
            held, restore = self._keep(args[0])
            part, args = _with_first_held(part, args, held, restore)
        out = _checkpoint(part, args, self._tracker, self._announce, snapshot)
        if segment is not None:
            segment.gave(out)
        return out

    def _keep(self, x: Tensor) -> tuple[Any, Restore]:
        """Return what is held in place of x; the same for two parts in a row that take x."""
        if self._latest is not None:
            of, latest, restore = self._latest
            if of() is x and (held := latest()) is not None:
                return held, restore
        held, restore = x.detach(), lambda held: held
        if self._channel is not None and self._channel.size > 1:
            held, restore = in_parts(held, self._channel)
        if self._host is not None:
            held, restore = self._host(held, restore)
        self._latest = weakref.ref(x), weakref.ref(held), restore
        return held, restore

    def _in_segment(
        self, part: Callable[..., Any], args: tuple[Any, ...], snapshot: RngSnapshot
    ) -> tuple[Segment, Restore]:
        """Return the segment that `part` belongs to, and the restore of its first argument."""
        x, *rest = args
        segment = None if self._segment is None else self._segment()
        number, self._number = self._number, self._number + 1
        if segment is None or number % self._segment_size == 0:  # None: its parts have no graph
            held, restore = self._keep(x)
            segment = Segment(lambda: restore(held))
            self._segment = weakref.ref(segment)
        elif not segment.follows(x):
            raise ValueError(
                "model.checkpoint_segment computes the input of a block from that of the block"
                " before, but here blocks take something else than the one before gives: use 0"
            )

        def again(x: Tensor) -> Any:
            replaying = self._tracker.replaying(snapshot)
            with torch.no_grad(), replaying, self._announce():
                return part(x, *rest)

        return segment, segment.add(again)


def split_tensor_into_1d_equal_chunks(
    x: Tensor, channel: Channel, *, new_buffer: bool = False
) -> Tensor:
    """Return this rank's 1/p of the elements of x, flat: a view, or with `new_buffer` a copy.

    Not differentiable across ranks. Raises ValueError if the number of elements does not divide.
    """
    check_channel("channel", channel)
    divide(x.numel(), channel.size)
    part = chunk_range(x.numel(), channel.size, channel.rank)
    chunk = x.reshape(-1)[part.start : part.stop]
    return chunk.clone() if new_buffer else chunk


@torch.no_grad()
def gather_split_1d_tensor(chunk: Tensor, channel: Channel, *, tag: Tag = MAPPING) -> Tensor:
    """Gather the elements of all ranks' equal chunks, flat; not differentiable."""
    check_channel("channel", channel)
    return channel.all_gather(chunk.reshape(-1), tag=tag).wait()
