"""The stream from which initial weights are drawn, the same whatever the layout."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MasterStream"]


@dataclass(frozen=True)
class MasterStream:
    """Random numbers for one parameter: a function of the run's seed and its name alone."""

    seed: int
    name: str

    @property
    def generator_seed(self) -> int:
        """The seed of a generator of this parameter's own."""
        digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        """A float32 tensor on CPU of normal values of mean 0."""
        generator = torch.Generator().manual_seed(self.generator_seed)
        return torch.empty(shape).normal_(0.0, std, generator=generator)
