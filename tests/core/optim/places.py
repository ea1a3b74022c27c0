"""Parameters for tests: sharded by a topology, with gradients that are equal in every layout."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isp.core.comm import Mesh
from isp.core.mesh import Axis, Topology
from isp.core.mesh.layout import Matrices, ParameterLayout
from isp.core.weights.sharded_parameter import ShardedParameter


class Spec(NamedTuple):
    """A whole parameter of the test model."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    """The dim that is cut over the weight group; None: replicated."""
    segments: tuple[int, ...] = ()
    stage: int = 0
    """The pipeline stage of the parameter."""
    matrices: Matrices | None = None
    """The matrices that the parameter consists of."""
    cuts: tuple[Any, ...] = (...,)
    """Indices of the matrices in the parameter."""

    def full(self, seed: int) -> Tensor:
        """Return a float64 tensor that depends only on name and seed."""
        generator = torch.Generator().manual_seed(sum(map(ord, self.name)) * 1000 + seed)
        return torch.randn(self.shape, generator=generator, dtype=torch.float64)

    def layout(self, weight: int, index: int) -> ParameterLayout:
        """Return the layout on rank `index` of a weight group of `weight` ranks."""
        cut = self.dim is not None
        return ParameterLayout(
            global_shape=self.shape,
            reduce_over=Axis.WEIGHT_DATA if cut else Axis.STAGE,
            dim=self.dim or 0,
            parts=weight if cut else 1,
            index=index if cut else 0,
            segments=self.segments,
            matrices=self.matrices,
            decays=len(self.shape) > 1,
        )


def place(
    spec: Spec, mesh: Mesh, dtype: torch.dtype, device: torch.device | None = None
) -> ShardedParameter:
    """Return this rank's shard of a parameter, and its layout."""
    layout = spec.layout(mesh[Axis.WEIGHT].size, mesh[Axis.WEIGHT].rank)
    shard = layout.shard(spec.full(0)).to(device, dtype).contiguous()
    return ShardedParameter(spec.name, nn.Parameter(shard), layout)


class Reach(Enum):
    """The ranks on which the loss of a step reaches a parameter."""

    ALL = "all"
    FIRST = "the first replica"
    ZEROS = "all, whose gradients are zero"
    NONE = "none"


def reach(specs: list[Spec], name: str, seed: int) -> Reach:
    """Return which ranks reach a parameter; steps 2 and 3 of each four have all kinds."""
    number = [spec.name for spec in specs].index(name)
    return Reach.ALL if seed % 4 < 2 else [*Reach][(number + seed) % 4]


def go_backward(
    items: list[ShardedParameter],
    specs: list[Spec],
    mesh: Mesh,
    seed: int,
    scale: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Run backward of the losses of all parameters that this rank reaches; `specs`: of all
    stages.
    """
    total = torch.zeros((), dtype=torch.float64)
    for item in items:
        kind = reach(specs, item.name, seed)
        is_first = mesh[item.layout.reduce_over].rank == 0
        if kind is Reach.NONE or (kind is Reach.FIRST and not is_first):
            continue
        total = total + loss([item], specs, mesh, seed) * (kind is not Reach.ZEROS)
    if total.requires_grad:
        scale(total).backward()


def go_backward_plainly(
    spec: Spec, parameter: Tensor, kind: Reach, seed: int, ranks: Topology
) -> None:
    """Run backward of a whole parameter's losses over all ranks."""
    num = ranks.stage
    if kind is Reach.FIRST:
        num = 1 if spec.dim is None else ranks.weight
    if kind is not Reach.NONE:
        total = full_loss(spec, parameter, seed, num, pull=0.1 * num / ranks.stage)
        (total * (kind is not Reach.ZEROS)).backward()


def loss(items: list[ShardedParameter], specs: list[Spec], mesh: Mesh, seed: int) -> Tensor:
    """Return this rank's loss; its gradients summed over the ranks are those of `full_loss`."""
    by_name = {spec.name: spec for spec in specs}
    total = torch.zeros((), dtype=torch.float64)
    for item in items:
        name, parameter, layout = item.name, item.parameter, item.layout
        members = mesh.topology.group_of(Axis.WEIGHT, mesh.rank)
        ranks = members if layout.reduce_over is Axis.WEIGHT_DATA else [mesh.rank]
        slope = sum(by_name[name].full(seed * 100 + rank % mesh.topology.stage) for rank in ranks)
        pull = 0.1 / mesh[layout.reduce_over].size
        shard = layout.shard(slope)
        total = total + (parameter * shard).sum() + parameter.double().square().sum() * pull
    return total


def full_loss(
    spec: Spec, parameter: Tensor, seed: int, stage_ranks: int, pull: float = 0.1
) -> Tensor:
    """Return the loss of a whole parameter, summed over the ranks of its stage."""
    slope = sum(spec.full(seed * 100 + rank) for rank in range(stage_ranks))
    return (parameter * slope).sum() + parameter.double().square().sum() * pull
