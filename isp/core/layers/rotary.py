"""Rotary position embeddings, with scaling to longer contexts.

B batch, S sequence, H heads, d head size.

Source: Su et al. 2021 (RoFormer). The scalings follow transformers' `modeling_rope_utils.py`, so
that published checkpoints give the same results: Peng et al. 2023 (YaRN), Llama 3.1's wavelengths.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.autograd import Function, once_differentiable
from isp.core.comm import pinned_memory
from isp.core.layers.compiled import lazily_compiled
from isp.core.layers.rope_scaling import RopeScaling, RopeScalingType

__all__ = ["RotaryEmbedding", "apply_rotary", "inverse_frequencies"]


def inverse_frequencies(head_dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """Return the radians per token by which each pair of features turns: [d/2], float64."""
    if scaling.type is RopeScalingType.NTK:
        base *= scaling.base_factor(head_dim)
    inverse = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # [d/2]
    match scaling.type:
        case RopeScalingType.NONE | RopeScalingType.NTK:
            return inverse
        case RopeScalingType.LINEAR:
            return inverse / scaling.factor
        case RopeScalingType.YARN:
            kept = _yarn_kept(head_dim, base, scaling)
        case RopeScalingType.LLAMA3:
            kept = _llama3_kept(inverse, scaling)
    # A mix of the frequency and the frequency divided by `factor`, by the share that is kept.
    return inverse * kept + inverse / scaling.factor * (1 - kept)


def _yarn_kept(head_dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """Return the share of each frequency that yarn keeps, 1 to 0 over a ramp of dims: [d/2]."""

    def dim_of(rotations: float) -> float:
        """Return the dim that turns `rotations` times over the original context; not an integer."""
        wavelengths = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(base))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # a ramp of no width would divide by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / width
    return 1 - ramp.clamp(0, 1)


def _llama3_kept(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the share of each frequency that llama3 keeps, 1 for short wavelengths: [d/2]."""
    rotations = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((rotations - low) / (high - low)).clamp(0, 1)


class RotaryEmbedding(nn.Module):
    """A module that computes cos and sin of all positions' angles, once a forward for all blocks.

    Angles are computed in float64: in float32 a position of 1e6 is off by up to 0.06 radians.
    There are no parameters and buffers. Raises ValueError if `head_dim` is odd or below 4.
    """

    def __init__(
        self, head_dim: int, *, base: float = 10_000.0, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        if head_dim % 2 or head_dim < 4:
            raise ValueError(
                f"head_dim={head_dim}: rotary embeddings need an even head size of 4 or more"
            )
        self.head_dim = head_dim
        self.base = base
        scaling = RopeScaling() if scaling is None else scaling
        self._logit_scale = scaling.logit_scale
        # Frequencies are no buffer, but sent to a device when needed: `module.to(bfloat16)` would
        # round a buffer, and a model built on the meta device would lose its values.
        with torch.device("cpu"):
            self._inverse = tuple(inverse_frequencies(head_dim, base, scaling).tolist())
        self._sent: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @torch.no_grad()
    def forward(
        self, position_ids: Tensor, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, S, d/2] of position_ids [B, S], int64, of this rank's tokens.

        They are in float32, or in float64 if `dtype` is float64.
        """
        device = position_ids.device
        angle_dtype = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        inverse = self._inverse_on(device, angle_dtype)
        angles = position_ids.unsqueeze(-1).to(angle_dtype) * inverse  # [B, S, d/2]
        dtype = torch.promote_types(dtype, torch.float32)
        cos, sin = angles.cos() * self._logit_scale, angles.sin() * self._logit_scale
        return cos.to(dtype), sin.to(dtype)

    def _inverse_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the frequencies [d/2] on `device`, from a cache."""
        if (dtype, device) not in self._sent:
            inverse = torch.tensor(self._inverse, dtype=dtype)
            self._sent[dtype, device] = pinned_memory.send(inverse, device)
        return self._sent[dtype, device]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, compiled: bool = False) -> Tensor:
    """Return x with each pair (x_i, x_{i + d/2}) rotated by its position's angle.

    The pairs are those of transformers' `rotate_half`. x [B, S, H, d], cos and sin [B, S, d/2] ->
    [B, S, H, d], computed in the dtype of cos and sin, returned in that of x. Backward rotates by
    the negative angle; only cos and sin are saved, which all blocks share. With `compiled`, forward
    and backward are one kernel each: see [Note: Compiled] in docs/design/notes/layers.md. Raises
    ValueError if the last dim of cos is not d/2.
    """
    if 2 * cos.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"cos has {cos.shape[-1]} angles a token, for a head size of {2 * cos.shape[-1]}, but x"
            f" has head size {x.shape[-1]}: make cos and sin with a RotaryEmbedding of that size"
        )
    # Without gradients, make no autograd node: it costs as much time as rotating one token.
    if not (compiled or torch.is_grad_enabled()):
        return _turn(x, cos, sin, 1)
    out: Tensor = _Turn.apply(x, cos, sin, compiled)
    return out


class _Turn(Function):
    """The autograd function of `apply_rotary`; dx is dy rotated by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.compiled = compiled
        return _turned(x, cos, sin) if compiled else _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        dx = _turned_back(dy, cos, sin) if ctx.compiled else _turn(dy, cos, sin, -1)
        return dx, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Return x rotated by `direction` (1 or -1) times the angles, by one addcmul for each half.

    Computes in the dtype of cos and sin; at most one half of x exists in that dtype at a time.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [B, S, 1, d/2]
    a, b = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    left, right = out.chunk(2, dim=-1)
    torch.addcmul(a * cos, b, sin, value=-direction, out=left)
    torch.addcmul(b * cos, a, sin, value=direction, out=right)
    return out


def _turn_at_once(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x rotated by the angles of cos and sin, without in-place operations, for a compiler.

    With -sin in place of sin, it is rotated back.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [B, S, 1, d/2]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@lazily_compiled
def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x rotated by the angles, by one compiled kernel."""
    return _turn_at_once(x, cos, sin)


@lazily_compiled
def _turned_back(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return dy rotated by the negative angles, by one compiled kernel."""
    return _turn_at_once(dy, cos, -sin)
