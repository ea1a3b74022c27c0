"""Small decoders in float64, and keys of all kinds of rotary scaling."""

from __future__ import annotations

from typing import Any

import torch

from isp.layers.rope_scaling import RopeScaling, RopeScalingType
from model.config import ModelConfig
from model.decoder import Decoder

__all__ = ["CONFIG", "SCALINGS", "SMALL", "S", "config_of", "filled"]

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


def filled(config: ModelConfig) -> Decoder:
    """With weights of which none is 0 or 1: biases and norms count too."""
    torch.manual_seed(3)
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def config_of(values: dict[str, Any]) -> ModelConfig:
    """The keys that a config.json stands for."""
    scaling = values.get("rope_scaling")
    return ModelConfig(
        **{**values, "rope_scaling": None if scaling is None else RopeScaling(**scaling)}
    )
