"""Recomputation of activations in backward, and the inputs of parts that are kept for it.

A *part* is a function that is recomputed as a whole, such as a block. It is recomputed when
backward first reads a tensor that was not kept. See [Note: Not reentrant] and
[Note: Held in its place] in docs/design/notes/recomputation.md.
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
"""A function that restores a tensor, without a graph, from the object held in its place."""

_TAG = Tag(Purpose.BLOCK_INPUT, tensor="block input")


def in_parts(x: Tensor, channel: Channel) -> tuple[Tensor, Restore]:
    """Return this rank's 1/p of the elements of x, and a function that gathers x again.

    x must be equal on all ranks of `channel`. Raises ValueError if p does not divide the number of
    its elements.
    """
    shape = x.shape
    part = split_tensor_into_1d_equal_chunks(x, channel, new_buffer=True)
    return part, lambda part: gather_split_1d_tensor(part, channel, tag=_TAG).view(shape)


class HostInputs:
    """Keeps the inputs of recomputed parts in host memory until backward reads them.

    When an input is read, the copy to the device of the input that is read next is launched. The
    order of reads is known: backward reads the inputs of one forward from the last to the first,
    and several forwards go backward in the order in which they ran. The input stored last also
    stays on the device until another is stored, because a backward right after its forward reads
    it at once.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        # Weak references: an input is dropped with its graph, whether or not backward ran.
        self._passes: deque[list[weakref.ref[Stored]]] = deque()
        self._latest: weakref.ref[Stored] | None = None

    def begin(self) -> None:
        """Begin to store the inputs of another forward of the model; called before it."""
        while self._passes and not _alive(self._passes[0]):
            self._passes.popleft()
        self._passes.append([])

    def __call__(self, x: Tensor, restore: Restore) -> tuple[Stored, Restore]:
        """Store x in host memory; return the stored copy, and the function that restores from it.

        `restore` is applied to what is read back: x may be a shard of an input.
        """
        if self._latest is not None and (latest := self._latest()) is not None:
            latest.leave()
        stored = self._memory.store(x, tag=_TAG)
        self._latest = weakref.ref(stored)
        if not self._passes:
            self.begin()
        self._passes[-1].append(self._latest)
        return stored, lambda stored: restore(self._fetched(stored))

    def _fetched(self, stored: Stored) -> Tensor:
        """Return a stored input on the device, and launch the copy of the next."""
        x = stored.get()
        if (following := self._next(stored)) is not None:
            following.fetch()
        return x

    def _next(self, stored: Stored) -> Stored | None:
        """Return the input that backward reads after `stored`; None: none is left."""
        passes = [_alive(kept) for kept in self._passes]
        own = next(kept for kept in passes if stored in kept)
        # Backward reads the inputs of one forward from the last to the first.
        if place := own.index(stored):
            return own[place - 1]
        return next((kept[-1] for kept in passes if kept and kept is not own), None)


def _alive(kept: list[weakref.ref[Stored]]) -> list[Stored]:
    """Return the stored inputs whose graphs still exist."""
    return [stored for ref in kept if (stored := ref()) is not None]


class Segment:
    """Consecutive parts of which only the first keeps its input.

    The input of each later part must be the result of the part before, or the first element of a
    result that is a tuple; its further arguments are kept. When backward first reads the input of
    a later part, all parts before it are computed again, in order, which restores the inputs of
    all of them.
    """

    def __init__(self, first: Callable[[], Tensor]) -> None:
        """Begin a segment without parts; `first` restores the input of its first part."""
        self._first = first
        self._again: list[Callable[[Tensor], Any]] = []
        self._inputs: dict[int, Tensor] = {}
        self._given: weakref.ref[Tensor] | None = None

    def follows(self, x: Tensor) -> bool:
        """Return True if x is the result of the last part."""
        return self._given is not None and self._given() is x

    def add(self, again: Callable[[Tensor], Any]) -> Restore:
        """Add a part and return a function that restores its input.

        `again` computes the part from its input, without a graph.
        """
        number = len(self._again)
        self._again.append(again)
        return lambda _: self._input(number)

    def gave(self, y: Any) -> None:
        """Record y as the result of the last part, for `follows`."""
        x = _first(y)
        self._given = weakref.ref(x) if isinstance(x, Tensor) else None

    def _input(self, number: int) -> Tensor:
        """Return the input of part `number`; compute it and all inputs before it if necessary.

        Backward reads the last part's input first, so the other inputs exist when it reads them.
        """
        if number not in self._inputs:
            x = self._first()
            for index, again in enumerate(self._again[:number]):
                self._inputs[index] = x
                x = _first(again(x))
            self._inputs[number] = x
        return self._inputs.pop(number)


def _first(given: Any) -> Any:
    """Return the first element of a tuple, and anything else as it is."""
    return given[0] if isinstance(given, tuple) else given


R = TypeVar("R")

Announce = Callable[[], AbstractContextManager[None]]
"""A function that returns a context for a recompute, such as `RankLayers.recomputing`, which sets
the phase of the log and of the communicator."""


def checkpoint(
    function: Callable[..., R],
    distribute_saved_activations: bool,
    *args: Any,
    tracker: RngStatesTracker,
    channel: Channel | None = None,
    announce: Announce = nullcontext,
) -> R:
    """Return `function(*args)`; drop its activations and compute them again in backward.

    The recompute draws the random numbers of the forward again, from every stream of `tracker` and
    from its device's own generator. With `distribute_saved_activations`, each rank keeps 1/p of the
    elements of the first of `args`, which must be equal on all ranks of `channel`; an all-gather
    restores it for the recompute.

    Raises ValueError if the elements of that argument do not divide by p.
    Source: Megatron-LM, core/tensor_parallel/random; Korthikanti et al. 2022.
    """
    if distribute_saved_activations:
        if channel is None:
            raise ValueError(
                "distribute_saved_activations=True needs a channel to distribute over: pass channel"
            )
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
    """Return `function(*args)`; compute it again in backward with the random numbers of `snapshot`.

    `snapshot`: state of the random streams before `function`; None: the current state.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    snapshot = snapshot or tracker.snapshot()
    failed: list[BaseException] = []
    going_forward = True

    def run(*args: Any) -> R | None:
        """Call `function`; in a recompute, inside `announce()`, with the forward's random numbers.

        An exception in forward is kept in `failed`, to be raised later.
        """
        if not going_forward:
            with tracker.replaying(snapshot), announce():
                return function(*args)
        try:
            return function(*args)
        except BaseException as error:
            # The error is raised only after torch's checkpoint has returned: raised here, it would
            # leave torch's saved-tensor hooks installed [Note: A forward that fails].
            failed.append(error)
            return None

    out = torch_checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # `tracker` replays the random numbers of every stream instead
    )
    going_forward = False
    if failed:
        # The list must not keep the error: the error's traceback refers to this frame, and the
        # frame to the list, which would be a cycle of references.
        raise failed.pop()
    return cast(R, out)


def _with_first_held(
    function: Callable[..., R], args: Sequence[Any], held: Any, restore: Restore
) -> tuple[Callable[..., R], tuple[Any, ...]]:
    """Return a function that takes `held` in place of the first argument, and its arguments.

    Its first call, in forward, uses the original argument, so that autograd records it. Later
    calls, in backward, need only the values, which `restore` gets from `held`. See
    [Note: Held in its place] in docs/design/notes/recomputation.md.
    """
    first, *rest = args
    needs_grad = first.requires_grad
    whole = [first]

    def of_held(held: Any, *rest: Any) -> R:
        # The first call, in forward, removes the original argument from the list, so that the
        # recompute does not keep it alive.
        if whole:
            return function(whole.pop(), *rest)
        return function(restore(held).requires_grad_(needs_grad), *rest)

    return of_held, (held, *rest)


class _Ticket(Function):
    """The identity of tensors, which saves an empty tensor: reading it starts their recompute."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(xs[0].new_empty(0))
        return xs

    @staticmethod
    def backward(ctx: Any, *dxs: Tensor | None) -> tuple[Tensor | None, ...]:
        return dxs


class CheckpointWithoutOutput:
    """Drops the output of a recomputed part, too, and restores it just before backward needs it.

        part = CheckpointWithoutOutput(tracker=tracker)
        y = part.checkpoint(function, x)
        z = consumer(y)                                  # saves y for its backward
        part.discard_output_and_register_recompute(z)

    The memory of y is freed at once. It is filled again when the gradient of z arrives, by the
    recompute that `function` needs for its own backward anyway. An object can be used once. All
    operations that save y must come before z, and nothing may read y afterwards. Inside a part that
    is recomputed with the same tracker, this saves no memory and costs one more recompute.

    Source: Megatron-LM, core/tensor_parallel/random.
    """

    def __init__(self, *, tracker: RngStatesTracker, announce: Announce = nullcontext) -> None:
        self._tracker = tracker
        self._announce = announce
        self._outputs: tuple[Tensor, ...] | None = None
        # The recompute refers to the storages instead of the outputs, because the graph of an
        # output refers to the recompute. Python's garbage collector would not see this cycle, so
        # its memory would leak.
        self._dropped: list[torch.UntypedStorage] = []

    def checkpoint(self, function: Callable[..., R], *args: Any) -> R:
        """Return `function(*args)`, which must be a tensor or a tuple of tensors.

        Raises ValueError if an output shares its memory with an argument.
        """
        if self._outputs is not None:
            raise RuntimeError(
                "a CheckpointWithoutOutput can be used once: make one for each call of checkpoint"
            )
        dropped = self._dropped

        def with_ticket(*args: Any) -> Any:
            """Call `function`; in a recompute, also fill the dropped storages with its results."""
            out = function(*args)
            outs = _as_tuple(out)
            _restore(dropped, _storages(outs))
            ticketed = _Ticket.apply(*outs)
            return ticketed if isinstance(out, tuple) else ticketed[0]

        out: R = _checkpoint(with_ticket, args, self._tracker, self._announce)
        outs = _as_tuple(out)
        # If an output has the same memory as an argument, freeing it would destroy the argument.
        kept = {storage_key(s) for s in _storages([a for a in args if isinstance(a, Tensor)])}
        if any(storage_key(s) in kept for s in _storages(outs) if s.nbytes()):
            raise ValueError(
                "an output shares its memory with an argument, so it cannot be dropped: return a"
                " clone of it"
            )
        self._outputs = outs
        return out

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the memory of the output until the gradient of `hook_tensor` arrives.

        Does nothing if the output requires no gradient, or inside a recompute, whose tensors
        backward is about to read. Raises ValueError if the output requires a gradient but
        `hook_tensor` does not.
        """
        if not self._outputs:
            raise RuntimeError(
                "there is no output yet, or it was dropped already: call this once, after"
                " checkpoint"
            )
        node = next((y.grad_fn for y in self._outputs if y.requires_grad), None)
        if node is not None and not hook_tensor.requires_grad:
            raise ValueError(
                "hook_tensor requires no gradient, so the output would never be restored: pass a"
                " tensor that is computed from the output and requires a gradient"
            )
        outputs, self._outputs = self._outputs, ()
        if node is None or self._tracker.replays:
            return
        ticket: Any = node
        # The hook runs before the backward of the operations that have saved the output.
        hook_tensor.register_hook(lambda _: _read(ticket))
        for storage in _storages(outputs):
            self._dropped.append(storage)
            storage.resize_(0)


def _read(ticket: Any) -> None:
    """Start the recompute of the part with the node `ticket`, by reading its saved tensor."""
    _ = ticket.saved_tensors


def _as_tuple(out: Any) -> tuple[Tensor, ...]:
    """Return a tuple as it is, and a tensor as a tuple of one."""
    return out if isinstance(out, tuple) else (out,)


def _storages(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once, in order."""
    found = {storage_key(t.untyped_storage()): t.untyped_storage() for t in tensors}
    return list(found.values())


@torch.no_grad()
def _restore(dropped: list[torch.UntypedStorage], computed: list[torch.UntypedStorage]) -> None:
    """Fill the dropped storages, if any, with the values of the `computed` ones.

    Storages are written instead of tensors, because torch counts a write to a tensor as a change,
    after which autograd refuses to use a saved tensor.
    """
    if not dropped:
        return
    for storage, source in zip(dropped, computed, strict=True):
        storage.resize_(source.nbytes())
        storage.copy_(source)
    dropped.clear()


class Recomputer:
    """Recomputes a model's parts in backward; made once for a model, for use by one thread.

    Parts are not nested: inside a part that is recomputed as a whole, callers recompute nothing.
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
        """Set how the input of a part, its first argument, is kept; by default whole on the device.

        `distribute_over`  each rank of this channel keeps 1/p of the input, which must be equal on
                           all ranks
        `offload_to`       the input, or 1/p of it, is kept in host memory
        `segment`          of this many consecutive parts, only the first keeps its input; see
                           `Segment`
        """
        self._tracker = tracker
        self._announce = announce
        self._channel = distribute_over
        self._host = None if offload_to is None else HostInputs(offload_to)
        self._segment_size = segment
        self._segment: weakref.ref[Segment] | None = None
        self._number = 0
        """Number of parts so far in this forward of the model."""
        self._latest: tuple[weakref.ref[Tensor], weakref.ref[Any], Restore] | None = None
        """First argument of the last part, the object held in its place, and how to restore it."""

    def begin(self) -> None:
        """Forget the parts of the last forward of the model; called before each forward."""
        self._segment = self._latest = None
        self._number = 0
        if self._host is not None and torch.is_grad_enabled():
            self._host.begin()

    def __call__(self, fn: Callable[..., R], *args: Any) -> R:
        """Return `fn(*args)`; drop its activations and compute them again in backward.

        The first of `args` is kept as the arguments of `__init__` determine. Raises ValueError if
        it is in a segment and not the result of the part before.
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
        """Return the object held in place of x, and a function that restores x from it.

        Two consecutive parts that take the same x share the object.
        """
        if self._latest is not None:
            of, latest, restore = self._latest
            if of() is x and (held := latest()) is not None:
                return held, restore
        held, restore = x.detach(), lambda held: held
        if self._channel is not None and self._channel.size > 1:
            held, restore = in_parts(held, self._channel)
        if self._host is not None:
            held, restore = self._host(held, restore)
        # Weak references, so that x and the held object are freed with their graphs.
        self._latest = weakref.ref(x), weakref.ref(held), restore
        return held, restore

    def _in_segment(
        self, part: Callable[..., Any], args: tuple[Any, ...], snapshot: RngSnapshot
    ) -> tuple[Segment, Restore]:
        """Return the segment of `part`, and the function that restores its first argument.

        A segment is some consecutive parts, of which only the first keeps its input.
        """
        x, *rest = args
        segment = None if self._segment is None else self._segment()
        number, self._number = self._number, self._number + 1
        # Only the autograd graphs of a segment's parts keep it alive. So if no earlier part has a
        # graph, `segment` is None here, and this part begins another segment.
        if segment is None or number % self._segment_size == 0:
            held, restore = self._keep(x)
            segment = Segment(lambda: restore(held))
            self._segment = weakref.ref(segment)
        elif not segment.follows(x):
            raise ValueError(
                "model.checkpoint_segment recomputes the input of a block as the result of the"
                " block before, but the input of this block is another tensor: use"
                " model.checkpoint_segment=0"
            )

        def again(x: Tensor) -> Any:
            """Compute the part from x without a graph, with the random numbers of its forward."""
            replaying = self._tracker.replaying(snapshot)
            with torch.no_grad(), replaying, self._announce():
                return part(x, *rest)

        return segment, segment.add(again)


def split_tensor_into_1d_equal_chunks(
    x: Tensor, channel: Channel, *, new_buffer: bool = False
) -> Tensor:
    """Return this rank's 1/p of the elements of x, flat: a view, or with `new_buffer` a copy.

    The gradient does not flow to other ranks. Raises ValueError if p does not divide the number of
    elements.
    """
    check_channel("channel", channel)
    divide(x.numel(), channel.size)
    part = chunk_range(x.numel(), channel.size, channel.rank)
    chunk = x.reshape(-1)[part.start : part.stop]
    return chunk.clone() if new_buffer else chunk


@torch.no_grad()
def gather_split_1d_tensor(chunk: Tensor, channel: Channel, *, tag: Tag = MAPPING) -> Tensor:
    """Return the elements of all ranks' equal chunks, gathered and flat; without a gradient."""
    check_channel("channel", channel)
    return channel.all_gather(chunk.reshape(-1), tag=tag).wait()
