"""Decays of a chunk, of logarithms that may be of any size."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decays"]


def decays(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Of [n, H, c, ..]: of each token from the one before the chunk [n, H, c, ..], and from each.

    The latter are [n, H, c, c, ..], zero from later ones. They are sums of what lies between: as
    differences of the former's logarithms they would be lost behind a strong decay.
    """
    size, rest = logarithms.shape[2], (1,) * (logarithms.dim() - 3)
    ones = torch.ones(size, size, dtype=torch.bool, device=logarithms.device)
    seen, later = (ones.tril(at).view(size, size, *rest) for at in (0, -1))
    between = logarithms.unsqueeze(3).where(later, 0).cumsum(2)
    return logarithms.cumsum(2).exp(), between.masked_fill_(~seen, -torch.inf).exp_()
