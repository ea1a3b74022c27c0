"""Scans in a rehearsal: nothing is scanned, and what one keeps follows from short ones.

[Note: Short scans] What a scan keeps for backward, and has in hand at most, grows by the same with
every chunk of a segment. So the recurrence itself runs on the meta device on segments of two
lengths, `_STEP` tokens apart, from which that of a longer one follows. It is what isp's scan in
torch takes; a kernel may take less.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.core.tensors import memory_of
from isp.core.torch_private import disable_current_modes, storage_key
from isp.planner.made import Made
from isp.planner.record import Compute, EventRecorder, Work

__all__ = ["DryRecurrence"]

_STEP = 64
"""Tokens; a multiple of every recurrence's chunk."""


class DryRecurrence:
    """A `Recurrence` whose scans and summaries are noted, and not computed."""

    def __init__(self, kind: Recurrence, recorder: EventRecorder) -> None:
        self._kind = kind
        self._recorder = recorder
        self.summary_size = kind.summary_size
        self.state_size = kind.state_size
        self.flops = kind.flops
        self.after = kind.after

    def scan(
        self, inputs: Inputs, lengths: Sequence[int], initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `Recurrence.scan`."""
        rows = sum(lengths), len(lengths)
        out, states = self._noted(rows, self.flops(inputs), inputs, lengths, initial)
        return out, states

    def summary(self, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
        """As `Recurrence.summary`; as many FLOPs more than a scan as it has more numbers."""
        flops = self.flops(inputs) * self.summary_size(inputs) // self.state_size(inputs)
        (found,) = self._noted((len(lengths),), flops, inputs, lengths, None)
        return found

    def _noted(
        self,
        rows: tuple[int, ...],
        flops: int,
        inputs: Inputs,
        lengths: Sequence[int],
        initial: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Results of so many rows, one alone of a summary; `flops` of a token."""
        begin = () if initial is None else (initial,)
        segment = _Segment(
            self._kind,
            len(rows) == 1,
            tuple(map(_Like.of, inputs.of_heads)),
            tuple(map(_Like.of, inputs.of_groups)),
            tuple(map(_Like.of, begin)),
            tuple(None if x is None else _Like.of(x[None]) for x in inputs.constants),
        )
        counts = Counter(lengths)
        taken = {n: _taken(segment, n) for n in counts}
        total = tuple(sum(counts[n] * taken[n].sizes[i] for n in counts) for i in range(3))
        first = taken[lengths[0]]
        results = (x.rows(n) for x, n in zip(first.results, rows, strict=True))
        found: tuple[Tensor, ...] = _Scanned.apply(
            flops * sum(lengths),
            self._recorder,
            total,
            first.saves,
            tuple(results),
            *(x for xs in (*inputs, begin) for x in xs if x is not None),
        )
        return found


class _Like(NamedTuple):
    """A tensor but for the length of its first dim."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _Like:
        return cls(x.shape[1:], x.dtype)

    def rows(self, length: int) -> Tensor:
        """One of so many rows."""
        return _memory(length, *self.shape, dtype=self.dtype)


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        flops: int,
        recorder: EventRecorder,
        sizes: tuple[int, int, int],
        saves: tuple[bool, ...],
        results: tuple[Tensor, ...],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.flops, ctx.recorder, (kept, most, ctx.most) = flops, recorder, sizes
        ctx.inputs = [(x.shape, x.dtype) for x in inputs]
        recorder.note(Compute(Work.SCAN, flops))
        _memory(most)
        saved = (x for x, is_saved in zip(inputs, saves, strict=True) if is_saved)
        ctx.save_for_backward(_memory(kept), *saved)
        return results

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.recorder.note(Compute(Work.SCAN, 3 * ctx.flops))  # it scans again
        kept, *_ = ctx.saved_tensors
        _memory(max(0, ctx.most - kept.nbytes))
        kept.untyped_storage().resize_(0)  # the loops let go of it as they go back
        gradients = (_memory(*shape, dtype=dtype) for shape, dtype in ctx.inputs)
        return None, None, None, None, None, *gradients


def _memory(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class _Segment(NamedTuple):
    """A run of tokens of one document, but for how many they are."""

    kind: Recurrence
    summarised: bool
    of_heads: tuple[_Like, ...]
    of_groups: tuple[_Like, ...]
    initial: tuple[_Like, ...]
    """The state before it, if it is given."""
    constants: tuple[_Like | None, ...]

    def inputs(self, tokens: int) -> tuple[Inputs, Tensor | None]:
        """Inputs of so many tokens, and the state before them."""
        of_heads, of_groups = (
            tuple(x.rows(tokens).requires_grad_() for x in of)
            for of in (self.of_heads, self.of_groups)
        )
        constants = (None if x is None else x.rows(1)[0].requires_grad_() for x in self.constants)
        initial = next((x.rows(1).requires_grad_() for x in self.initial), None)
        return Inputs(of_heads, of_groups, tuple(constants)), initial

    def run(self, inputs: Inputs, initial: Tensor | None) -> tuple[Tensor, ...]:
        """The results."""
        tokens = [len(inputs.of_heads[0])]
        if self.summarised:
            return (self.kind.summary(inputs, tokens),)
        return self.kind.scan(inputs, tokens, initial)


class _Taken(NamedTuple):
    """Bytes that a scan of a segment takes beside its inputs, and what it gives."""

    kept: int
    forward: int
    """Made and there at once, at most, in forward."""
    backward: int
    """The same in backward, of what was kept, too."""
    saves: tuple[bool, ...]
    """Which inputs are kept."""
    results: tuple[_Like, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.kept, self.forward, self.backward


def _taken(segment: _Segment, tokens: int) -> _Taken:
    """What a segment takes, [Note: Short scans]."""
    short = min(tokens, 2 * _STEP + tokens % _STEP)
    base, steps = _measured(segment, short), (tokens - short) // _STEP
    if not steps:
        return base
    pairs = zip(base.sizes, _measured(segment, short + _STEP).sizes, strict=True)
    kept, forward, backward = (a + steps * (b - a) for a, b in pairs)
    return base._replace(kept=kept, forward=forward, backward=backward)


@lru_cache(maxsize=1024)
def _measured(segment: _Segment, tokens: int) -> _Taken:
    """The same of a short one, which runs."""
    saved: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def keep(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        saved[storage_key(memory)] = memory
        return x

    with disable_current_modes(), torch.enable_grad():
        inputs, initial = segment.inputs(tokens)
        with Made() as made:
            with saved_tensors_hooks(keep, lambda x: x):
                out, *others = segment.run(inputs, initial)
            results = tuple(map(_Like.of, (out, *others)))
            del others  # nobody goes back from final states
            given = (x for of in (*inputs, (initial,)) for x in of if x is not None)
            saves = tuple(saved.pop(memory_of(x), None) is not None for x in given)
            kept = sum(memory.nbytes() for memory in saved.values())
            forward, made.most = made.most, 0
            out.backward(torch.empty_like(out))
    return _Taken(kept, forward, made.most - 2 * out.nbytes, saves, results)  # with its gradient
