"""Shared by tests of the Megatron-LM layers: tensors, the unsharded linear, and counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from isp.core.comm import Channel, CommLog
from isp.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.toolkit import Operations

__all__ = [
    "CLOSE",
    "DTYPE",
    "INNER",
    "LINEARS",
    "NAMES",
    "WIDTH",
    "WORLDS",
    "B",
    "Made",
    "S",
    "drawn",
    "features",
    "fill",
    "group",
    "plain",
    "slice_of",
]

S, B, WIDTH, INNER = 8, 2, 16, 48
WORLDS = [1, 4]
DTYPE = torch.float64
# Sums over the ranks have another order than those in the unsharded matmul.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def group(log: CommLog | None = None) -> Channel:
    return Channel(dist.group.WORLD, name="tensor", log=log)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Return random numbers that are equal on every rank."""
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def slice_of(x: Tensor, dim: int, channel: Channel) -> Tensor:
    return x.chunk(channel.size, dim)[channel.rank].clone()


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> dict[str, Tensor]:
    """Return output and gradients of the unsharded linear."""
    leaves = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    y = F.linear(leaves["x"], leaves["weight"], leaves.get("bias"))
    y.backward(dy)
    grads = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"y": y.detach(), **grads}


def fill(layer: Any, weight: Tensor, bias: Tensor) -> None:
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.copy_(layer.layouts["weight"].shard(weight))
        if layer.bias is not None:
            layer.bias.copy_(layer.layouts["bias"].shard(bias))


LINEARS: dict[str, Any] = {
    "column": (ColumnParallelLinear, {}),
    "column, sequence parallel": (ColumnParallelLinear, {"sequence_parallel": True}),
    "row": (RowParallelLinear, {"input_is_parallel": True}),
}
NAMES = {name: name for name in LINEARS}


def features(y: Tensor, layer: Any, dim: int) -> Tensor:
    """Return the part of y's last dim that belongs to this rank's part of the weight's `dim`."""
    assert layer.layouts["weight"].dim == dim
    return torch.cat([y[..., a:b] for a, b in layer.layouts["weight"].intervals()], dim=-1)


class Made(Operations):
    """Counts the tensors of one shape that operations create."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(self._look)
        self.shape, self.count = shape, 0

    def _look(self, _: str, args: tuple[Any, ...], out: Any) -> None:
        held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(out, Tensor) and tuple(out.shape) == self.shape:
            self.count += out.untyped_storage().data_ptr() not in held
