"""How rotary positions are stretched to contexts longer than a model was trained for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["RopeScaling", "RopeScalingType"]


class RopeScalingType(StrEnum):
    """How positions beyond the original context are brought back into it."""

    NONE = "none"
    """Not at all."""
    LINEAR = "linear"
    """All frequencies divided by `factor`."""
    NTK = "ntk"
    """A larger base: transformers' `dynamic` rule at one fixed length, `target_length`."""
    YARN = "yarn"
    """High frequencies kept, low ones divided by `factor`, a ramp between; logits scaled."""
    LLAMA3 = "llama3"
    """As yarn in spirit, with the ramp over wavelengths and no scaling of the logits."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """`model.rope_scaling`; `type` says which of the fields below it are read."""

    type: RopeScalingType = RopeScalingType.NONE
    """none, linear, ntk, yarn or llama3."""
    factor: float = 1.0
    """How many times longer the context gets; at least 1."""
    original_max_position_embeddings: int = 0
    """Context, in tokens, that the frequencies were trained for (ntk, yarn, llama3)."""
    target_length: int | None = None
    """Context, in tokens, that the ntk base is fixed for; None: factor * original."""
    attention_factor: float | None = None
    """What yarn multiplies cos and sin by; None: 0.1 ln(factor) + 1, or as the mscales say."""
    mscale: float | None = None
    """Numerator of yarn's attention factor; used together with `mscale_all_dim` only."""
    mscale_all_dim: float | None = None
    """Denominator of yarn's attention factor."""
    beta_fast: float = 32.0
    """Rotations over the original context from which yarn keeps a frequency."""
    beta_slow: float = 1.0
    """Rotations over the original context up to which yarn divides a frequency by `factor`."""
    truncate: bool = True
    """Whether yarn rounds the ends of its ramp outwards to whole dims."""
    low_freq_factor: float = 1.0
    """original / this = wavelength, in tokens, from which llama3 divides a frequency."""
    high_freq_factor: float = 4.0
    """original / this = wavelength, in tokens, up to which llama3 keeps a frequency."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", RopeScalingType(self.type))
        if not self.factor >= 1:
            raise ValueError(f"rope_scaling.factor={self.factor} must be at least 1")
        needs_original = (RopeScalingType.NTK, RopeScalingType.YARN, RopeScalingType.LLAMA3)
        if self.type in needs_original and self.original_max_position_embeddings < 1:
            raise ValueError(
                f"rope_scaling.type={self.type} needs original_max_position_embeddings, the context"
                f" that the model was trained for; got {self.original_max_position_embeddings}"
            )
        if self.target_length is not None and self.target_length < 1:
            raise ValueError(f"rope_scaling.target_length={self.target_length} must be at least 1")
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(f"rope_scaling.attention_factor={self.attention_factor} must be > 0")
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"rope_scaling needs beta_fast > beta_slow > 0, got {self.beta_fast} and"
                f" {self.beta_slow}"
            )
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"rope_scaling needs high_freq_factor > low_freq_factor > 0, got"
                f" {self.high_freq_factor} and {self.low_freq_factor}"
            )

    @property
    def logit_scale(self) -> float:
        """What cos and sin are multiplied by, so that logits are multiplied by its square."""
        if self.type is not RopeScalingType.YARN:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0
