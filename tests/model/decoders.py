"""Small decoders in float64, and keys of every kind of rotary scaling."""

from __future__ import annotations

from dataclasses import replace

import torch

from isp.core.layers.rope_scaling import RopeScaling, RopeScalingType
from model.config import ModelConfig
from model.decoder import Decoder

__all__ = ["CONFIG", "MADE", "SCALINGS", "SMALL", "S", "filled"]

S = 24
CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=40,
    rope_theta=100.0,
    init_std=0.3,
)

SMALL = ModelConfig(
    vocab_size=30, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=24
)

SCALINGS = [
    RopeScaling(type=RopeScalingType.LINEAR, factor=3.0),
    RopeScaling(
        type=RopeScalingType.NTK, factor=2.0, original_max_position_embeddings=8, target_length=S
    ),
    RopeScaling(
        type=RopeScalingType.YARN, factor=3.0, original_max_position_embeddings=64, beta_slow=0.5
    ),
    RopeScaling(type=RopeScalingType.LLAMA3, factor=3.0, original_max_position_embeddings=64),
]


_EXPERTS = replace(CONFIG, num_experts=3, moe_intermediate_size=24)
_SHARED = replace(
    _EXPERTS, shared_expert_intermediate_size=12, num_dense_layers=1, sliding_window=5
)
MADE = {
    "llama": CONFIG,
    "llama, tied": replace(CONFIG, tie_embeddings=True),
    "mixtral": replace(_EXPERTS, intermediate_size=24, head_dim=6, sliding_window=5),
    "qwen2_moe": replace(_SHARED, norm_topk_prob=False),
    "qwen2_moe, qkv bias": replace(_SHARED, qkv_bias=True),
    "qwen3_moe": replace(
        _EXPERTS, qk_norm=True, norm_topk_prob=False, num_dense_layers=1, sliding_window=5
    ),
    "mistral": replace(CONFIG, tie_embeddings=True, sliding_window=5),
    "mistral, odd heads": replace(CONFIG, head_dim=6, num_heads=5, num_kv_heads=5),
    "qwen2": replace(CONFIG, qkv_bias=True, sliding_window=5),
    "qwen3": replace(CONFIG, qk_norm=True, head_dim=6, num_heads=5, num_kv_heads=1),
    **{str(scaling.type): replace(CONFIG, rope_scaling=scaling) for scaling in SCALINGS},
}
"""Decoders of each family of transformers that an export writes, with each option."""


def filled(config: ModelConfig) -> Decoder:
    """Return a decoder with no weight of exactly 0 or 1, so that biases and norms have an
    effect.
    """
    torch.manual_seed(3)
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model
