"""Rotary embeddings against the standard rotation and the published scaling formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from isp.core.layers.rope_scaling import RopeScaling, RopeScalingType
from isp.core.layers.rotary import RotaryEmbedding, apply_rotary, inverse_frequencies

HEAD_DIM, BASE, ORIGINAL = 16, 10_000.0, 128


def _positions() -> Tensor:
    """Return positions [2, 9]: rows that restart at different places, and one far position."""
    return torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [5, 6, 7, 8, 9, 10, 11, 12, 1_000_000]])


def _rotate_half(x: Tensor, positions: Tensor, inverse: Tensor, scale: float) -> Tensor:
    """Return x cos + rotate_half(x) sin, with cos and sin repeated to the head size."""
    angles = positions[..., None].double() * inverse
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]  # [B, S, 1, d]
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * angles.cos() + rotated * angles.sin()) * scale


@pytest.mark.parametrize("type_", list(RopeScalingType))
def test_rotation_and_gradient_match_rotate_half(type_: RopeScalingType) -> None:
    """Catches interleaved pairs, a rotation in the wrong direction, a lost factor, a wrong
    backward.
    """
    scaling = RopeScaling(type=type_, factor=4.0, original_max_position_embeddings=ORIGINAL)
    rotary = RotaryEmbedding(HEAD_DIM, base=BASE, scaling=scaling)
    x = torch.randn(2, 9, 3, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    cos, sin = rotary(_positions(), dtype=torch.float64)
    inverse = inverse_frequencies(HEAD_DIM, BASE, scaling)
    expected = _rotate_half(x, _positions(), inverse, scaling.logit_scale)
    dy = torch.randn_like(x)
    (expected_grad,) = torch.autograd.grad(expected, x, dy)
    out = apply_rotary(x, cos, sin)
    (grad,) = torch.autograd.grad(out, x, dy)
    # The far position's angles are 1e6 radians, known to 1e-10.
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-9)
    assert not torch.equal(out, x)


def test_strided_and_bfloat16_inputs_are_rotated() -> None:
    """Catches kernels that assume a contiguous x, and bfloat16 that is computed in bfloat16."""
    cos, sin = RotaryEmbedding(HEAD_DIM)(_positions())
    assert cos.dtype == sin.dtype == torch.float32
    qkv = torch.randn(2, 9, 3, 4, HEAD_DIM)
    q = qkv[:, :, 1]
    torch.testing.assert_close(
        apply_rotary(q, cos, sin), apply_rotary(q.clone(), cos, sin), rtol=0, atol=0
    )
    narrow = q.bfloat16()
    out = apply_rotary(narrow, cos, sin)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rotary(narrow.float(), cos, sin).bfloat16())


def test_scores_depend_only_on_distance() -> None:
    """Catches positions that are scaled or offset between q and k."""
    q, k = (torch.randn(1, 1, 1, HEAD_DIM, dtype=torch.float64) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        rotary = RotaryEmbedding(HEAD_DIM)
        turned = [
            apply_rotary(x, *rotary(torch.tensor([[at]]), dtype=torch.float64))
            for x, at in ((q, at_q), (k, at_k))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-12)
    assert abs(score(7, 3) - score(7, 4)) > 1e-6


def test_far_positions_keep_their_precision() -> None:
    """Catches angles taken in float32, which lose 0.06 radians at a million tokens."""
    position = 1_000_003
    cos, _ = RotaryEmbedding(128)(torch.tensor([[position]]))
    expected = [math.cos(position * 10_000.0 ** (-2 * i / 128)) for i in range(64)]
    torch.testing.assert_close(cos[0, 0], torch.tensor(expected), rtol=0, atol=1e-6)


def test_scaling_changes_the_low_frequencies() -> None:
    """Catches a scaling that changes the wrong end of the spectrum, or swaps kept and divided
    ones.
    """
    plain = inverse_frequencies(HEAD_DIM, BASE, RopeScaling())
    factor = 8.0

    def scaled(type_: RopeScalingType, **fields: int) -> Tensor:
        scaling = RopeScaling(
            type=type_, factor=factor, original_max_position_embeddings=ORIGINAL, **fields
        )
        return inverse_frequencies(HEAD_DIM, BASE, scaling)

    assert torch.equal(scaled(RopeScalingType.LINEAR), plain / factor)
    for type_ in (RopeScalingType.YARN, RopeScalingType.LLAMA3):
        ratio = plain / scaled(type_)
        assert ratio[0] == 1
        assert ratio[-1] == pytest.approx(factor)
        assert (ratio.diff() >= 0).all()
        assert ((ratio > 1) & (ratio < factor)).any()
    # Within the original context the dynamic rule changes nothing; beyond it the base grows.
    assert torch.equal(scaled(RopeScalingType.NTK, target_length=ORIGINAL), plain)
    longer = plain / scaled(RopeScalingType.NTK, target_length=4 * ORIGINAL)
    assert longer[0] == 1
    assert longer[-1] == pytest.approx(factor * 4 - (factor - 1))


def test_yarn_scales_attention_by_its_factor() -> None:
    """Catches a factor that is squared or missing, and ignored mscale fields."""
    yarn = {"type": RopeScalingType.YARN, "factor": 16.0, "original_max_position_embeddings": 64}
    expected = 0.1 * math.log(16.0) + 1
    assert RopeScaling(**yarn).logit_scale == pytest.approx(expected)  # type: ignore[arg-type]
    equal = RopeScaling(**yarn, mscale=0.7, mscale_all_dim=0.7)  # type: ignore[arg-type]
    assert equal.logit_scale == 1
    assert RopeScaling(**yarn, attention_factor=1.5).logit_scale == 1.5  # type: ignore[arg-type]
    assert RopeScaling(**{**yarn, "factor": 1.0}).logit_scale == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "linear", "factor": 0.5}, "factor=0.5 must be at least 1"),
        ({"type": "yarn", "factor": 2.0}, "needs original_max_position_embeddings"),
        ({"type": "llama3", "factor": 2.0}, "needs original_max_position_embeddings"),
        ({"type": "ntk", "factor": 2.0}, "needs original_max_position_embeddings"),
        ({"beta_fast": 1.0, "beta_slow": 32.0}, "beta_fast > beta_slow"),
        ({"low_freq_factor": 4.0}, "high_freq_factor > low_freq_factor"),
        ({"type": "spiral"}, "spiral"),
    ],
)
def test_impossible_scalings_are_refused(fields: dict[str, object], message: str) -> None:
    """Catches a rope_scaling that would silently be ignored."""
    with pytest.raises(ValueError, match=message):
        RopeScaling(**fields)  # type: ignore[arg-type]


def test_wrong_head_sizes_are_refused() -> None:
    """Catches cos and sin of another head size, which broadcasting could accept."""
    with pytest.raises(ValueError, match="even head size"):
        RotaryEmbedding(7)
    cos, sin = RotaryEmbedding(8)(_positions())
    with pytest.raises(ValueError, match="head size of 8, but x has head size 16"):
        apply_rotary(torch.randn(2, 9, 1, 16), cos, sin)
