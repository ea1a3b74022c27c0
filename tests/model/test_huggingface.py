"""A decoder in the format of transformers: its config.json, and the parameter rows of each
tensor.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from isp.core.layers.rope_scaling import RopeScaling
from isp.models.build import parameter_shapes
from model.build import language_model
from model.config import ModelConfig
from model.huggingface import config_json
from model.presets import PRESETS
from model.weight_names import exported_rows
from tests.model.decoders import CONFIG, MADE, SCALINGS, filled

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN_2_5_7B: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MISTRAL: dict[str, Any] = {
    **LLAMA_3_1_8B,
    "model_type": "mistral",
    "rope_scaling": None,
    "sliding_window": 4096,
}
INTERNLM2_7B: dict[str, Any] = {
    **{key: value for key, value in LLAMA_3_1_8B.items() if key != "attention_bias"},
    "bias": False,
    "max_position_embeddings": 32768,
    "model_type": "internlm2",
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "rope_theta": 1000000,
    "vocab_size": 92544,
}
QWEN_3_30B_A3B: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B: dict[str, Any] = {
    **MISTRAL,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}
PUBLISHED = {
    "llama3.1-8b": LLAMA_3_1_8B,
    "qwen2.5-7b": QWEN_2_5_7B,
    "internlm2-7b": INTERNLM2_7B,
    "qwen3-30b-a3b": QWEN_3_30B_A3B,
    "mixtral-8x7b": MIXTRAL_8X7B,
}


@pytest.mark.parametrize(("preset", "published"), PUBLISHED.items())
def test_presets_are_written_as_they_were_published(preset, published) -> None:
    """Catches a preset value, or a name in config.json, that differs from the published one."""
    written = config_json(config_of(PRESETS[preset]), dtype="bfloat16", context=1)
    known = {key: value for key, value in published.items() if key in written}
    known["max_position_embeddings"] = written["max_position_embeddings"]
    known.pop("architectures", None)
    if not known.get("use_sliding_window"):
        known.pop("sliding_window", None)
    # exported as a Llama, without dynamic scaling, which has no effect up to the context
    if preset.startswith("internlm2"):
        known |= {"model_type": "llama", "rope_scaling": None}
    assert len(known) > 10
    assert {key: written[key] for key in known} == known


def config_of(preset: dict[str, Any]) -> ModelConfig:
    scaling = preset.get("rope_scaling")
    return ModelConfig(**{**preset, "rope_scaling": scaling and RopeScaling(**scaling)})


@pytest.mark.parametrize("name", MADE)
def test_an_exported_decoder_computes_the_same_in_transformers(name, tmp_path) -> None:
    """Catches a configuration that describes another model, and rows of another matrix."""
    pytest.importorskip("transformers", minversion="5")
    from tests.model.folders import loaded

    model = MADE[name]
    ours = filled(model)
    described = config_json(model, dtype="float64", context=24)
    (tmp_path / "config.json").write_text(json.dumps(described))
    shapes = parameter_shapes(language_model(model, "float64"))
    weights = {
        name: parameter.detach().flatten(0, max(0, parameter.dim() - 2))
        for name, parameter in ours.named_parameters()
    }
    tensors = {
        theirs: weights[own][start:stop].clone()
        for theirs, (own, start, stop) in exported_rows(
            model, described["model_type"], shapes
        ).items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.arange(24)[None] % 50
    logits = ours(tokens, torch.arange(24)[None])
    assert (loaded(tmp_path)(tokens) - logits).abs().max() < 1e-9 * logits.abs().max()
    assert described["torch_dtype"] == "float64"


def test_a_decoder_without_a_class_in_transformers_is_refused() -> None:
    """Catches an export that describes another model."""
    with pytest.raises(ValueError, match="both"):
        config_json(replace(CONFIG, qk_norm=True, qkv_bias=True), dtype="float32", context=8)
    experts = replace(CONFIG, num_experts=3, moe_intermediate_size=24)
    for change in ({"qkv_bias": True}, {"norm_topk_prob": False}, {"num_dense_layers": 1}):
        with pytest.raises(ValueError, match="with this combination"):
            config_json(replace(experts, **change), dtype="float32", context=8)


def test_the_exported_context_is_the_longest_trained() -> None:
    """Catches a context of the row length where positions were scaled for longer rows."""
    scaled = replace(CONFIG, rope_scaling=SCALINGS[-1])
    assert config_json(CONFIG, dtype="float32", context=24)["max_position_embeddings"] == 24
    assert config_json(scaled, dtype="float32", context=24)["max_position_embeddings"] == 192
