"""Newton-Schulz: the matrices of a weight, and their singular values brought to about 1.

[Note: One shape] Which rank is the home of a matrix, and what else it has, changes no bit: on CPU
matrices are multiplied one by one, elsewhere small ones in batches whose size follows from the
shape alone, padded with zeros.

A, B rows and columns of a matrix
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from isp.core.mesh.layout import Matrices, ParameterLayout
from isp.core.optim.config import MuonConfig, OptimizerConfig
from isp.core.optim.update_rules import group_of
from isp.core.torch_private import foreach_copy_

__all__ = ["Matrix", "make_orthogonal", "matrices_of", "newton_schulz"]

_BATCH_ELEMENTS, _LARGEST_BATCH = 2**21, 16
"""Of matrices that a device multiplies at once [Note: One shape]."""


class Matrix(NamedTuple):
    """A matrix of a weight: a block of its global tensor, of one expert at most."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def cost(self) -> int:
        """Multiplications of a step of Newton-Schulz."""
        short, long = sorted(self.sizes[-2:])
        return short * short * (2 * long + short)

    def flops(self, keys: MuonConfig) -> int:
        """Those of its Newton-Schulz."""
        return 2 * self.cost * keys.ns_steps

    def ratio(self, keys: MuonConfig) -> float:
        """What the learning rate is multiplied by."""
        rows, columns = self.sizes[-2:]
        if keys.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def matrices_of(name: str, layout: ParameterLayout, config: OptimizerConfig) -> list[Matrix]:
    """The matrices of a weight, in order.

    Raises ValueError if its group splits it in proportions that do not divide it.
    """
    shape, known = layout.global_shape, layout.matrices or Matrices()
    length, group = shape[known.dim], group_of(name, config)
    sizes = known.sizes or (length,)
    if group is not None and group.split:
        if length % sum(group.split):
            raise ValueError(
                f"optimizer.param_groups: split={[*group.split]} must add up to a divisor of the"
                f" {length} output features of {name}"
            )
        sizes = tuple(part * length // sum(group.split) for part in group.split)
    elif config.muon.per_head and known.heads:
        sizes = (length // known.heads,) * known.heads
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    cut: list[list[tuple[int, int]]] = [[(i, 1) for i in range(n)] for n in shape[:-2]]
    cut += [[(0, n)] for n in shape[-2:]]
    cut[known.dim] = list(zip(starts, sizes, strict=True))
    return [Matrix(*zip(*place, strict=True)) for place in product(*cut)]


def newton_schulz(x: Tensor, keys: MuonConfig) -> Tensor:
    """x [A, B] or [n, A, B] with singular values of about 1, in the dtype of x.

    The operations of `torch.optim.Muon`, which takes x in bfloat16.
    """
    a, b, c = keys.ns_coefficients
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=keys.eps)
    for _ in range(keys.ns_steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def make_orthogonal(xs: Sequence[Tensor], keys: MuonConfig) -> None:
    """Replace matrices of one shape by their `newton_schulz` [Note: One shape]."""
    count = min(_LARGEST_BATCH, _BATCH_ELEMENTS // xs[0].numel())
    if xs[0].device.type == "cpu" or count < 2:
        for x in xs:
            x.copy_(newton_schulz(x, keys))
        return
    for first in range(0, len(xs), count):
        some = xs[first : first + count]
        batch = some[0].new_zeros(count, *some[0].shape)
        foreach_copy_([*batch[: len(some)].unbind()], [*some])
        foreach_copy_([*some], [*newton_schulz(batch, keys)[: len(some)].unbind()])
