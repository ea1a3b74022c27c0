"""Evenly split weights and their gradients are never copied, as counts of writes show.

I in features, O out features; the shard is half of W [O, I]. Activations are smaller than a shard,
so every write of a shard's size or more is a write of a weight or its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isp.core.mesh import Axis
from isp.core.mesh.config import Prefetch
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.uses import sequential_actions
from tests.ranks import run_ranks
from tests.toolkit import CPU, ToolkitLayers, blocks_of, weight_mesh

I, O, TOKENS = 24, 32, 3  # noqa: E741
FULL, SHARD = O * I, O * I // 2


class Write(NamedTuple):
    """An operation that wrote a tensor of a shard's size or more."""

    name: str
    numel: int
    to: int
    """Address of the output."""
    read: tuple[int, ...]
    """Addresses of its large inputs."""


class WriteCounter(TorchDispatchMode):
    """Records operations that write large tensors; views write nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self.products: list[Write] = []
        """Matrix products that read a large tensor, of any output size."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        read = tuple(t.data_ptr() for t in inputs if t.numel() >= SHARD)
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::bmm") and read:
            self.products.append(Write(name, 0, 0, read))
        if name.startswith("c10d::"):
            target = inputs[0]
            self.writes.append(Write(name, target.numel(), target.data_ptr(), read))
        elif not any(a.alias_info is not None for a in func._schema.returns) or (
            func._schema.is_mutable
        ):
            for t in tree_leaves(out):
                if isinstance(t, Tensor) and t.numel() >= SHARD:
                    self.writes.append(Write(name, t.numel(), t.data_ptr(), read))
        return out

    def names(self) -> list[tuple[str, int]]:
        return [(w.name.split("::")[1], w.numel) for w in self.writes]


def one_linear(
    rank: int, overlap: bool, out_features: int
) -> tuple[Callable[[], WriteCounter], Tensor]:
    """Return a function that runs and counts a step of one linear, and the linear's shard."""
    weight = weight_mesh(rank, 2)[Axis.WEIGHT]
    communicator = ISPCommunicator(
        weight, ISPCommModelConfig(device=CPU), prefetch=Prefetch(overlap=overlap)
    )
    layers = ToolkitLayers(weight=weight, communicator=communicator, dtype=torch.float32)
    layer = layers.column(I, (out_features,), std=0.1)
    torch.nn.init.normal_(layer.weight)
    layer.name = "layer"
    communicator.declare([blocks_of(layer)])
    x = torch.randn(1, TOKENS, I, requires_grad=True)

    def step() -> WriteCounter:
        with WriteCounter() as counter:
            communicator.begin(sequential_actions(1))
            layer(x).sum().backward()
            communicator.finish()
        layer.weight.grad = None
        return counter

    step()  # the first step fills the pool
    return step, layer.weight


def count_even(rank: int, overlap: bool) -> None:
    step, shard = one_linear(rank, overlap, O)
    counter = step()
    assert counter.names() == [
        ("_allgather_base_", FULL),
        ("mm", FULL),  # dW
        ("alltoall_base_", FULL),
        ("add", SHARD),  # the sum of the two ranks' parts
        ("clone", SHARD),  # into shard.grad, which is not there yet
    ]
    gather, product, exchange, total, delivered = counter.writes
    assert gather.read == (gather.to, shard.data_ptr())
    assert exchange.read == (exchange.to, product.to)
    assert total.read[:2] == (exchange.to, exchange.to + SHARD * 4)
    assert delivered.read == (total.to,)
    forward, backward = counter.products  # dW reads no large tensor
    assert forward.read == backward.read == (gather.to,)


def count_uneven(rank: int, overlap: bool) -> None:
    """Count the writes for 31 rows on two ranks.

    Only uneven shards need padding: of the last rank's shard, and of gradients on all ranks.
    """
    step, _ = one_linear(rank, overlap, O - 1)
    names = step().names()
    assert ("new_zeros", FULL) in names
    assert ("copy_", FULL - I) in names
    assert (("new_zeros", SHARD) in names) is (rank == 1)


def run_both(rank: int) -> None:
    for overlap in (True, False):
        count_even(rank, overlap)
        count_uneven(rank, overlap)


def test_even_weights_and_gradients_are_not_copied() -> None:
    """Catches a weight copied before it is sent or after it arrives, and a copied gradient.

    The copies that 31 rows need show that the counter works.
    """
    run_ranks(2, run_both)
