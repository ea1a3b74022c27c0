"""Whether a model computes otherwise in long rows than in the short ones of the probe.

[Note: Length] The probe (`isp.models.tracing.probe`) compares rows of up to 64 tokens. A model may
do something else from some length on: scale by the logarithm of the length, work in chunks, branch.
A forward on the meta device takes no memory, whatever the length, and shows which functions are
called, with which numbers, and the shapes of what they give. At the length of a row, and at that of
a rank's part, it must be the same as at 64 tokens, where sizes follow from the length: a polynomial
p of it with integer coefficients, which are the sizes of views, concatenations and counts of
elements, has p(n) - p(64) divisible by n - 64; a number of chunks, a remainder or a minimum has
not.

Code that calls something else may still compute the same: an MLP in tiles of tokens, a table of
angles that grows. So its results are then compared on the CPU, as by the probe, at that length, up
to 4,096 tokens.

Not seen are: what happens inside of experts and in backward at these lengths, what depends on the
values of positions in a way that mixes tokens, and rows longer than those checked.

S sequence, H heads, d and e sizes of heads
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isp.core.attention.api import AttentionOptions
from isp.core.mixers.api import mix_by
from isp.core.mixers.key_choice import Indexer
from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.models.tracing.probe import PROBE_TOKENS, Forward, refuse_unchecked, same_at_length
from isp.models.tracing.recorder import experts_passed
from isp.models.tracing.trace import ModelTrace, own_line
from isp.models.tracing.weight_reads import name_of

__all__ = ["LengthCheck"]

_MOST_COMPARED = 4096
"""Tokens of the longest row that is run on the CPU."""


class LengthCheck:
    """Compares what a model calls in rows of some length with what it calls in short rows."""

    def __init__(
        self,
        model: nn.Module,
        empty: Callable[[], nn.Module],
        trace: ModelTrace,
        forward: Forward,
    ) -> None:
        """`empty` makes a copy of `model` on the meta device, whose calls go where `mix_by` says.

        A copy for each forward, as models keep tables that they have made for a length.
        """
        self._model, self._empty, self._trace, self._forward = model, empty, trace, forward
        self._short: list[_Noted] | None = None
        """The calls at `PROBE_TOKENS`."""
        self._due = PROBE_TOKENS
        """The longest row that needs no further check."""

    def check(self, row: int, part: int, *, allow_unchecked: bool) -> None:
        """Raise ValueError, naming module and line, if results depend on the length of a row.

        Also if that cannot be found out, which is a warning if `allow_unchecked`. A row is compared
        with short ones if it is much longer than rows before, and so is a rank's part of it.
        """
        if row > self._due:
            for length in {row, part}:
                if length > PROBE_TOKENS:
                    self._check(length, allow_unchecked)
            self._due = row * 9 // 8  # rows that grow by a token each are not checked each

    def _check(self, length: int, allow_unchecked: bool) -> None:
        reason = f"in a row of {length:,} tokens"
        try:
            other = self._first_other(length)
            if other is None:
                return
            reason = self._said(length, other)
            compared = min(length, _MOST_COMPARED)
            if compared < length and self._first_other(compared) is None:
                raise ValueError(f"rows of more than {_MOST_COMPARED:,} tokens are not compared")
            rest = self._model.buffers(), self._trace, self._forward, compared
            same = same_at_length(self._empty(), *rest)
        except Exception as error:  # the model's own code, too
            refuse_unchecked(self._model, f"{reason}: {error}", allow_unchecked)
            return
        if not same:
            raise ValueError(
                f"{reason}: its results depend on the length of the sequence, of which a rank has a"
                f" part (a few tokens have other logits in a row of {compared:,} than alone). Use"
                f" the positions that the model is called with in place of the length"
            )

    def _calls(self, length: int, watched: int | None = None) -> _Calls:
        return _Calls(watched).of(self._empty(), self._forward, length)

    def _first_other(self, length: int) -> int | None:
        """Return the number of the first call that does not follow from that in a short row."""
        if self._short is None:
            self._short = self._calls(PROBE_TOKENS).noted
        pairs = enumerate(zip_longest(self._short, self._calls(length).noted))
        step = length - PROBE_TOKENS
        return next((number for number, pair in pairs if not _follows(*pair, step)), None)

    def _said(self, length: int, number: int) -> str:
        """Say what is other at a call, with its place in the model's code."""
        assert self._short is not None
        calls = self._calls(length, number)
        short = self._short[number] if number < len(self._short) else None
        long = calls.noted[number] if number < len(calls.noted) else None
        if long is None:
            calls = self._calls(PROBE_TOKENS, number)
        place, kind = calls.place
        line = "" if calls.line is None else f" ({_at(calls.line)})"
        where = f"{place} ({kind})" if place else kind
        what = _what(short, long, length - PROBE_TOKENS)
        return f"{where} computes otherwise in a row of {length:,} tokens: {what}{line}"


class _Noted(NamedTuple):
    """A call of a function of torch, or of a mixer."""

    name: str
    numbers: Any
    """The numbers among its arguments, as they are nested."""
    shapes: Any
    """The shapes of the tensors that it gives."""


def _what(short: _Noted | None, long: _Noted | None, step: int) -> str:
    """Say how a call differs from that in a row of `PROBE_TOKENS`."""
    few = f"in a row of {PROBE_TOKENS}"
    if long is None:
        assert short is not None
        return f"it does not call `{short.name}`, as {few}"
    if short is None or short.name != long.name:
        instead = "nothing" if short is None else f"`{short.name}`"
        return f"it calls `{long.name}`, and {instead} {few}"
    if not _follows(short.numbers, long.numbers, step):
        was, now = _first_leaves(short.numbers, long.numbers, step)
        return f"it calls `{long.name}` with {now}, and with {was} {few}"
    return f"`{long.name}` gives {_listed(long.shapes)}, and {_listed(short.shapes)} {few}"


def _listed(shapes: Any) -> str:
    return str([list(shape) for shape in shapes] if len(shapes) != 1 else list(shapes[0]))


def _first_leaves(short: Any, long: Any, step: int) -> tuple[Any, Any]:
    """Return the innermost numbers that differ."""
    if isinstance(short, tuple) and isinstance(long, tuple) and len(short) == len(long):
        pairs = zip(short, long, strict=True)
        return _first_leaves(*next(pair for pair in pairs if not _follows(*pair, step)), step)
    return short, long


def _at(line: traceback.FrameSummary) -> str:
    return f"{Path(line.filename).name}:{line.lineno}: {line.line}"


def _follows(short: Any, long: Any, step: int) -> bool:
    """Return whether the second may be what the first is in a row of `step` more tokens."""
    if short == long:
        return True
    if isinstance(short, tuple) and isinstance(long, tuple):
        several = zip_longest(short, long, fillvalue=...)
        return len(short) == len(long) and all(_follows(a, b, step) for a, b in several)
    if not (_is_whole(short) and _is_whole(long)):
        return False
    return (int(long) - int(short)) % step == 0


def _is_whole(number: Any) -> bool:
    return type(number) is int or (type(number) is float and number.is_integer())


def _numbers(value: Any) -> Any:
    """Return what decides a call, but for tensors, as nested as it is."""
    kind = type(value)
    if kind is int or kind is float or kind is bool or kind is str:
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_numbers, value))
    if kind is dict:
        return tuple((key, _numbers(x)) for key, x in value.items())
    if kind is slice:
        return _numbers((value.start, value.stop, value.step))
    return value if kind is torch.dtype else None


class _Calls(TorchFunctionMode):
    """Notes what a model calls in a forward on the meta device; a `Mixers`, too."""

    def __init__(self, watched: int | None = None) -> None:
        """`watched`: the number of the call whose place in the model's code is noted."""
        super().__init__()
        self.noted: list[_Noted] = []
        self.place = "", ""
        """The innermost module that runs at this call: its name and class."""
        self.line: traceback.FrameSummary | None = None
        """The model's own line."""
        self._watched = watched
        self._open: list[tuple[str, str]] = []

    def of(self, model: nn.Module, forward: Forward, length: int) -> _Calls:
        """Run a forward on a row of `length` tokens, and return this."""
        ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
        positions = torch.arange(length, device="meta").unsqueeze(0)
        self._open.append(("", type(model).__name__))
        with ExitStack() as stack:
            if self._watched is not None:
                for name, module in model.named_modules():
                    begins, ends = partial(self._begins, name), self._ends
                    stack.callback(module.register_forward_pre_hook(begins).remove)
                    stack.callback(module.register_forward_hook(ends).remove)
            # A run may be under way: its random numbers stay as they are, and those here are alike.
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.default_generator.manual_seed(0)
            stack.enter_context(experts_passed(model))
            stack.enter_context(mix_by(self))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self)
            forward(model, ids, positions)
        return self

    def _begins(self, name: str, module: nn.Module, _: Any) -> None:
        self._open.append((name, type(module).__name__))

    def _ends(self, *_: Any) -> None:
        self._open.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        if isinstance(out, Tensor):
            self._note(name_of(func), (args, kwargs), (tuple(out.shape),))
        elif out is None:  # as of what writes into a tensor
            self._note(name_of(func), (args, kwargs), ())
        elif isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
            shapes = (tuple(x.shape) for x in out if isinstance(x, Tensor))
            self._note(name_of(func), (args, kwargs), tuple(shapes))
        return out

    def _note(self, name: str, given: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
        if len(self.noted) == self._watched:
            self.place, self.line = self._open[-1], own_line(traceback.extract_stack())
        self.noted.append(_Noted(name, _numbers(given), shapes))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """As `isp.core.mixers.Mixers.attend`, of zeros."""
        self._note("attention", options, (tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return q.new_zeros(*q.shape[:3], v.shape[3])

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        """As `isp.core.mixers.Mixers.convolve`, of zeros."""
        self._note("causal_conv1d", dilation, (tuple(x.shape), tuple(weight.shape)))
        return torch.zeros_like(x)

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """As `isp.core.mixers.Mixers.scan`, of zeros."""
        x = inputs.of_heads[0]
        self._note("scan", repr(recurrence), (tuple(x.shape),))
        return torch.zeros_like(x)

    def choose(self, indexer: Indexer) -> Tensor:
        """As `isp.core.mixers.Mixers.choose`: the numbers of keys in a long document, all 0."""
        shape = *indexer.keys.shape[:2], indexer.num_choices, indexer.most(1 << 40)
        return indexer.keys.new_zeros(shape, dtype=torch.int32)
