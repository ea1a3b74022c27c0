"""The architectures of transformers that `check_architectures.py` tries, as configurations.

Where the default configuration of a type cannot be built, or lacks a mechanism that published
models have, the keys here complete it.
"""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["ARCHITECTURES", "MECHANISMS", "config_of"]

_EXPERTS = {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}

_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(48)],
    "long_factor": [2.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
}

_PART = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
"""Sizes of a vision or audio tower, which is not part of the trained model."""

_DECODER = {"is_decoder": True}

_ENCODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert
rembert roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl"""

_GIVEN: dict[str, dict[str, Any]] = {
    # transformers cannot build the default configurations of these types: they need these keys.
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 500000, "clip_qkv": 8}},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 6},
    "dots1": {"first_k_dense_replace": 1, **_EXPERTS},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "granitemoehybrid": {"layer_types": [*["linear_attention"] * 7, "full_attention"] * 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "phi4_multimodal": {"vision_config": _PART, "audio_config": {**_PART, "num_blocks": 1}},
    "moss_transcribe_diarize": {"audio_config": {"d_model": 32, "encoder_layers": 1}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {**_DECODER, "axial_pos_embds": False},
    "xlstm": {"embedding_dim": 32, "hidden_size": 32, "num_heads": 4},
    # These types are encoders by default. With `is_decoder` they have causal attention, as their
    # causal language model needs.
    **dict.fromkeys(_ENCODERS.split(), _DECODER),
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "roc_bert": {
        **_DECODER,
        "shape_vocab_size": 40,
        "shape_embed_dim": 8,
        "pronunciation_vocab_size": 40,
        "pronunciation_embed_dim": 8,
    },
    # Variants as published: the defaults lack the mechanism that is named in parentheses.
    "phi3 (longrope)": {"rope_parameters": _LONGROPE, "max_position_embeddings": 131072},
    "falcon (alibi)": {"alibi": True, "multi_query": False},
    "falcon (40B)": {"new_decoder_architecture": True, "num_kv_heads": 8},
    "lfm2 (conv)": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "minimax_m3_vl_text (sparse)": {
        "layer_types": [*["full_attention"] * 3, *["minimax_m3_sparse"] * 57]
    },
    "qwen2 (window)": {"use_sliding_window": True, "max_window_layers": 16},
    "deepseek_v2 (groups)": {
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 6,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
    },
}


def _rotary_sections(*sections: int, **more: Any) -> dict[str, Any]:
    """Return the keys of a vision-language model's rotary positions, with published sections.

    A section is the number of angles that follow one axis, such as time, height or width.
    """
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [*sections], **more}
    return {"text_config": {"rope_parameters": rope}}


_VISION_MODELS = """apertus1p5 aria cohere2_vision cosmos3_edge cosmos3_omni deepseek_vl
deepseek_vl_hybrid exaone4_5 granite_docling hy_v4_vl hyperclovax_vision_v2 idefics2 idefics3
inkling2 internvl janus kimi_k25 kosmos-2.5 lfm3_vl lighton_ocr llava llava_next llava_next_video
llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 muse_glimmer muse_spark
nemotron_h_omni ovis2 pp_chart2table qianfan_ocr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
smolvlm unlimited_ocr video_llama_3 video_llava vipllava"""

_INDEXER_TYPES = ["full", *["full", "shared", "shared", "shared"] * 18][:72]
"""Types of Mistral Large 4's layers: `full` has its own indexer, `shared` uses the keys that an
earlier layer's indexer chose."""

_TEXT_PARTS: dict[str, dict[str, Any]] = {
    **{f"{name} (text part)": {} for name in _VISION_MODELS.split()},
    "aya_vision (text part)": {
        "vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}
    },
    "cohere_compass (text part)": {"text_config": _GIVEN["cohere_compass_text"]},
    "deepseek_ocr2 (text part)": {
        "text_config": {
            "mlp_layer_types": ["dense", *["sparse"] * 31],
            "num_experts_per_tok": 6,
            "num_key_value_heads": 32,
        }
    },
    "ernie4_5_vl_moe (text part)": _rotary_sections(22, 22, 20),
    "glm46v (text part)": _rotary_sections(8, 12, 12, partial_rotary_factor=0.5),
    "glm4v (text part)": _rotary_sections(8, 12, 12, partial_rotary_factor=0.5),
    "glm4v_moe (text part)": _rotary_sections(8, 12, 12, partial_rotary_factor=0.5),
    "glm_ocr (text part)": _rotary_sections(16, 24, 24),
    "glmga (text part)": _rotary_sections(8, 12, 12, partial_rotary_factor=0.5),
    "granite4_vision (text part)": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "4/8"},
    "hunyuan_vl (text part)": {
        "text_config": {"head_dim": 128, **_rotary_sections(16, 16, 16, 16)["text_config"]}
    },
    "lfm2_vl (text part)": {"text_config": _GIVEN["lfm2 (conv)"]},
    "mistral3 (text part of Mistral Small 4)": {"text_config": {"model_type": "mistral4"}},
    "mistral_large4 (text part)": {},
    "mistral_large4 (text part, shared)": {
        "text_config": {
            "indexer_types": _INDEXER_TYPES,
            # In each group of 8 layers, every fourth layer has no rotary positions and reads the
            # keys of the group's fourth layer. All others read the keys of the group's first layer.
            "kv_source_layers": [i - i % 8 + (3 if i % 4 == 3 else 0) for i in range(72)],
        }
    },
    "paddleocr_vl (text part)": _rotary_sections(16, 24, 24),
    "qwen2_5_omni_thinker (text part)": _rotary_sections(16, 24, 24),
    "qwen2_5_vl (text part)": _rotary_sections(16, 24, 24),
    "qwen2_vl (text part)": _rotary_sections(16, 24, 24),
    "step3p7 (text part)": {
        "text_config": {
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 11 + ["full_attention"],
            "sliding_window": 512,
            "attention_other_setting": {"num_attention_heads": 96},
        }
    },
}
"""Keys of vision and audio models whose text part has no causal class of its own, by name."""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    name: keys
    for name, keys in {
        **{name: {} for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES},
        **_GIVEN,
        **_TEXT_PARTS,
    }.items()
    # Leave out the types that the installed release of transformers lacks.
    if name.split()[0] in CONFIG_MAPPING_NAMES
}
"""The causal types of the installed transformers, each with the keys that complete its defaults.

A name is the `model_type`, or the `model_type` and a variant in parentheses."""


MECHANISMS = {
    "roc_bert": "an encoder's code as a decoder",
    "gpt_neox": "one fused linear for queries, keys and values",
    "gemma4_text": "different sizes in each layer",
    "bloom": "ALiBi",
    "opt": "a table of positions with unused first rows",
    "phi3 (longrope)": "rotary positions that depend on the length of the row",
    "inkling2_text": "a bias by distance, attention sinks of queries, short convolutions",
    "diffllama": "two values for each key",
    "llama4_text": "chunked attention",
    "lfm2 (conv)": "convolutions",
    "qwen3_next": "the gated delta rule",
    "ernie4_5_moe": "a router with a bias",
    "longcat_flash": "two attentions in a block, experts without computation",
    "deepseek_v2 (groups)": "routing limited to groups of experts",
    "kimi_linear": "the gated delta rule with a decay per channel, and latent attention",
    "nemotron_h": "Mamba2, blocks without a token mixer",
    "zamba2": "Mamba2, a transformer block that several blocks share",
    "falcon_h1": "Mamba2 and attention in one block",
    "jamba": "Mamba",
    "zamba": "Mamba with weights per head, in addition to linears",
    "minimax": "a module's forward that ISP replaces",
    "bart": "a table of positions that computes the positions itself",
    "gpt_neo": "a module's method that ISP replaces, sliding windows",
    "cohere2": "attention in parallel to the MLP, layers without positions",
    "gemma2": "sliding windows, soft-capped scores",
    "hy_v4": "keys chosen by an indexer, also for the next layer, and sinks",
    "mistral_large4 (text part, shared)": "latents and chosen keys of an earlier layer, an indexer"
    " that reads positions",
    "minimax_m3_vl_text (sparse)": "blocks of keys chosen for each KV head",
    "gpt_oss": "windows, sinks and experts with biases",
    "deepseek_v3": "latent attention and experts",
    "llama": "grouped KV heads, a gated MLP",
    "gpt2": "transposed linears, a table of positions",
    "mixtral": "experts in each block",
}
"""One architecture for each mechanism, by name, with the mechanism that it tests."""


def config_of(architecture: str) -> Any:
    """Return the transformers configuration of a name in `ARCHITECTURES`.

    Raises ValueError if transformers cannot make it.
    """
    from transformers import AutoConfig

    model_type = architecture.split()[0]
    try:
        return AutoConfig.for_model(model_type, **ARCHITECTURES[architecture])
    except Exception as error:  # a configuration class may raise any exception
        reason = " ".join(str(error).split())
        raise ValueError(f"no configuration of type {model_type}: {reason}") from error
