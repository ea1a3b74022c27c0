"""RMSNorm with a weight that every rank holds whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.layers.module import MasterStream, ParallelModule
from isp.parallel.layout import ParameterLayout

__all__ = ["RMSNorm"]


class RMSNorm(ParallelModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Source: Zhang & Sennrich 2019.
    """

    weight: nn.Parameter

    def __init__(
        self, layout: ParameterLayout, *, eps: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps = eps
        self.add_shard("weight", layout, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., D] -> [.., D]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def initial_value(self, name: str, stream: MasterStream) -> Tensor:
        return torch.ones(self.layouts[name].global_shape)
