"""`config_json`: make the config.json with which transformers reads an exported decoder.

Loads no torch.

Source: `configuration_*.py` of llama, mistral, mixtral, qwen2, qwen2_moe, qwen3 and qwen3_moe and
`modeling_rope_utils.py` in transformers.
"""

from __future__ import annotations

from typing import Any

from isp.core.layers.rope_scaling import RopeScaling, RopeScalingType
from model.config import ModelConfig

__all__ = ["CONFIG_FILE", "MIXTRAL", "config_json"]

CONFIG_FILE = "config.json"
# These are model types of transformers.
_LLAMA, _MISTRAL, _QWEN2, _QWEN3 = "llama", "mistral", "qwen2", "qwen3"
MIXTRAL, _QWEN2_MOE, _QWEN3_MOE = "mixtral", "qwen2_moe", "qwen3_moe"
_ARCHITECTURES = {
    _LLAMA: "LlamaForCausalLM",
    _MISTRAL: "MistralForCausalLM",
    _QWEN2: "Qwen2ForCausalLM",
    _QWEN3: "Qwen3ForCausalLM",
    MIXTRAL: "MixtralForCausalLM",
    _QWEN2_MOE: "Qwen2MoeForCausalLM",
    _QWEN3_MOE: "Qwen3MoeForCausalLM",
}
_SCALING_KEYS = {
    RopeScalingType.LINEAR: (),
    RopeScalingType.YARN: (
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
    ),
    RopeScalingType.LLAMA3: ("low_freq_factor", "high_freq_factor"),
}
"""By type of rotary scaling, its fields other than `factor` and the original context. They have the
same names in transformers."""


def config_json(model: ModelConfig, *, dtype: str, context: int) -> dict[str, Any]:
    """Return the config.json of a model that was trained on rows of `context` tokens.

    Raises ValueError for a decoder that corresponds to no model of transformers.
    """
    family = _family(model)
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        # Without these keys, transformers would use defaults of the model type.
        "bos_token_id": None,
        "eos_token_id": None,
        **_experts_json(model, family),
        **_window_json(model, family),
        **_rope_json(model),
        "max_position_embeddings": max(context, _reach(model.rope_scaling)),
        "torch_dtype": dtype,
    }


def _family(model: ModelConfig) -> str:
    """Return the model type of transformers that computes the same as `model`.

    Raises ValueError if there is none.
    """
    if model.qkv_bias and model.qk_norm:
        raise ValueError(
            "export supports no model of transformers with both model.qkv_bias and model.qk_norm:"
            " train with one of them"
        )
    if model.num_experts:
        return _family_of_experts(model)
    if model.qk_norm:
        return _QWEN3
    if model.qkv_bias:
        return _QWEN2
    plain = model.sliding_window is None and model.hidden_size % model.num_heads == 0
    return _LLAMA if plain else _MISTRAL


def _family_of_experts(model: ModelConfig) -> str:
    """Return the model type of transformers with the same experts; raise ValueError if none has."""
    shared = model.shared_expert_intermediate_size > 0
    if shared is not model.qk_norm:
        return _QWEN2_MOE if shared else _QWEN3_MOE
    if shared or model.qkv_bias or model.num_dense_layers or not model.norm_topk_prob:
        raise ValueError(
            "export supports no model of transformers with this combination: Qwen2-MoE has"
            " model.shared_expert_intermediate_size but no model.qk_norm, Qwen3-MoE the reverse,"
            " and Mixtral neither, nor model.qkv_bias or model.num_dense_layers, and"
            " model.norm_topk_prob=true"
        )
    return MIXTRAL


def _experts_json(model: ModelConfig, family: str) -> dict[str, Any]:
    """Return the keys of config.json for experts; empty for a model without experts."""
    if not model.num_experts:
        return {}
    found: dict[str, Any] = {"num_experts_per_tok": model.experts_per_token}
    if family == MIXTRAL:
        return found | {
            "num_local_experts": model.num_experts,
            "intermediate_size": model.expert_size,
        }
    if family == _QWEN2_MOE:
        found["shared_expert_intermediate_size"] = model.shared_expert_intermediate_size
        found["qkv_bias"] = model.qkv_bias
    return found | {
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": model.norm_topk_prob,
        "mlp_only_layers": [*range(model.num_dense_layers)],
        "decoder_sparse_step": 1,
    }


def _window_json(model: ModelConfig, family: str) -> dict[str, Any]:
    """Return the keys of config.json for the sliding window, as the model type expects them."""
    window = model.sliding_window
    if family == _LLAMA:
        return {}
    if family in (_MISTRAL, MIXTRAL):
        return {"sliding_window": window}
    if family in (_QWEN2_MOE, _QWEN3_MOE) and window is not None:
        # Without layer_types, only every second layer of Qwen2-MoE would have a window.
        kinds = ["sliding_attention"] * model.num_layers
        return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    used = window is not None
    # In transformers, layers with the index `max_window_layers` or more have the window.
    layers = 0 if used else model.num_layers
    return {"use_sliding_window": used, "sliding_window": window, "max_window_layers": layers}


def _rope_json(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json for rotary positions.

    The keys are those of transformers 4, which version 5 also reads.
    """
    scaling, theta = model.rope_scaling, model.rope_theta
    if scaling is None or scaling.type is RopeScalingType.NONE:
        return {"rope_theta": theta, "rope_scaling": None}
    if scaling.type is RopeScalingType.NTK:
        # isp's NTK scaling is the same as another base. It is not transformers' `dynamic`, which
        # depends on the row's length.
        return {"rope_theta": theta * scaling.base_factor(model.head_size), "rope_scaling": None}
    values: dict[str, Any] = {"rope_type": str(scaling.type), "factor": scaling.factor}
    if scaling.type is not RopeScalingType.LINEAR:
        original = scaling.original_max_position_embeddings
        values["original_max_position_embeddings"] = original
    given = {key: vars(scaling)[key] for key in _SCALING_KEYS[scaling.type]}
    values |= {key: value for key, value in given.items() if value is not None}
    return {"rope_theta": theta, "rope_scaling": values}


def _reach(scaling: RopeScaling | None) -> int:
    """Return the context in tokens to which a scaling extends positions; 0 without scaling."""
    if scaling is None:
        return 0
    return int(scaling.factor * scaling.original_max_position_embeddings)
