"""Activations computed again in backward instead of kept.

[Note: Not reentrant] A recompute runs when backward first asks for a tensor that was not kept, as
`torch.utils.checkpoint` does it without reentrance. A backward within the backward would end the
pass early for whoever waits for its end, such as the data-parallel wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from isp.comm import Channel
from isp.comm.mappings import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks
from isp.rng import RngStatesTracker

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
            function, args = _with_first_in_parts(function, args, channel)
    return _checkpoint(function, args, tracker, announce)


def _checkpoint(
    function: Callable[..., R],
    args: Sequence[Any],
    tracker: RngStatesTracker,
    announce: Announce,
) -> R:
    if not torch.is_grad_enabled():
        return function(*args)
    snapshot = tracker.snapshot()
    again = _Contexts(lambda: tracker.replaying(snapshot), announce)
    out: R = torch_checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # the tracker does it, for every stream
        context_fn=lambda: (nullcontext(), again),
    )
    return out


class _Contexts:
    """Contexts that are opened anew each time: a graph that is kept is recomputed in each pass."""

    def __init__(self, *openers: Announce) -> None:
        self._openers = openers
        self._open = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:  # closes the first ones if a later one fails
            for opener in self._openers:
                stack.enter_context(opener())
            self._open = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)


def _with_first_in_parts(
    function: Callable[..., R], args: Sequence[Any], channel: Channel
) -> tuple[Callable[..., R], tuple[Any, ...]]:
    """A function of this rank's part of the first argument, and the arguments for it.

    Its first call, in forward, takes the whole from here, where autograd follows it; later ones,
    in backward, need no more than its values, and gather them.
    """
    first, *rest = args
    shape, needs_grad = first.shape, first.requires_grad
    whole = [first]

    def of_part(part: Tensor, *rest: Any) -> R:
        if whole:
            return function(whole.pop(), *rest)
        gathered = gather_split_1d_tensor(part, channel).view(shape)
        return function(gathered.requires_grad_(needs_grad), *rest)

    part = split_tensor_into_1d_equal_chunks(first.detach(), channel, new_buffer=True)
    return of_part, (part, *rest)


class _Ticket(torch.autograd.Function):
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
        kept = {s._cdata for s in _storages([a for a in args if isinstance(a, Tensor)])}
        if any(s._cdata in kept for s in _storages(outs) if s.nbytes()):
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
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
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
    ) -> None:
        self._tracker = tracker
        self._announce = announce
        self._distribute_over = distribute_over
        self._inside = False

    def __call__(self, fn: Callable[..., R], *args: Any) -> R:
        """`fn(*args)` by `checkpoint`, its first argument distributed if that was asked for."""

        def inside(*args: Any) -> R:
            before, self._inside = self._inside, True
            try:
                return fn(*args)
            finally:
                self._inside = before

        return checkpoint(
            inside,
            self._distribute_over is not None,
            *args,
            tracker=self._tracker,
            channel=self._distribute_over,
            announce=self._announce,
        )

    def without_output(
        self, part: Callable[..., Tensor], consumer: Callable[[Tensor], Tensor], *args: Any
    ) -> Tensor:
        """`consumer(part(*args))`, with what is between them computed again and not kept."""
        if self._inside:
            return consumer(part(*args))
        between = CheckpointWithoutOutput(tracker=self._tracker, announce=self._announce)
        out = consumer(between.checkpoint(part, *args))
        between.discard_output_and_register_recompute(out)
        return out
