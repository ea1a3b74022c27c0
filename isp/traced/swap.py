"""Somebody else's weights: shards in their places, which linears and tables read as whole values.

The module stays, and so do the names: `module.weight` is this rank's shard, and the instance's
`forward` multiplies by the whole. O out features, I in features, V vocabulary, D hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isp.layers.embedding import look_up
from isp.layers.factory import LayerFactory
from isp.layers.linear import Moves, WeightGradientRoute, multiply
from isp.layers.module import NamedParameter
from isp.parallel.layout import ParameterLayout
from isp.traced.trace import ModelTrace, Role, is_transposed
from isp.weights.wp import WPCommunicator

__all__ = ["SwappedLinear", "SwappedTable", "shard_parameters"]


class _Swapped:
    """A module of somebody else's as the runtime sees it: a holder of a sharded weight."""

    def __init__(self, module: nn.Module, name: str, communicator: WPCommunicator) -> None:
        self.module = module
        self.name = name
        self.communicator = communicator
        self.moves = Moves()
        self.layouts: dict[str, ParameterLayout] = {}

    @property
    def weight(self) -> nn.Parameter:
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight


class SwappedLinear(_Swapped):
    """An `nn.Linear` [O, I], or a `Conv1D` of transformers [I, O]; `called` hears of each call."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: WPCommunicator,
        called: Callable[[], None],
    ) -> None:
        super().__init__(module, name, communicator)
        self.transposed = is_transposed(module)
        self.weight_gradients: WeightGradientRoute | None = None

        def forward(x: Tensor) -> Tensor:
            called()
            return multiply(x, self.weight, self.bias, self)

        setattr(module, "forward", forward)  # noqa: B010

    @property
    def bias(self) -> nn.Parameter | None:
        bias = self.module.bias
        assert bias is None or isinstance(bias, nn.Parameter)
        return bias


class SwappedTable(_Swapped):
    """An `nn.Embedding`, or a class made of it, whose own lookup is replaced and nothing else."""

    bias: nn.Parameter | None = None
    deterministic = False

    def __init__(
        self,
        module: nn.Embedding,
        name: str,
        communicator: WPCommunicator,
        called: Callable[[], None],
    ) -> None:
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(
                f"{name} is an nn.Embedding with max_norm, scale_grad_by_freq or sparse, which isp"
                f" does not have"
            )
        super().__init__(module, name, communicator)
        self.padding_idx = -1 if module.padding_idx is None else module.padding_idx
        original, instead = module.forward, _Lookup(self)

        def forward(*args: Any, **kwargs: Any) -> Tensor:  # OPT's table takes more than tokens
            called()
            with instead:
                y: Tensor = original(*args, **kwargs)
            return y

        setattr(module, "forward", forward)  # noqa: B010


class _Lookup(TorchFunctionMode):
    """Replaces the lookup in one table."""

    def __init__(self, table: SwappedTable) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.embedding and args[1] is self._table.weight:
            return look_up(args[0], self._table.weight, self._table)
        return func(*args, **(kwargs or {}))


def shard_parameters(
    model: nn.Module, trace: ModelTrace, layers: LayerFactory
) -> Iterator[NamedParameter]:
    """Put this rank's shard in the place of every parameter, wherever it is used."""
    uses: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for local, parameter in module.named_parameters(recurse=False):
            uses.setdefault(id(parameter), []).append((module, local))
    for name in [name for name, _ in model.named_parameters()]:
        parameter = model.get_parameter(name)
        shape = tuple(parameter.shape)
        if trace.roles[name] is Role.SHARDED:
            layout = layers.sharded_layout(shape, dim=0)
        else:
            layout = layers.replicated_layout(shape)
        shard = nn.Parameter(
            _own_part(parameter, layout, layers), requires_grad=parameter.requires_grad
        )
        for module, local in uses.pop(id(parameter)):
            setattr(module, local, shard)
        del parameter  # nobody else holds it: whole weights go one by one
        yield NamedParameter(name, shard, layout)
    for module in model.modules():
        for local, buffer in module.named_buffers(recurse=False):
            if layers.device.type != "meta":
                setattr(module, local, buffer.to(layers.device))


def _own_part(parameter: nn.Parameter, layout: ParameterLayout, layers: LayerFactory) -> Tensor:
    if parameter.is_meta or layers.device.type == "meta":
        return torch.empty(layout.local_shape, device=layers.device, dtype=layers.dtype)
    part = layout.shard(parameter.detach())
    return part.to(device=layers.device, dtype=layers.dtype, copy=True).contiguous()
