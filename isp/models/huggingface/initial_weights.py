"""Draw initial weights as a model's own code does, on each rank only for its shard.

The operators of the model's initialization are recorded on meta parameters and repeated on the
tiles of a shard. See [Note: Drawn by tiles] in docs/design/notes/models.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from isp.core.layers.module import MasterStream
from isp.core.mesh.layout import ParameterLayout
from isp.core.tensors import memory_of, tensors_in
from isp.core.torch_private import TorchDispatchMode
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = ["Drawing", "InitialWeights", "drawings"]

_aten = torch.ops.aten
_RANDOM = (_aten.normal_.default, _aten.uniform_.default)
_FILLS = (_aten.fill_.Scalar, _aten.zero_.default)
_ARITHMETIC = (
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten.div_.Tensor,
    _aten.div_.Scalar,
    _aten.add_.Tensor,
    _aten.add_.Scalar,
    _aten.sub_.Tensor,
    _aten.erfinv_.default,
    _aten.clamp_.default,
)
_IN_PLACE = (*_RANDOM, *_FILLS, *_ARITHMETIC)
"""In-place operators that act element by element, with numbers as their other arguments."""
_VIEWS = (_aten.detach.default, _aten.alias.default, _aten.select.int)
"""Operators that return a view of a parameter and change nothing."""


class InitialWeights(Protocol):
    """A source of a model's initial weights."""

    def fill(self, model: nn.Module, shards: Sequence[ShardedParameter], seed: int) -> None:
        """Fill a rank's `shards` of the parameters of `model`, and the model's saved buffers.

        The values depend on `seed`, unless they come from files.
        """


@dataclass(eq=False)
class Drawing:
    """The calls by which a model initializes one parameter, recorded on the meta device.

    `shard` repeats them for a rank's shard, with random numbers that do not depend on the layout.
    """

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """The operators that were called on the whole parameter, in order, each with its arguments
    other than the parameter."""
    rows: dict[int, float] = field(default_factory=dict)
    """By index along dim 0, the value that is filled in after `calls`, such as 0 at a padding
    index."""
    known: bool = True
    """True if `calls` and `rows` are the whole initialization; False if it did anything else."""

    def shard(self, layout: ParameterLayout, stream: MasterStream) -> Tensor:
        """Return a rank's shard in float32 on the CPU, with random numbers from `stream`."""
        found = stream.drawn(layout, self._fill)
        if not self.calls:
            # The parameter was never initialized: fill it with NaN, which is noticed.
            found.fill_(torch.nan)
        for row, value in self.rows.items():
            # `begin`: where the interval of the layout begins in the shard, as an index along dim
            # 0.
            begin = 0
            for start, stop in layout.intervals() if layout.dim == 0 else ((0, len(found)),):
                if start <= row < stop:
                    found[begin + row - start] = value
                begin += stop - start
        return found

    def _fill(self, tile: Tensor, generator: torch.Generator) -> None:
        """Repeat `calls` on a tile of the parameter, with random numbers from `generator`."""
        for func, args, kwargs in self.calls:
            own = {**kwargs, "generator": generator} if func in _RANDOM else kwargs
            func(tile, *args, **own)


def drawings(
    parameters: Mapping[str, Tensor], initialize: Callable[[], None]
) -> dict[str, Drawing]:
    """Return by name what the function `initialize` does to each of the parameters, on meta."""
    recorder = _Recorder(parameters)
    try:
        with recorder, torch.no_grad():
            initialize()
    except (
        RuntimeError,
        NotImplementedError,
    ):
        # `initialize` reads values of tensors, which tensors on the meta device do not have.
        for drawing in recorder.found.values():
            drawing.known = False
    return recorder.found


class _Recorder(TorchDispatchMode):
    """A dispatch mode that records operators on parameters in `found`."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found = {name: Drawing() for name in parameters}
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._names = {memory_of(parameter): name for name, parameter in parameters.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in(args, kwargs)
        names = {self._names[memory_of(x)] for x in tensors if memory_of(x) in self._names}
        if names and func not in _VIEWS:
            for name in names:
                # An operator with a second tensor cannot be repeated on a tile of this parameter.
                if len(tensors) > 1 or not self._note(name, func, args, kwargs):
                    self.found[name].known = False
        # In-place operators on meta tensors do nothing but take time: skip them.
        is_noop = func in _IN_PLACE and args[0].is_meta
        return args[0] if is_noop else func(*args, **kwargs)

    def _note(self, name: str, func: Any, args: Any, kwargs: Any) -> bool:
        """Record an operator on a parameter or on one index of its dim 0; return if it is
        supported."""
        drawing, shape, (x, *others) = self.found[name], self._shapes[name], args
        if x.shape == shape and func in _IN_PLACE:
            if func not in _ARITHMETIC:
                # A draw or a fill overwrites all earlier values.
                drawing.calls, drawing.rows = [], {}
            drawing.calls.append((func, tuple(others), kwargs))
            # After single rows were filled, arithmetic would change them as well: not supported.
            return not drawing.rows
        if x.shape == shape[1:] and x.is_contiguous() and func in _FILLS:
            row = x.storage_offset() // max(1, x.numel())
            drawing.rows[row] = float(others[0]) if others else 0.0
            return True
        return False
