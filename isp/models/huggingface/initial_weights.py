"""Initial weights as a model's own code draws them, on each rank for its shard only.

[Note: Drawn by tiles] The model's initialization runs once on meta parameters, and the operators
that it applies to each are recorded. If they only draw, fill and compute element by element, as in
nearly all models, they are replayed on the tiles of a shard [Note: Tiles].
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


class InitialWeights(Protocol):
    """A source of a model's initial weights."""

    def fill(self, model: nn.Module, shards: Sequence[ShardedParameter], seed: int) -> None:
        """Fill a rank's shards of the parameters of `model`, and the buffers that are saved."""


@dataclass(eq=False)
class Drawing:
    """The recorded initialization of one parameter."""

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """Operators on the whole parameter, with their further arguments."""
    rows: dict[int, float] = field(default_factory=dict)
    """Fill values of rows that are set after `calls`, such as the padding row, by row."""
    known: bool = True
    """True if `calls` and `rows` are the whole initialization; False if it did anything else."""

    def shard(self, layout: ParameterLayout, stream: MasterStream) -> Tensor:
        """Return a rank's shard, float32 on CPU, drawn from `stream`."""
        found = stream.drawn(layout, self._fill)
        if not self.calls:  # never initialized: NaN shows in the first loss
            found.fill_(torch.nan)
        for row, value in self.rows.items():
            begin = 0  # row of the shard at which the interval starts
            for start, stop in layout.intervals() if layout.dim == 0 else ((0, len(found)),):
                if start <= row < stop:
                    found[begin + row - start] = value
                begin += stop - start
        return found

    def _fill(self, tile: Tensor, generator: torch.Generator) -> None:
        for func, args, kwargs in self.calls:
            own = {**kwargs, "generator": generator} if func in _RANDOM else kwargs
            func(tile, *args, **own)


def drawings(parameters: Mapping[str, Tensor], begin: Callable[[], None]) -> dict[str, Drawing]:
    """Record what `begin` does to each of these parameters on the meta device, by name."""
    noted = _Noted(parameters)
    try:
        with noted, torch.no_grad():
            begin()
    except (RuntimeError, NotImplementedError):  # it reads values, which meta tensors lack
        for drawing in noted.found.values():
            drawing.known = False
    return noted.found


class _Noted(TorchDispatchMode):
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
                # With a second tensor, values come from elsewhere: replaying needs numbers only.
                if len(tensors) > 1 or not self._note(name, func, args, kwargs):
                    self.found[name].known = False
        # In-place operators on meta tensors do nothing, slowly: skip them.
        is_noop = func in _IN_PLACE and args[0].is_meta
        return args[0] if is_noop else func(*args, **kwargs)

    def _note(self, name: str, func: Any, args: Any, kwargs: Any) -> bool:
        """Record an operator on a parameter or one of its rows; return whether it is understood."""
        drawing, shape, (x, *others) = self.found[name], self._shapes[name], args
        if x.shape == shape and func in _IN_PLACE:
            if func not in _ARITHMETIC:  # a draw or fill overwrites whatever came before
                drawing.calls, drawing.rows = [], {}
            drawing.calls.append((func, tuple(others), kwargs))
            return not drawing.rows  # arithmetic after a row's fill would change the row, too
        if x.shape == shape[1:] and x.is_contiguous() and func in _FILLS:
            row = x.storage_offset() // max(1, x.numel())
            drawing.rows[row] = float(others[0]) if others else 0.0
            return True
        return False
