"""The keys of `model.rope_scaling`: rotary positions in contexts longer than those of training.

This file does not import torch: a configuration is read before torch is loaded.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from isp.core.section import Count, CountOrZero, KeyRole, NotNegative, Positive, section

__all__ = ["RopeScaling", "RopeScalingType"]


class RopeScalingType(StrEnum):
    """The method of scaling positions beyond the original context."""

    NONE = "none"
    """No scaling."""
    LINEAR = "linear"
    """All frequencies are divided by `factor`."""
    NTK = "ntk"
    """A larger base: transformers' `dynamic` rule at one fixed length, `target_length`."""
    YARN = "yarn"
    """High frequencies are kept, low ones divided by `factor`, with a ramp between by dim; logits
    are scaled."""
    LLAMA3 = "llama3"
    """High frequencies are kept, low ones divided by `factor`, with a ramp between by wavelength;
    logits are not scaled."""


@section("model.rope_scaling", KeyRole.MODEL)
class RopeScaling:
    """`model.rope_scaling`; `type` determines which of the other keys are read."""

    type: Annotated[RopeScalingType, Field(strict=False)] = RopeScalingType.NONE
    """Method of scaling: none, linear, ntk, yarn or llama3."""
    factor: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    """Factor by which the context is extended, at least 1."""
    original_max_position_embeddings: CountOrZero = 0
    """Context length, in tokens, that the model was trained with (ntk, yarn, llama3)."""
    target_length: Count | None = None
    """Context length, in tokens, that determines the base in ntk; null: factor *
    original_max_position_embeddings."""
    attention_factor: Positive | None = None
    """Factor on cos and sin in yarn; null: 0.1 ln(factor) + 1, or from mscale and
    mscale_all_dim."""
    mscale: NotNegative | None = None
    """Numerator of yarn's attention factor; used together with `mscale_all_dim` only."""
    mscale_all_dim: NotNegative | None = None
    """Denominator of yarn's attention factor."""
    beta_fast: Positive = 32.0
    """yarn keeps frequencies with at least this many rotations over the original context."""
    beta_slow: Positive = 1.0
    """yarn divides frequencies with at most this many rotations over the original context by
    `factor`."""
    truncate: bool = True
    """yarn: round the ends of the ramp outwards to whole dims."""
    low_freq_factor: Positive = 1.0
    """llama3 divides a frequency by `factor` if its wavelength in tokens is above
    original_max_position_embeddings / low_freq_factor."""
    high_freq_factor: Positive = 4.0
    """llama3 keeps a frequency if its wavelength in tokens is below
    original_max_position_embeddings / high_freq_factor."""

    def __post_init__(self) -> None:
        needs_original = (RopeScalingType.NTK, RopeScalingType.YARN, RopeScalingType.LLAMA3)
        if self.type in needs_original and self.original_max_position_embeddings < 1:
            raise ValueError(
                f"model.rope_scaling.type={self.type} needs original_max_position_embeddings, the"
                f" context that the model was trained for; got"
                f" {self.original_max_position_embeddings}"
            )
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"model.rope_scaling needs beta_fast > beta_slow, got {self.beta_fast} and"
                f" {self.beta_slow}"
            )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"model.rope_scaling needs high_freq_factor > low_freq_factor, got"
                f" {self.high_freq_factor} and {self.low_freq_factor}"
            )

    @property
    def logit_scale(self) -> float:
        """The factor on cos and sin. It multiplies q and k, so logits are scaled by its square."""
        if self.type is not RopeScalingType.YARN:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def base_factor(self, head_dim: int) -> float:
        """Return the factor by which ntk multiplies the base, for heads of `head_dim` features."""
        original = self.original_max_position_embeddings
        length = max(self.target_length or self.factor * original, original)
        stretch = self.factor * length / original - (self.factor - 1)
        return float(stretch ** (head_dim / (head_dim - 2)))

    def _mscale(self, weight: float) -> float:
        """Return yarn's attention factor, 0.1 weight ln(factor) + 1; Peng et al. 2023: weight 1."""
        return 0.1 * weight * math.log(self.factor) + 1.0
