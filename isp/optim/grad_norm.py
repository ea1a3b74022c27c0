"""The global gradient norm, the same number in every layout."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from isp.comm.cargo import Cargo
from isp.layers.module import NamedParameter
from isp.optim.buckets import Channels
from isp.optim.main_grads import MainGradients
from isp.parallel import Axis

__all__ = ["global_grad_norm"]


def global_grad_norm(
    gradients: MainGradients, channels: Channels, *, counted_elsewhere: Collection[str] = ()
) -> Tensor:
    """The norm over all distinct elements of the model's reduced gradients: [], float64.

    The ranks of a MODEL group (pipeline x weight) hold the model once, except for what is
    replicated: a parameter that every rank of a weight group holds is counted by the group's first
    rank, and one that two pipeline stages hold (tied weights) must be named in `counted_elsewhere`
    on all but one of them. Squares are added in float64, so the order of the additions, and with
    it the layout, does not show.
    """
    first = channels[Axis.WEIGHT].rank == 0

    def counts(item: NamedParameter) -> bool:
        return (item.layout.sharded or first) and item.name not in counted_elsewhere

    norms = [
        torch.linalg.vector_norm(gradients.grad(item.parameter), dtype=torch.float64)
        for item in gradients.parameters
        if counts(item) and item.parameter.numel()
    ]
    device = gradients.parameters[0].parameter.device
    zero = torch.zeros((), dtype=torch.float64, device=device)
    squares = torch.stack(norms).square().sum() if norms else zero
    return channels[Axis.MODEL].all_reduce_(squares, cargo=Cargo(tensor="grad norm")).wait().sqrt()
