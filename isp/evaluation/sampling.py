"""The choice of the next token from its logits.

n documents, V vocabulary
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampler", "SamplingConfig"]


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn; names and order (temperature, top_k, top_p) are transformers'.

    Raises ValueError for values that no draw has.
    """

    temperature: float = 0.0
    """Divides the logits; 0: always the likeliest token."""
    top_k: int = 0
    """Draw among so many of the likeliest; 0: among all."""
    top_p: float = 1.0
    """Draw among the fewest of the likeliest whose probabilities sum up to this; 1: among all."""
    seed: int = 0
    """Of the random numbers."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"--temperature {self.temperature} must be 0 (the likeliest token) or more"
            )
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k} must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} must be above 0 and at most 1 (all tokens)")


class Sampler:
    """Draws tokens; the numbers of a document are those of the seed and its place in the batch.

    One uniform number a token, drawn on the host: the same on any device and in any layout.
    """

    def __init__(self, config: SamplingConfig, documents: int) -> None:
        self.config = config
        self._generators = [
            torch.Generator().manual_seed((config.seed + index) % 2**63)
            for index in range(documents)
        ]

    def __call__(self, logits: Tensor) -> Tensor:
        """The tokens drawn from logits [n, V]: [n]."""
        config = self.config
        if config.temperature == 0:
            return logits.argmax(-1)
        logits, order = logits.double().sort(-1, descending=True)
        logits = (logits - logits[:, :1]) / config.temperature  # at most 0: none overflows
        if config.top_k:
            logits, order = logits[:, : config.top_k], order[:, : config.top_k]
        sums = logits.softmax(-1).cumsum(-1)
        if config.top_p < 1:
            # as many as it takes to reach top_p; the likeliest always
            kept = 1 + (sums[:, :-1] < config.top_p).sum(-1, keepdim=True)
            sums = sums.minimum(sums.gather(-1, kept - 1))
        drawn = torch.stack(
            [torch.rand(1, generator=g, dtype=torch.float64) for g in self._generators]
        )
        # the first token with which the sum is beyond the number
        place = (sums <= drawn.to(sums.device) * sums[:, -1:]).sum(-1, keepdim=True)
        return order.gather(-1, place.clamp(max=sums.shape[-1] - 1)).squeeze(-1)
