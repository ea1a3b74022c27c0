"""Activations computed again in backward instead of kept.

[Note: Not reentrant] A recompute runs when backward first asks for a tensor that was not kept, as
`torch.utils.checkpoint` does it without reentrance. A backward within the backward would end the
pass early for whoever waits for its end, such as the data-parallel wrappers.

[Note: A forward that fails] Torch 2.11 leaves its hooks for saved tensors in place where a function
raises, and a loop that goes on would save under them. So torch sees the function end, and what it
raised is raised behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from isp.core.autograd import Function
from isp.core.comm import Channel
from isp.core.comm.host_offload import HostMemory
from isp.core.recompute.kept_inputs import HostInputs, Restore, Segment, in_parts
from isp.core.rng import RngSnapshot, RngStatesTracker
from isp.core.torch_private import storage_key

__all__ = ["CheckpointWithoutOutput", "Recomputer", "checkpoint"]

R = TypeVar("R")

Announce = Callable[[], AbstractContextManager[None]]
"""Gives the context in which a recompute runs, so that a communicator knows the phase."""


def checkpoint(
    function: Callable[..., R],
    distribute_saved_activations: bool,
    *args: Any,
    tracker: RngStatesTracker,
    channel: Channel | None = None,
    announce: Announce = nullcontext,
) -> R:
    """`function(*args)`, whose activations are dropped and computed again in backward.

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
    """`snapshot`: where the random numbers of `function` begin; None: here."""
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
    """A function of what is `held` in place of the first argument, and the arguments for it.

    Its first call, in forward, takes the whole from here, where autograd follows it; later ones,
    in backward, need no more than its values, and restore them.
    """
    first, *rest = args
    needs_grad = first.requires_grad
    whole = [first]

    def of_held(held: Any, *rest: Any) -> R:
        if whole:
            return function(whole.pop(), *rest)
        return function(restore(held).requires_grad_(needs_grad), *rest)

    return of_held, (held, *rest)


class _Ticket(Function):
    """Hands tensors through and saves an empty one: who reads it has them computed again."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(xs[0].new_empty(0))
        return xs

    @staticmethod
    def backward(ctx: Any, *dxs: Tensor | None) -> tuple[Tensor | None, ...]:
        return dxs


class CheckpointWithoutOutput:
    """Drops the output of a recomputed part too, and restores it when its gradient is near.

        part = CheckpointWithoutOutput(tracker=tracker)
        y = part.checkpoint(function, x)
        z = consumer(y)                                  # saves y for its backward
        part.discard_output_and_register_recompute(z)

    The memory of y is given back at once; what backward saved of it is filled again when the
    gradient of z is there, by the same one recompute that `function` needs for its own backward.
    To be used once. All that saves y must lie before z, and nobody may read y afterwards. Inside a
    part that is recomputed itself by the same tracker it saves nothing, and computes once more.

    Source: Megatron-LM, core/tensor_parallel/random.
    """

    def __init__(self, *, tracker: RngStatesTracker, announce: Announce = nullcontext) -> None:
        self._tracker = tracker
        self._announce = announce
        self._outputs: tuple[Tensor, ...] | None = None
        # [Note: No way back] What the recompute refers to must not lead to the output, whose graph
        # leads to the recompute: memory in such a circle would never be given back.
        self._dropped: list[torch.UntypedStorage] = []

    def checkpoint(self, function: Callable[..., R], *args: Any) -> R:
        """`function(*args)`: a tensor, or a tuple of tensors.

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
        """Give back the memory of the output, until the gradient of `hook_tensor` is there.

        Does nothing where there is no backward to come, and in a recompute, whose tensors backward
        is about to read. Raises ValueError if the output has a
        backward to come but `hook_tensor` has none.
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
    """Have what the ticket stands for computed again."""
    _ = ticket.saved_tensors


def _as_tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _storages(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """The memory of tensors, once each, in order."""
    found = {storage_key(t.untyped_storage()): t.untyped_storage() for t in tensors}
    return list(found.values())


@torch.no_grad()
def _restore(dropped: list[torch.UntypedStorage], computed: list[torch.UntypedStorage]) -> None:
    """Fill what was dropped, if anything was; its owners find it as it was before.

    By storages, because a tensor that is written to counts as changed, and autograd would refuse
    what it had saved of it.
    """
    if not dropped:
        return
    for storage, source in zip(dropped, computed, strict=True):
        storage.resize_(source.nbytes())
        storage.copy_(source)
    dropped.clear()


class Recomputer:
    """A model's recomputation: made once a model; serves one thread.

    Inside a part that is recomputed as a whole, nothing else is.
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
        """What is kept of the first argument of a part, which is all of it by default:

        `distribute_over`  1/p of it on each rank of a channel on which all have the same;
        `offload_to`       a copy on the host, of what would be kept on the device;
        `segment`          nothing, but of every so many-th part: see `Segment`.
        """
        self._tracker = tracker
        self._announce = announce
        self._channel = distribute_over
        self._host = None if offload_to is None else HostInputs(offload_to)
        self._segment_size = segment
        self._segment: weakref.ref[Segment] | None = None
        self._number = 0
        """Parts of this pass so far."""
        self._latest: tuple[weakref.ref[Tensor], weakref.ref[Any], Restore] | None = None
        """The first argument of the last part, and what is held in its place."""

    def begin(self) -> None:
        """A forward pass through the model begins."""
        self._segment = self._latest = None
        self._number = 0
        if self._host is not None and torch.is_grad_enabled():
            self._host.begin()

    def __call__(self, fn: Callable[..., R], *args: Any) -> R:
        """`fn(*args)`, computed again in backward; what is kept for that, see `__init__`.

        Raises ValueError if segments were asked for, and the first of `args` is not what the part
        before has given.
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
        """What is held in place of x; of a tensor that two parts in a row take, once."""
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
        """The segment that `part` belongs to, and what restores its first argument."""
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
