"""`LengthCheck`: detect models that compute something else in long rows than in short ones.

The calls of a forward on the meta device are compared with those in a short row, and results on the
CPU if the calls differ. See [Note: Length] in docs/design/notes/models.md.
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
from isp.models.tracing.recorder import identity_experts
from isp.models.tracing.trace import ModelTrace, own_line
from isp.models.tracing.weight_reads import name_of

__all__ = ["LengthCheck"]

_MOST_COMPARED = 4096
"""The number of tokens of the longest row that is run on the CPU."""


class LengthCheck:
    """A comparison of a model's calls in long rows with its calls in short rows."""

    def __init__(
        self,
        model: nn.Module,
        empty: Callable[[], nn.Module],
        trace: ModelTrace,
        forward: Forward,
    ) -> None:
        """`empty` returns a new copy of `model` on the meta device.

        Attention and other mixers of the copy call the `Mixers` that the context `mix_by` sets,
        here this check. Each forward needs a new copy, because a model may keep tables that it made
        for a length.
        """
        self._model, self._empty, self._trace, self._forward = model, empty, trace, forward
        self._short: list[_Noted] | None = None
        """The calls in a row of `PROBE_TOKENS`; None: not recorded yet."""
        self._due = PROBE_TOKENS
        """The longest row that needs no further check: 9/8 of the longest one checked so far."""

    def check(self, row: int, part: int, *, allow_unchecked: bool) -> None:
        """Raise ValueError, naming module and line, if results depend on the length of a row.

        `row`: tokens of a row; `part`: tokens of a rank's part of it. A row is checked only if it
        is longer than 9/8 of the longest one before. If the check fails to run, raises ValueError,
        too, or warns if `allow_unchecked`.
        """
        if row > self._due:
            for length in {row, part}:
                if length > PROBE_TOKENS:
                    self._check(length, allow_unchecked)
            # Without this margin, rows that grow by one token each would all be checked.
            self._due = row * 9 // 8

    def _check(self, length: int, allow_unchecked: bool) -> None:
        """Check rows of one length: compare calls, and results on the CPU if calls differ."""
        reason = f"in a row of {length:,} tokens"
        try:
            other = self._first_other(length)
            if other is None:
                return
            reason = self._message(length, other)
            compared = min(length, _MOST_COMPARED)
            # Results are compared in rows of at most `_MOST_COMPARED` tokens. They cannot be
            # compared if calls differ only in longer rows.
            if compared < length and self._first_other(compared) is None:
                raise ValueError(f"rows of more than {_MOST_COMPARED:,} tokens are not compared")
            rest = self._model.buffers(), self._trace, self._forward, compared
            same = same_at_length(self._empty(), *rest)
        except Exception as error:
            # The model's own code runs here, and may raise anything.
            refuse_unchecked(self._model, f"{reason}: {error}", allow_unchecked)
            return
        if not same:
            raise ValueError(
                f"{reason}: its results depend on the length of the sequence, of which a rank has a"
                f" part (a few tokens have other logits in a row of {compared:,} than alone). Use"
                f" the positions that the model is called with in place of the length"
            )

    def _calls(self, length: int, watched: int | None = None) -> _Calls:
        """Record the calls of a forward on a row of `length` tokens; `watched`: see `_Calls`."""
        return _Calls(watched).of(self._empty(), self._forward, length)

    def _first_other(self, length: int) -> int | None:
        """Return the index of the first call that differs from that of the short row; None: no
        call."""
        if self._short is None:
            self._short = self._calls(PROBE_TOKENS).noted
        pairs = enumerate(zip_longest(self._short, self._calls(length).noted))
        step = length - PROBE_TOKENS
        return next((number for number, pair in pairs if not _follows(*pair, step)), None)

    def _message(self, length: int, number: int) -> str:
        """Return a message about the call with index `number`, with its place in the code."""
        assert self._short is not None
        # Run the forward again, to find the place of the call in the code.
        calls = self._calls(length, number)
        short = self._short[number] if number < len(self._short) else None
        long = calls.noted[number] if number < len(calls.noted) else None
        if long is None:
            # Only the short row has this call: find its place in a run of the short row.
            calls = self._calls(PROBE_TOKENS, number)
        place, kind = calls.place
        line = "" if calls.line is None else f" ({_at(calls.line)})"
        where = f"{place} ({kind})" if place else kind
        what = _what(short, long, length - PROBE_TOKENS)
        return f"{where} computes something else in a row of {length:,} tokens: {what}{line}"


class _Noted(NamedTuple):
    """A recorded call of a function of torch, or of a mixer."""

    name: str
    numbers: Any
    """The arguments of the call as `_numbers` returns them: only numbers, texts and dtypes."""
    shapes: Any
    """The shapes of the tensors that the call returned."""


def _what(short: _Noted | None, long: _Noted | None, step: int) -> str:
    """Return a description of how a call in a long row differs from that in `PROBE_TOKENS` tokens.

    `short` or `long` is None if that row has no call here; `step`: how many more tokens the long
    row has.
    """
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
    """Return shapes as a text such as [[1, 2], [3]], or [1, 2] for a single shape."""
    return str([list(shape) for shape in shapes] if len(shapes) != 1 else list(shapes[0]))


def _first_leaves(short: Any, long: Any, step: int) -> tuple[Any, Any]:
    """Return the first argument of a call that differs between the two rows: its two values.

    `short`, `long`: the arguments in the short and in the long row, in nested tuples.
    """
    if isinstance(short, tuple) and isinstance(long, tuple) and len(short) == len(long):
        pairs = zip(short, long, strict=True)
        return _first_leaves(*next(pair for pair in pairs if not _follows(*pair, step)), step)
    return short, long


def _at(line: traceback.FrameSummary) -> str:
    """Return file name, line number and text of a line of code."""
    return f"{Path(line.filename).name}:{line.lineno}: {line.line}"


def _follows(short: Any, long: Any, step: int) -> bool:
    """Return whether `long` may be what `short` becomes in a row with `step` more tokens.

    True for equal values, and for a size that is a polynomial of the length. See [Note: Length].
    """
    if short == long:
        return True
    if isinstance(short, tuple) and isinstance(long, tuple):
        several = zip_longest(short, long, fillvalue=...)
        return len(short) == len(long) and all(_follows(a, b, step) for a, b in several)
    if not (_is_whole(short) and _is_whole(long)):
        return False
    # step divides p(n + step) - p(n) for each polynomial p with integer coefficients.
    return (int(long) - int(short)) % step == 0


def _is_whole(number: Any) -> bool:
    """Return whether a value is an int, but no bool, or a float without a fraction."""
    return type(number) is int or (type(number) is float and number.is_integer())


def _numbers(value: Any) -> Any:
    """Return the numbers, texts and dtypes in `value` as nested tuples, with None for all else."""
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
    """A mode that records the calls of a forward on the meta device; it also implements
    `Mixers`."""

    def __init__(self, watched: int | None = None) -> None:
        """`watched`: the index of the call whose place in the model's code is recorded.

        None: the place of no call is recorded, which is faster.
        """
        super().__init__()
        self.noted: list[_Noted] = []
        self.place = "", ""
        """Name and class of the innermost module that runs at the watched call."""
        self.line: traceback.FrameSummary | None = None
        """The line of the model's own code at the watched call."""
        self._watched = watched
        self._open: list[tuple[str, str]] = []
        """Name and class of the modules that run, the innermost last."""

    def of(self, model: nn.Module, forward: Forward, length: int) -> _Calls:
        """Run a forward on a row of `length` tokens to record its calls, and return self."""
        ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
        positions = torch.arange(length, device="meta").unsqueeze(0)
        self._open.append(("", type(model).__name__))
        with ExitStack() as stack:
            if self._watched is not None:
                for name, module in model.named_modules():
                    begins, ends = partial(self._begins, name), self._ends
                    stack.callback(module.register_forward_pre_hook(begins).remove)
                    stack.callback(module.register_forward_hook(ends).remove)
            # Do not change the generator of a training run; draw the same numbers in each forward.
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.default_generator.manual_seed(0)
            stack.enter_context(identity_experts(model))
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
        # Calls that return no tensor, such as x.size(), are left out: they compute nothing.
        out = func(*args, **kwargs) if kwargs else func(*args)
        if isinstance(out, Tensor):
            self._note(name_of(func), (args, kwargs), (tuple(out.shape),))
        elif out is None:
            # A function that returns None has written into one of its tensors.
            self._note(name_of(func), (args, kwargs), ())
        elif isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
            shapes = (tuple(x.shape) for x in out if isinstance(x, Tensor))
            self._note(name_of(func), (args, kwargs), tuple(shapes))
        return out

    def _note(self, name: str, given: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Record a call with the numbers among its arguments `given`."""
        if len(self.noted) == self._watched:
            self.place, self.line = self._open[-1], own_line(traceback.extract_stack())
        self.noted.append(_Noted(name, _numbers(given), shapes))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Record a call of attention, and return zeros; implements `Mixers.attend`."""
        self._note("attention", options, (tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return q.new_zeros(*q.shape[:3], v.shape[3])

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        """Record a convolution, and return zeros; implements `Mixers.convolve`."""
        self._note("causal_conv1d", dilation, (tuple(x.shape), tuple(weight.shape)))
        return torch.zeros_like(x)

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Record a scan, and return zeros; implements `Mixers.scan`."""
        x = inputs.of_heads[0]
        self._note("scan", repr(recurrence), (tuple(x.shape),))
        return torch.zeros_like(x)

    def choose(self, indexer: Indexer) -> Tensor:
        """Return indices of keys, all 0, as many as an indexer chooses in a long document."""
        # Ask for a document that is longer than any, so that the number of chosen keys does not
        # depend on the length of the row.
        shape = *indexer.keys.shape[:2], indexer.num_choices, indexer.most(1 << 40)
        return indexer.keys.new_zeros(shape, dtype=torch.int32)
