"""`PRESETS`: values of the `model` section for known models.

Sources: the models' published configurations.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS", "with_preset"]

_LLAMA_3_1_ROPE = {
    "type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

_LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "intermediate_size": 14336,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
}

_QWEN_3 = {
    "vocab_size": 151936,
    "num_kv_heads": 8,
    "head_dim": 128,
    "norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "qk_norm": True,
}

# `PRESETS` has by name of a preset the keys of the `model` section that it sets.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 272,
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 352,
    },
    "small": {
        "vocab_size": 272,
        "hidden_size": 512,
        "num_layers": 8,
        "num_heads": 8,
        "num_kv_heads": 4,
        "intermediate_size": 1408,
    },
    "llama2-7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "intermediate_size": 11008,
    },
    "llama3-8b": _LLAMA_3_8B,
    "llama3.1-8b": {**_LLAMA_3_8B, "rope_scaling": _LLAMA_3_1_ROPE},
    "internlm2-1.8b": {
        "vocab_size": 92544,
        "hidden_size": 2048,
        "num_layers": 24,
        "num_heads": 16,
        "num_kv_heads": 8,
        "intermediate_size": 8192,
        "rope_theta": 1000000.0,
    },
    "internlm2-7b": {
        "vocab_size": 92544,
        "hidden_size": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "intermediate_size": 14336,
        "rope_theta": 1000000.0,
    },
    "qwen2.5-7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_layers": 28,
        "num_heads": 28,
        "num_kv_heads": 4,
        "intermediate_size": 18944,
        "norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "qkv_bias": True,
    },
    "qwen3-0.6b": {
        **_QWEN_3,
        "hidden_size": 1024,
        "num_layers": 28,
        "num_heads": 16,
        "intermediate_size": 3072,
        "tie_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN_3,
        "hidden_size": 4096,
        "num_layers": 36,
        "num_heads": 32,
        "intermediate_size": 12288,
    },
    "qwen3-30b-a3b": {
        **_QWEN_3,
        "hidden_size": 2048,
        "num_layers": 48,
        "num_heads": 32,
        "num_kv_heads": 4,
        "intermediate_size": 6144,
        "num_experts": 128,
        "experts_per_token": 8,
        "moe_intermediate_size": 768,
    },
    "mixtral-8x7b": {
        **_LLAMA_3_8B,
        "vocab_size": 32000,
        "rope_theta": 1000000.0,
        "num_experts": 8,
        "experts_per_token": 2,
        "moe_intermediate_size": 14336,
    },
}


def with_preset(section: dict[str, Any]) -> dict[str, Any]:
    """Return a `model` section, completed by the values of its preset for keys it does not have.

    Raises ValueError for an unknown preset.
    """
    name = section.get("preset")
    if name is None:
        return section
    if name not in PRESETS:
        raise ValueError(f"model.preset={name} is unknown: use one of {', '.join(PRESETS)}")
    found = {**PRESETS[name], **section}
    scaling, of_preset = section.get("rope_scaling"), PRESETS[name].get("rope_scaling")
    # A scaling without a type changes keys of the preset's scaling; with a type it replaces it.
    if isinstance(scaling, dict) and of_preset and "type" not in scaling:
        found["rope_scaling"] = {**of_preset, **scaling}
    return found
