"""Initial weights as a model's own code draws them; a rank draws its shard alone.

[Note: Drawn by tiles] The model's own code runs on parameters without memory, and what it does to
each is noted. Where that is drawing, filling and arithmetic element by element, as in nearly all
models, the same is done to the tiles of a shard [Note: Tiles].
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
"""In-place and element by element; what they take beside the parameter are numbers."""
_VIEWS = (_aten.detach.default, _aten.alias.default, _aten.select.int)


class InitialWeights(Protocol):
    """A source of the weights that a model begins from."""

    def fill(self, model: nn.Module, shards: Sequence[ShardedParameter], seed: int) -> None:
        """Put values into a rank's shards of `model`'s parameters, and into its kept buffers."""


@dataclass(eq=False)
class Drawing:
    """What a model's code does to a parameter."""

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """Operators on all of it, and what they are given besides."""
    rows: dict[int, float] = field(default_factory=dict)
    """Rows that are filled afterwards, such as that of the padding."""
    known: bool = True
    """Whether that is all that is done to it."""

    def shard(self, layout: ParameterLayout, stream: MasterStream) -> Tensor:
        """A rank's shard, float32 on CPU."""
        found = stream.drawn(layout, self._fill)
        if not self.calls:
            found.fill_(torch.nan)
        for row, value in self.rows.items():
            begin = 0
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
    """What `begin` does to each of these parameters, which have no memory, by name."""
    noted = _Noted(parameters)
    try:
        with noted, torch.no_grad():
            begin()
    except (RuntimeError, NotImplementedError):  # it asks for values
        for drawing in noted.found.values():
            drawing.known = False
    return noted.found


class _Noted(TorchDispatchMode):
    """Notes operators on parameters."""

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
                if len(tensors) > 1 or not self._note(name, func, args, kwargs):
                    self.found[name].known = False
        # What changes no memory is left out: torch takes long for it.
        is_noop = func in _IN_PLACE and args[0].is_meta
        return args[0] if is_noop else func(*args, **kwargs)

    def _note(self, name: str, func: Any, args: Any, kwargs: Any) -> bool:
        """Note an operator on a parameter or a row of it. Returns whether that is all it does."""
        drawing, shape, (x, *others) = self.found[name], self._shapes[name], args
        if x.shape == shape and func in _IN_PLACE:
            if func not in _ARITHMETIC:
                drawing.calls, drawing.rows = [], {}
            drawing.calls.append((func, tuple(others), kwargs))
            return not drawing.rows
        if x.shape == shape[1:] and x.is_contiguous() and func in _FILLS:
            row = x.storage_offset() // max(1, x.numel())
            drawing.rows[row] = float(others[0]) if others else 0.0
            return True
        return False
