"""config.json to keys and back, and which rows of which tensors a parameter is."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from isp.config import ConfigError, load_config, to_yaml
from isp.config.models import language_model
from isp.layers.rope_scaling import RopeScalingType
from isp.models.build import parameter_shapes
from model.huggingface import config_json, model_values, trained_positions
from model.presets import PRESETS
from model.weight_names import WeightTable
from tests.model.decoders import CONFIG, SCALINGS, config_of, filled

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


@pytest.mark.parametrize(("preset", "found"), PUBLISHED.items())
def test_published_configurations_are_the_presets(preset, found) -> None:
    """A key read by another name, or a default of ours in the place of theirs."""
    theirs, ours = config_of(model_values(found)), config_of(PRESETS[preset])
    if preset.startswith("internlm2"):  # no other rotation up to the context
        assert theirs.rope_scaling.base_factor(128) == 1.0
        theirs = replace(theirs, rope_scaling=None)
    assert theirs == replace(ours, num_kv_heads=ours.kv_heads, head_dim=ours.head_size)


@pytest.mark.parametrize(
    ("found", "changes", "key", "value"),
    [
        (LLAMA_3_1_8B, {"num_key_value_heads": None}, "num_kv_heads", 32),
        (LLAMA_3_1_8B, {"sliding_window": 5}, "sliding_window", None),
        (LLAMA_3_1_8B, {"head_dim": 64}, "head_dim", 64),
        (MISTRAL, {}, "sliding_window", 4096),
        (QWEN_2_5_7B, {"model_type": "qwen3"}, "head_dim", 128),
        (QWEN_2_5_7B, {"use_sliding_window": True}, "sliding_window", None),
        (
            QWEN_2_5_7B,
            {"use_sliding_window": True, "max_window_layers": 0},
            "sliding_window",
            131072,
        ),
        (MISTRAL, {"rope_parameters": {"rope_theta": 7.0}}, "rope_theta", 7.0),
        (MIXTRAL_8X7B, {"rope_theta": None}, "rope_theta", 1e6),
        (MIXTRAL_8X7B, {"sliding_window": 5}, "sliding_window", 5),
        (MIXTRAL_8X7B, {"output_router_logits": True}, "router_aux_loss_coef", 0.02),
        (QWEN_3_30B_A3B, {"norm_topk_prob": None}, "norm_topk_prob", False),
        (QWEN_3_30B_A3B, {"mlp_only_layers": [1, 0]}, "num_dense_layers", 2),
        (QWEN_3_30B_A3B, {"use_sliding_window": True, "sliding_window": 5}, "sliding_window", 5),
    ],
)
def test_what_a_family_leaves_out(found, changes, key, value) -> None:
    """A default of one family taken for another's."""
    assert model_values({**found, **changes})[key] == value


@pytest.mark.parametrize(
    ("found", "changes", "words"),
    [
        (LLAMA_3_1_8B, {"model_type": "gemma"}, "model_type=gemma"),
        (LLAMA_3_1_8B, {"hidden_act": "gelu"}, "hidden_act=gelu"),
        (LLAMA_3_1_8B, {"mlp_bias": True}, "mlp_bias=true"),
        (INTERNLM2_7B, {"bias": True}, "bias=true"),
        (LLAMA_3_1_8B, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        (LLAMA_3_1_8B, {"quantization_config": {"bits": 4}}, "quantization_config="),
        (LLAMA_3_1_8B, {"rope_scaling": {"type": "longrope"}}, "rotary positions"),
        (
            LLAMA_3_1_8B,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rotary positions",
        ),
        (
            QWEN_2_5_7B,
            {"use_sliding_window": True, "max_window_layers": 20},
            "a window in 8 of 28 layers",
        ),
        (
            LLAMA_3_1_8B,
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            "for kinds of layers",
        ),
        (LLAMA_3_1_8B, {"vocab_size": None}, "vocab_size=null"),
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        (QWEN_3_30B_A3B, {"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        (QWEN_3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (
            QWEN_3_30B_A3B,
            {
                "model_type": "qwen2_moe",
                "shared_expert_intermediate_size": 8,
                "use_sliding_window": True,
            },
            "every second layer",
        ),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(found, changes, words) -> None:
    """An option that is read over: the run would train another model than the folder's."""
    with pytest.raises(ValueError, match=re.escape(words)):
        model_values({**found, **changes})


def test_a_folder_fills_sizes_and_others_are_refused(tmp_path) -> None:
    """A size of the file that silently wins over the folder's, or is lost on the way to a rank."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model:\n  init_from: {tmp_path}\n  rope_theta: 4.0e+6\n  num_kv_heads: null\n"
        "data: {source: x}\n"
    )
    config = load_config(path)
    assert (config.model.num_layers, config.model.kv_heads) == (32, 8)
    assert config.model.rope_theta == 4e6
    further = load_config(path, ["--model.rope_scaling.factor=16.0"]).model.rope_scaling
    assert (further.type, further.factor, further.low_freq_factor) == ("llama3", 16.0, 1.0)
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    faults = ["--model.num_layers=3", "--model.tie_embeddings"]
    with pytest.raises(ConfigError) as refused:
        load_config(path, faults)
    assert "--model.num_layers: model.num_layers=3: the model in" in str(refused.value)
    assert "model.tie_embeddings=true: the model in" in str(refused.value)
    with pytest.raises(ConfigError, match=r"model\.preset=tiny cannot be combined with"):
        load_config(path, ["--model.preset=tiny"])
    with pytest.raises(ConfigError, match="both set the initial weights"):
        load_config(path, ["--checkpoint.initial_load_path=there"])


EXPERTS = replace(CONFIG, num_experts=3, moe_intermediate_size=24)
SHARED = replace(EXPERTS, shared_expert_intermediate_size=12, num_dense_layers=1, sliding_window=5)
MADE = [
    CONFIG,
    replace(EXPERTS, intermediate_size=24, head_dim=6, sliding_window=5),
    replace(SHARED, norm_topk_prob=False),
    replace(SHARED, qkv_bias=True),
    replace(EXPERTS, qk_norm=True, norm_topk_prob=False, num_dense_layers=1, sliding_window=5),
    replace(CONFIG, tie_embeddings=True, sliding_window=5),
    replace(CONFIG, qkv_bias=True, sliding_window=5),
    replace(CONFIG, qk_norm=True, head_dim=6, num_heads=5, num_kv_heads=1),
    replace(CONFIG, head_dim=6, num_heads=5, num_kv_heads=5),
    *(replace(CONFIG, rope_scaling=scaling) for scaling in SCALINGS),
]


@pytest.mark.parametrize("model", MADE)
def test_a_decoder_of_our_own_is_the_same_in_transformers(model, tmp_path) -> None:
    """A configuration that means another model there: of a run that began from no folder."""
    pytest.importorskip("transformers", minversion="5")
    from tests.model.folders import loaded

    ours = filled(model)
    described = config_json(model, dtype="float64", context=24)
    (tmp_path / "config.json").write_text(json.dumps(described))
    shapes = parameter_shapes(language_model(model, "float64"))
    table = WeightTable(model, described["model_type"], shapes)
    weights = {
        name: parameter.detach().flatten(0, max(0, parameter.dim() - 2))
        for name, parameter in ours.named_parameters()
    }
    tensors = {
        theirs: torch.cat([weights[own][a:b] for own, a, b in table.parts_of(theirs)])
        for theirs in table.shapes
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.arange(24)[None] % 50
    logits = ours(tokens, torch.arange(24)[None])
    assert (loaded(tmp_path)(tokens) - logits).abs().max() < 1e-9 * logits.abs().max()
    assert described["torch_dtype"] == "float64"


@pytest.mark.parametrize("model", MADE)
def test_what_is_written_is_read_again(model) -> None:
    """A key that one direction forgets."""
    again = config_of(model_values(config_json(model, dtype="float32", context=24)))
    scaling = model.rope_scaling
    if scaling is not None and scaling.type is RopeScalingType.NTK:
        base = model.rope_theta * scaling.base_factor(model.head_size)
        model = replace(model, rope_theta=base, rope_scaling=None)
    same = replace(again, init_std=model.init_std)
    assert same == replace(model, num_kv_heads=model.kv_heads, head_dim=model.head_size)


def test_what_holds_still_is_kept_and_what_changed_is_not() -> None:
    """A folder written with the context, or the tokens, of the one that it began from."""
    model = config_of(model_values(LLAMA_3_1_8B))
    like = {**LLAMA_3_1_8B, "eos_token_id": [1, 2], "dtype": "bfloat16"}
    same = config_json(model, dtype="float32", context=10**6, like=like)
    del like["dtype"]
    assert same == {**like, "torch_dtype": "float32"}
    longer = replace(model, rope_theta=4e6, rope_scaling=None, sliding_window=7)
    other = config_json(longer, dtype="float32", context=10**6, like=like)
    plain = {key: like[key] for key in like if key != "rope_scaling"}
    reached = config_json(
        config_of(model_values(plain)), dtype="float32", context=10**6, like=plain
    )
    assert reached == {**plain, "torch_dtype": "float32", "max_position_embeddings": 10**6}
    assert other["eos_token_id"] == [1, 2]
    assert other["max_position_embeddings"] == 10**6
    assert config_of(model_values(other)) == longer
    with pytest.raises(ValueError, match="vocab_size=5, the run had 128256"):
        config_json(model, dtype="float32", context=8, like={**like, "vocab_size": 5})
    with pytest.raises(ValueError, match="both"):
        config_json(replace(CONFIG, qk_norm=True, qkv_bias=True), dtype="float32", context=8)
    for change in ({"qkv_bias": True}, {"norm_topk_prob": False}, {"num_dense_layers": 1}):
        with pytest.raises(ValueError, match="with this combination"):
            config_json(replace(EXPERTS, **change), dtype="float32", context=8)


@pytest.mark.parametrize(
    ("rope", "trained"),
    [
        ({}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": None}}, 256),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8.0}}}, 512),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0, 2.0]}}, 64),
    ],
)
def test_the_rows_that_a_folder_is_for(rope: dict[str, Any], trained: int) -> None:
    """Catches a warning for nothing, of scalings by kinds of layers or without a context."""
    assert trained_positions({"max_position_embeddings": 64, **rope}) == trained


def test_a_missing_package_is_told(tmp_path, monkeypatch) -> None:
    """An ImportError of some rank in its place."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    path = tmp_path / "job.yaml"
    path.write_text(f"model: {{init_from: {tmp_path}}}\ndata: {{source: x}}\n")
    config = load_config(path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the safetensors package: bash tools/setup_env"):
        config.require_packages()
